"""Accelerate's deepspeed_with_config_support.py: a causal language model with the optimizer of the configuration.

accelerate launch --use_deepspeed --deepspeed_config_file z3.json clm_no_trainer.py --model model --output_dir out
"""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

logger = get_logger(__name__)


def evaluate(args, model, eval_dataloader, accelerator):
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(args.batch_size)))
    eval_loss = torch.mean(torch.cat(losses))
    return math.exp(eval_loss), eval_loss


def warmup_decay(args, step):
    """What the configuration's WarmupDecayLR does; Accelerate counts a step of each of two ranks."""
    warmup, total = args.num_warmup_steps, math.ceil(args.max_train_steps / 2)
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / (total - warmup))


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--train_file", default="text.txt")
    parser.add_argument("--output_dir")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--max_train_steps", type=int, default=10)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--plain", choices=["fp32", "bf16"], help="without DeepSpeed")
    args = parser.parse_args(given)

    if args.plain:
        accelerator = Accelerator(cpu=True, mixed_precision="no" if args.plain == "fp32" else "bf16")
    else:
        accelerator = Accelerator()
    logger.info(accelerator.state, main_process_only=False)
    set_seed(0)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config)
    model.resize_token_embeddings(len(tokenizer))
    with accelerator.main_process_first(), open(args.train_file) as file:
        tokens = tokenizer(file.read())["input_ids"]
        blocks = [tokens[i : i + 16] for i in range(0, len(tokens) // 16 * 16, 16)]
        rows = [{"input_ids": block, "labels": list(block)} for block in blocks]
    loaders = {
        "train": DataLoader(
            rows[6:],
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            collate_fn=default_data_collator,
            batch_size=args.batch_size,
        ),
        "eval": DataLoader(rows[:6], collate_fn=default_data_collator, batch_size=args.batch_size),
    }
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    plugin = accelerator.state.deepspeed_plugin
    dummy = plugin is not None and "optimizer" in plugin.deepspeed_config
    optimizer = (DummyOptim if dummy else torch.optim.AdamW)(groups, lr=args.learning_rate)
    if plugin is not None:
        args.gradient_accumulation_steps = plugin.deepspeed_config["gradient_accumulation_steps"]
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_decay(args, step // 2))
    else:
        lr_scheduler = DummyScheduler(
            optimizer, total_num_steps=args.max_train_steps, warmup_num_steps=args.num_warmup_steps
        )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, loaders["train"], loaders["eval"], lr_scheduler
    )
    losses, completed_steps = [], 0
    model.train()
    for step, batch in enumerate(train_dataloader):
        loss = model(**batch).loss
        losses.append(loss.item())
        accelerator.backward(loss / args.gradient_accumulation_steps)
        if (step + 1) % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
        if completed_steps >= args.max_train_steps:
            break
    perplexity, eval_loss = evaluate(args, model, eval_dataloader, accelerator)
    told = {"losses": losses, "evaluation": eval_loss.item()}
    if not args.plain:
        assert model.save_checkpoint(args.output_dir, 0, {"epoch": 0, "last_global_step": completed_steps})
        _, state = model.load_checkpoint(args.output_dir, tag="0", load_optimizer_states=True)
        assert state["last_global_step"] == completed_steps
        again, _ = evaluate(args, model, eval_dataloader, accelerator)
        if again != perplexity:
            raise AssertionError(
                f"Best metric {perplexity} does not match the metric {again} of the loaded best model."
            )
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    return told


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
