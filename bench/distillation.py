"""A small student of a larger GPT, trained plainly and distilled: loss on held-out text by steps.

    python bench/distillation.py [--nproc 2] [--steps 240] [--teacher 480]

The GPT, text and data order are those of bench/convergence.py. The teacher (4 blocks) is trained first, then sharded
with ZeRO stage 3 without an optimizer, next to students of one block: trained on the text, begun at random or with
the teacher's first block, embeddings and head; and both also with the teacher's logits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from convergence import EVERY, SIZE, mean, text, windows
from harness import Row, job, options_of, save, serve, show
from systems import GPT

LAYERS = 1


class Logits(torch.nn.Module):
    """The GPT of the other benchmarks, which returns logits of the next byte."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gpt = GPT(replace(SIZE, layers=layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, 256)."""
        x = self.gpt.tokens(ids) + self.gpt.places(torch.arange(ids.shape[1]))
        for block in self.gpt.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(x))


def own_loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the bytes that follow."""
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def engine_of(model: torch.nn.Module, trains: bool) -> Any:
    """Return an engine at stage 3."""
    import shardwise

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SIZE.rows,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 40, "warmup_type": "linear"}}
    return shardwise.initialize(model=model, config=config)[0]


def held_out_loss(engine: Any, data: torch.Tensor) -> float:
    """Return the loss of an engine on held-out text, the mean over ranks."""
    engine.eval()
    with torch.no_grad():
        drawn = [windows(data, seed, 16) for seed in range(4)]
        found = mean(torch.stack([own_loss(engine(rows[:, :-1]), rows) for rows in drawn]).mean())
    engine.train()
    return found


def train(name: str, engine: Any, steps: int, distillation: Any = None) -> Row:
    """Train an engine, with the others, and return held-out losses by steps."""
    data, held_out = text()
    marks, losses, began = [], [], time.perf_counter()
    for step in range(steps):
        rows = windows(data, step * dist.get_world_size() + dist.get_rank(), SIZE.rows)
        logits = engine(rows[:, :-1])
        loss = own_loss(logits, rows)
        engine.backward(loss if distillation is None else distillation(logits, loss, rows[:, :-1]))
        engine.step()
        if (step + 1) % EVERY == 0:
            marks.append(step + 1)
            losses.append(held_out_loss(engine, held_out))
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    taken = time.perf_counter() - began
    return {"system": name, "held_out": losses[-1], "steps": marks, "loss": losses, "parameters": parameters} | {
        "taken_s": taken
    }


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Train the teacher and each student."""
    from shardwise.compression import Distillation, student_initialization

    torch.manual_seed(0)
    model = Logits(SIZE.layers)
    engine = engine_of(model, trains=True)
    found = [train("teacher", engine, options.teacher)]
    engine.destroy()
    teacher = engine_of(model.requires_grad_(False), trains=False)
    reduction = {
        "enabled": True,
        "keep_number_layer": LAYERS,
        "module_name_prefix": "gpt.blocks",
        "teacher_layer": [0],
        "other_module_name": ["gpt.tokens", "gpt.places", "gpt.norm", "gpt.head"],
    }
    for name, distilled, copied in (
        ("student", False, False),
        ("student, layers", False, True),
        ("student, logits", True, False),
        ("student, logits and layers", True, True),
    ):
        torch.manual_seed(1)
        student = Logits(LAYERS)
        if copied:
            section = {"compression_training": {"layer_reduction": reduction}}
            student_initialization(student, teacher.module, section)
        engine = engine_of(student, trains=True)
        found.append(train(name, engine, options.steps, Distillation(teacher) if distilled else None))
        engine.destroy()
    teacher.destroy()
    return found


def main() -> None:
    """Train in one job, print the losses and keep the curves."""
    quick = {"steps": 2 * EVERY, "teacher": 2 * EVERY}
    options = options_of(__doc__, quick=quick, nproc=2, steps=240, teacher=480)
    serve(rows_of, options)
    rows = job(options.nproc)
    show(rows)
    save(options, "distillation", rows, ranks=options.nproc, steps=options.steps, teacher=options.teacher)


if __name__ == "__main__":
    main()
