"""A small student of a larger GPT, trained plainly and distilled: loss on held-out text by steps.

    python bench/distillation.py [--nproc 2] [--steps 240] [--teacher 480]

The GPT, text and data order are those of bench/convergence.py. The teacher (4 blocks) is trained first, then sharded
with ZeRO stage 3 without an optimizer, next to students of one block: trained on the text, begun at random or with
the teacher's first block, embeddings and head; and both also with the teacher's logits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from convergence import EVERY, SIZE, WARMUP, Logits, drawn, held_out_loss, loss_of, text
from harness import Row, job, options_of, save, serve, show
from systems import config_of

LAYERS = 1


def engine_of(model: torch.nn.Module, trains: bool) -> Any:
    """Return an engine at stage 3."""
    import shardwise

    config = config_of(SIZE.rows, 3e-3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    if trains:
        config["scheduler"] = WARMUP
    else:
        del config["optimizer"]
    return shardwise.initialize(model=model, config=config)[0]


def train(name: str, engine: Any, steps: int, distillation: Any = None) -> Row:
    """Train an engine, with the others, and return held-out losses by steps."""
    data, held_out = text()
    marks, losses = [], []
    for step in range(steps):
        rows = drawn(data, step)
        logits = engine(rows[:, :-1])
        loss = loss_of(logits, rows)
        engine.backward(loss if distillation is None else distillation(logits, loss, rows[:, :-1]))
        engine.step()
        if (step + 1) % EVERY == 0:
            marks.append(step + 1)
            losses.append(held_out_loss(engine, held_out))
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    figures = {"held_out": losses[-1], "parameters": parameters}
    return {"system": name, **figures, "steps": marks, "loss": losses}


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Train the teacher and each student."""
    from shardwise.compression import Distillation, student_initialization

    torch.manual_seed(0)
    model = Logits()
    engine = engine_of(model, trains=True)
    found = [train("teacher", engine, options.teacher)]
    engine.destroy()
    teacher = engine_of(model.requires_grad_(False), trains=False)
    reduction = {
        "enabled": True,
        "keep_number_layer": LAYERS,
        "module_name_prefix": "blocks",
        "teacher_layer": [0],
        "other_module_name": ["tokens", "places", "norm", "head"],
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
