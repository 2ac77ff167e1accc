"""Tokens to a given loss with and without a curriculum, and the time of a step by the part of layers that is kept.

    python bench/curriculum.py [--nproc 2] [--tokens 600000]
    python bench/curriculum.py --what layers [--size 7M] [--rounds 15]

`loss`: the byte-level GPT of convergence.py learns the Python language reference, on as many tokens in each way: whole
sequences, sequences that begin short (`curriculum_learning`), layers that drop tokens (`random_ltd`), layers that are
skipped (`progressive_layer_drop`). The given loss is that of the first way on held-out text at its end; a token counts
where it enters the model.

`layers`: median time of a step on one rank at several values of theta, which is reached at once.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from convergence import SIZE, WARMUP, NextByte, drawn, held_out_loss, text
from harness import Device, Row, job, options_of, save, serve, show
from systems import SIZES, Case, config_of
from systems import shardwise as shardwise_run

THETAS = (1.0, 0.9, 0.75, 0.5, 0.25)
POINTS = 60
"""Losses on held-out text that a run computes."""


def ways(steps: int) -> dict[str, dict[str, Any]]:
    """Return the sections of each way, for runs of so many steps of whole sequences."""
    most, growing = SIZE.length + 1, max(1, steps * 2 // 5)
    short = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 16,
        "max_difficulty": most,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": growing, "difficulty_step": 8},
    }
    middle = list(range(1, SIZE.layers - 1))
    dropping = {
        "enabled": True,
        "total_layer_num": SIZE.layers,
        "random_ltd_layer_num": len(middle),
        "random_ltd_layer_id": middle,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": SIZE.length // 4,
            "max_value": SIZE.length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": growing, "seq_per_step": 8},
        },
    }
    return {
        "whole sequences": {},
        "sequences begin short": {"curriculum_learning": short},
        "layers drop tokens": {
            "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": dropping}}
        },
        "layers are skipped": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 3 / max(1, steps)}},
    }


def train(name: str, sections: dict[str, Any], tokens: int, target: float | None) -> Row:
    """Train one way on a number of tokens of all ranks."""
    import shardwise

    data, held_out = text()
    torch.manual_seed(0)
    config = config_of(SIZE.rows, 3e-3, scheduler=WARMUP, zero_optimization={"stage": 2}, **sections)
    engine, *_ = shardwise.initialize(model=NextByte(), config=config)
    seen, step = 0, 0
    marks, losses = [], []
    while seen < tokens:
        lengths = engine.curriculum_scheduler_legacy
        length = SIZE.length if lengths is None else lengths.get_current_difficulty() - 1
        loss = engine(drawn(data, step))
        engine.backward(loss)
        engine.step()
        seen += length * SIZE.rows * dist.get_world_size()
        step += 1
        if seen * POINTS // tokens > len(marks) or seen >= tokens:
            marks.append(seen)
            losses.append(held_out_loss(engine, held_out))
    engine.destroy()
    wanted = losses[-1] if target is None else target
    reached = next((mark for mark, found in zip(marks, losses, strict=True) if found <= wanted), None)
    figures = {"held_out": losses[-1], "steps": step, "target": wanted}
    figures |= {"tokens_to_target": reached if reached is not None else "not reached"}
    return {"system": name, **figures, "tokens": marks, "losses": losses}


def kept(theta: float, size: str, rounds: int) -> Row:
    """Measure steps at one value of theta."""
    keys = {"progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": 100.0}}
    run = shardwise_run(Case(SIZES[size], bf16=False), 0, keys=keys)
    calls = [0]
    for block in run.engine.module.blocks:
        block.norm1.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    taken: list[float] = []
    for number in range(rounds + 2):  # theta holds from the second step on
        if number == 2:
            calls[0] = 0
        taken.append(1e3 * Device("cpu").seconds(run.step))
    run.close()
    part = calls[0] / rounds / SIZES[size].layers
    return {"system": f"theta {theta:g}", "kept": part, "median_ms": statistics.median(taken[2:])}


def measure(options: argparse.Namespace) -> list[Row]:
    """Run one part on this rank; return the rows."""
    if options.what == "layers":
        return [kept(theta, options.size, options.rounds) for theta in THETAS]
    rows: list[Row] = []
    steps = options.tokens // (SIZE.rows * SIZE.length * dist.get_world_size())
    for name, sections in ways(steps).items():
        rows.append(train(name, sections, options.tokens, rows[0]["target"] if rows else None))
    return rows


def main() -> None:
    """Run one part in a job, and keep its rows."""
    quick = {"tokens": 4000, "size": "tiny", "rounds": 3}
    options = options_of(__doc__, quick=quick, what="loss", nproc=2, tokens=600_000, size="7M", rounds=15)
    serve(measure, options)
    name, ranks = ("layer_drop", 1) if options.what == "layers" else ("curriculum", options.nproc)
    rows = job(ranks)
    show(rows)
    save(options, name, rows, ranks=ranks)


if __name__ == "__main__":
    main()
