"""`generate` at stage 3: the tokens of one process, with prompts and lengths that differ between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.dropin.clients import MISSING, Ranks, forget, gpt2, tokens
from tests.dropin.test_trainer import config

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

ENDS = list(range(40, 64))
"""Tokens that end a sequence: so many that ends differ between sequences."""


def t5() -> Any:
    """A T5 of two small blocks whose outputs vary."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32, "d_kv": 8}
    made = T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, initializer_factor=4.0)
    )
    made.generation_config.eos_token_id = ENDS
    return made


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Inputs of 3 to 9 tokens with labels of 6."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(1, 48, (3 + number % 7,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": torch.randint(1, 64, (6,), generator=generator).tolist()})
    return made


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["labels"] for r in batch])}


def seq2seq(directory: str, stage: int) -> Any:
    """A Seq2SeqTrainer that generates when it evaluates; 7 rows are uneven for two ranks and batches of two."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    forget()
    arguments = Seq2SeqTrainingArguments(
        directory,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        predict_with_generate=True,
        generation_max_length=12,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        deepspeed=config(stage),
    )
    return Seq2SeqTrainer(t5(), arguments, train_dataset=rows(16, 1), eval_dataset=rows(7, 2), data_collator=padded)


def alone(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """What one process generates from these weights for the rows of the evaluation, in the same batches."""
    model = t5().eval()
    model.load_state_dict(weights)
    given = rows(7, 2)
    found = []
    for begin in range(0, 8, 2):
        batch = padded([given[i % 7] for i in range(begin, begin + 2)])
        del batch["labels"]
        found += to_length(model.generate(**batch, max_length=12), 20)
    return found[:7]


def to_length(made: torch.Tensor, length: int) -> list[list[int]]:
    """Rows of tokens, padded."""
    return torch.nn.functional.pad(made, (0, length - made.shape[1])).tolist()


def fitted(directory: str, stage: int) -> Any:
    """Train, evaluate, generate, train again and save, in one run."""
    from transformers import T5ForConditionalGeneration

    ran = seq2seq(f"{directory}/{stage}", stage)
    ran.train()
    losses = [ran.evaluate()["eval_loss"]]
    # The rows that make the last batch full are among the predictions.
    first = ran.predict(rows(7, 2)).predictions.tolist()[:7]
    with ran.deepspeed.gathered():
        weights = {name: value.clone() for name, value in ran.model.state_dict().items()}
    # The Trainer destroys its engine when it begins again, and would go on with it.
    ran.model_wrapped = ran.model
    ran.train()
    losses.append(ran.evaluate()["eval_loss"])
    ran.save_model(f"{directory}/{stage}/final")
    second = ran.predict(rows(7, 2)).predictions.tolist()[:7]
    ran.deepspeed.destroy()
    forget()
    dist.barrier()
    saved = T5ForConditionalGeneration.from_pretrained(f"{directory}/{stage}/final").state_dict()
    assert first == alone(weights) and second == alone(saved) and first != second
    return first, second, losses


def untrained(directory: str) -> Any:
    """Generate at stage 3 without training: the Trainer makes an engine that has no optimizer."""
    ran = seq2seq(f"{directory}/inference", 3)
    found = ran.predict(rows(7, 2)).predictions.tolist()[:7]
    assert ran.deepspeed.optimizer is None and ran.deepspeed.lr_scheduler is None
    ran.deepspeed.destroy()
    assert found == alone(t5().state_dict())
    return found


def stages(directory: str) -> list[Any]:
    return [fitted(directory, 2), fitted(directory, 3), untrained(directory)]


@pytest.mark.thorough
def test_seq2seq_trainer(ranks: Ranks, tmp_path: Path) -> None:
    for second, third, before in ranks(stages, 2, str(tmp_path)):
        assert second == third and before != third[0]
        assert len({sum(token != 0 for token in row) for row in third[0]}) > 2


def prompt(rank: int) -> torch.Tensor:
    """A prompt whose length depends on the rank."""
    return torch.randint(1, 48, (1, 4 + 5 * rank), generator=torch.Generator().manual_seed(rank))


def causal() -> list[int]:
    """Train a GPT-2 at stage 3 and generate in between: in step with the other rank, and at one's own pace."""
    from deepspeed.runtime.zero.partition_parameters import unwrap_model_for_generation  # type: ignore[import-not-found]
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    # While it is alive, `generate` keeps in step with the other ranks.
    keep = HfDeepSpeedConfig(settings)
    assert keep.is_zero3()
    model = gpt2()
    engine, *_ = shardwise.initialize(model=model, config=settings)
    rank = dist.get_rank()
    limit = {"max_new_tokens": (3, 6)[rank], "pad_token_id": 0, "eos_token_id": 64, "do_sample": False}
    lengths = []
    for how in ("in step", "alone", "in step"):
        engine.train()
        batch = tokens(4)[2 * rank : 2 * rank + 2]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        engine.eval()
        if how == "in step":
            made = engine.module.generate(prompt(rank), **limit)
        else:
            with unwrap_model_for_generation(engine) as whole:
                made = whole.generate(prompt(rank), synced_gpus=False, **limit)
        with engine.gathered():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        plain = gpt2()
        plain.load_state_dict(weights)
        assert made.tolist() == plain.eval().generate(prompt(rank), synced_gpus=False, **limit).tolist(), how
        lengths.append(made.shape[1])
    engine.destroy()
    return lengths


def test_prompts_and_lengths_differ_between_ranks(ranks: Ranks) -> None:
    assert ranks(causal, 2) == [[7] * 3, [15] * 3]
