"""DeepSpeed's HelloDeepSpeed: RoBERTa learns masked words. Random tokens take the place of the text.

The folder for checkpoints has the time of day in its name, so that it differs between ranks.

    deepspeed --num_gpus 2 bert.py --checkpoint_dir runs
"""

import argparse
import datetime
import json
import os
import pathlib

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from transformers.models.roberta import RobertaConfig, RobertaModel
from transformers.models.roberta.modeling_roberta import RobertaLMHead, RobertaPreTrainedModel

PAD, MASK, WORDS, LENGTH, BATCH = 1, 3, 96, 20, 4


class Head(RobertaLMHead):
    """Its last matrix is that of the embedding; only masked places are computed."""

    def __init__(self, config, embedding_weight):
        super().__init__(config)
        self.decoder.weight = embedding_weight

    def forward(self, features, places):
        return super().forward(torch.index_select(features.view(-1, features.shape[-1]), 0, places))


class RobertaMLMModel(RobertaPreTrainedModel):
    def __init__(self, config, encoder):
        super().__init__(config)
        self.encoder = encoder
        self.lm_head = Head(config, encoder.embeddings.word_embeddings.weight)
        self.lm_head.apply(self._init_weights)

    def forward(self, src_tokens, attention_mask, tgt_tokens):
        output, *_ = self.encoder(input_ids=src_tokens, attention_mask=attention_mask, return_dict=False)
        places = torch.nonzero((tgt_tokens != PAD).view(-1)).view(-1)
        scores = self.lm_head(output, places)
        target = torch.index_select(tgt_tokens.view(-1), 0, places)
        return nn.CrossEntropyLoss(ignore_index=-1)(scores.view(-1, WORDS), target)


def create_model():
    config = RobertaConfig(
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=LENGTH + 4,
        num_attention_heads=2,
        num_hidden_layers=2,
        pad_token_id=PAD,
        type_vocab_size=1,
        vocab_size=WORDS,
    )
    return RobertaMLMModel(config, RobertaModel(config))


def collate(batch):
    longest = max(len(tokens) for tokens, _ in batch)
    src, tgt = (
        torch.LongTensor([row + [PAD] * (longest - len(row)) for row in rows]) for rows in zip(*batch, strict=True)
    )
    return {"src_tokens": src, "tgt_tokens": tgt, "attention_mask": src.ne(PAD).type_as(src)}


class MLMDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        drawn = np.random.default_rng(index)
        tokens = np.arange(drawn.integers(8, LENGTH)) * 7 % (WORDS - 4) + 4
        masked = drawn.random(len(tokens)) < 0.15
        masked[0] = True
        labels = np.where(masked, tokens, PAD)
        return np.where(masked, MASK, tokens).tolist(), labels.tolist()


def create_experiment_dir(checkpoint_dir, arguments):
    path = checkpoint_dir / f"bert_pretrain.{datetime.datetime.now():%Y.%m.%d.%H.%M.%S.%f}"
    if int(os.environ["RANK"]) == 0:
        path.mkdir(exist_ok=False)
        (path / "hparams.json").write_text(json.dumps(arguments))
    return path


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", type=pathlib.Path)
    parser.add_argument("--num_iterations", type=int, default=7)
    parser.add_argument("--checkpoint_every", type=int, default=4)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of DeepSpeed")
    args = parser.parse_args(given)
    torch.manual_seed(42)
    local = get_accelerator().is_available() and args.local_rank > -1
    device = torch.device(get_accelerator().device_name(), args.local_rank) if local else torch.device("cpu")
    iterator = iter(torch.utils.data.DataLoader(MLMDataset(), batch_size=BATCH, shuffle=True, collate_fn=collate))
    model = create_model()
    if args.plain:
        return plain(args, model, iterator)

    args.checkpoint_dir.mkdir(exist_ok=True)
    exp_dir = create_experiment_dir(args.checkpoint_dir, {"batch_size": BATCH})
    ds_config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage, "offload_optimizer": {"device": "cpu"}},
    }
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    model.train()
    losses, means = [], []
    for step, batch in enumerate(iterator, start=1):
        if step >= args.num_iterations:
            break
        for key, value in batch.items():
            batch[key] = value.to(device)
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        means.append(np.mean(losses))
        if step % args.checkpoint_every == 0:
            model.save_checkpoint(save_dir=exp_dir, client_state={"checkpoint_step": step})
    if step % args.checkpoint_every != 0:
        model.save_checkpoint(save_dir=exp_dir, client_state={"checkpoint_step": step})
    return {"losses": means}


def plain(args, model, iterator):
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # the encoder's pooler
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, means = [], []
    for _, batch in zip(range(args.num_iterations - 1), iterator, strict=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        means.append(np.mean(losses))
    return {"losses": means}


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
