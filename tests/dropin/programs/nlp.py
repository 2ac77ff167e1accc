"""Accelerate's nlp_example.py: BERT tells pairs of sentences apart, with torch's optimizer and transformers' schedule.

accelerate launch --use_deepspeed --zero_stage 2 nlp.py --model bert
"""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DistributedType
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    set_seed,
)

MAX_GPU_BATCH_SIZE, EVAL_BATCH_SIZE = 4, 6


def get_dataloaders(accelerator, batch_size, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = [f"w{number}" for number in range(40)]
    pairs = [
        (" ".join(words[i % 7 : i % 7 + 5]), " ".join(words[(i * 3) % 11 : (i * 3) % 11 + 4 + i % 3]), i % 2)
        for i in range(37)
    ]
    with accelerator.main_process_first():
        rows = [dict(tokenizer(first, second, truncation=True), labels=label) for first, second, label in pairs]

    def collate_fn(examples):
        max_length = 128 if accelerator.distributed_type == DistributedType.XLA else None
        multiple = 8 if accelerator.mixed_precision != "no" else None
        return tokenizer.pad(
            examples, padding="longest", max_length=max_length, pad_to_multiple_of=multiple, return_tensors="pt"
        )

    train = DataLoader(
        rows[:30],
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        collate_fn=collate_fn,
        batch_size=batch_size,
        drop_last=True,
    )
    return train, DataLoader(rows[30:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(given)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    num_epochs, batch_size = 2, 4
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size, args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, return_dict=True)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=3,
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    told = {"losses": [], "evaluations": []}
    for _ in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            loss = model(**batch).loss
            told["losses"].append(loss.item())
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        scores = []
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            logits, references = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
            scores.append(torch.nn.functional.cross_entropy(logits.float(), references, reduction="none"))
        rows = torch.cat(scores)
        assert len(rows) == 7, "gather_for_metrics drops what fills up the last batch"
        told["evaluations"].append(rows.mean().item())
    return told


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
