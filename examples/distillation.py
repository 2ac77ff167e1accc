"""Distil a language model into a smaller one; teacher and student are both sharded.

    shardwise run --nproc 2 examples/distillation.py [--steps 60] [--teacher-steps 120]

A Llama of four layers learns the bytes of the Python language reference. A student of two layers begins with two of its
layers, and learns from its logits and hidden states. Another student is trained on the text alone.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shardwise
from shardwise.compression import Distillation, student_initialization

LENGTH, ROWS = 64, 8
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}
REDUCTION = {
    "enabled": True,
    "keep_number_layer": 2,
    "module_name_prefix": "model.layers",
    "teacher_layer": [1, 3],
    "other_module_name": ["model.embed_tokens", "model.norm", "lm_head"],
}


def llama(layers: int) -> Any:
    """Return a small Llama that reads bytes."""
    size = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=layers, use_cache=False, **size)
    return transformers.LlamaForCausalLM(config)


def engine_of(model: Any, trains: bool) -> Any:
    """Return an engine; without an optimizer it has no gradients and no optimizer state."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": ZERO}
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    return shardwise.initialize(model=model, config=config)[0]


def batch(text: torch.Tensor, number: int) -> torch.Tensor:
    """Draw windows of the text by a number."""
    starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(number))
    return torch.stack([text[start : start + LENGTH] for start in starts])


def train(name: str, engine: Any, text: torch.Tensor, steps: int, distillation: Distillation | None = None) -> None:
    """Train, and print the loss on text that was not seen."""
    border = len(text) * 9 // 10
    engine.train()
    for step in range(steps):
        ids = batch(text[:border], step * engine.world_size + engine.global_rank).to(engine.device)
        outputs = engine(input_ids=ids, labels=ids)
        loss = outputs.loss
        if distillation is not None:
            loss = distillation(outputs, loss, input_ids=ids)
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        drawn = [batch(text[border:], seed).to(engine.device) for seed in range(4)]
        loss = torch.stack([engine(input_ids=ids, labels=ids).loss for ids in drawn]).mean()
    dist.all_reduce(loss)
    if engine.global_rank == 0:
        print(f"{name}: held-out loss {float(loss) / engine.world_size:.3f}", flush=True)


def main() -> None:
    """Train a teacher and two students."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--teacher-steps", type=int, default=120)
    options = parser.parse_args()
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))

    torch.manual_seed(0)
    model = llama(4)
    engine = engine_of(model, trains=True)
    train("teacher", engine, text, options.teacher_steps)
    engine.destroy()
    teacher = engine_of(model.requires_grad_(False), trains=False)  # sharded, without gradients

    plain = engine_of(llama(2), trains=True)
    train("student, trained plainly", plain, text, options.steps)
    plain.destroy()

    student = llama(2)
    student_initialization(student, teacher.module, {"compression_training": {"layer_reduction": REDUCTION}})
    engine = engine_of(student, trains=True)
    hidden = {"model.layers.0": "model.layers.1", "model.layers.1": "model.layers.3"}
    distillation = Distillation(teacher, student=engine, hidden=hidden, hidden_weight=0.1)
    train("student, distilled", engine, text, options.steps, distillation)
    engine.destroy()
    teacher.destroy()


if __name__ == "__main__":
    main()
