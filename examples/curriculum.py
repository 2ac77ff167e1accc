"""Measure the samples of a dataset, and train on the simple ones first.

    shardwise run --nproc 2 examples/curriculum.py --out /tmp/curriculum [--steps 40]

A sample is a row of numbers, and its difficulty the number of signs that change in it. The analysis runs once and goes
on where it was interrupted; training draws samples up to a percentage of the difficulties that grows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import shardwise
from shardwise.data import DistributedDataAnalyzer, RepeatingLoader

WIDTH, SAMPLES = 16, 2000


def rows() -> list[torch.Tensor]:
    """Make the dataset."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randn(SAMPLES, WIDTH, generator=generator)
    mixed = torch.rand(SAMPLES, 1, generator=generator)
    return list(mixed * steps + (1 - mixed) * steps.cumsum(1) / 4)


def changes(batch: torch.Tensor) -> torch.Tensor:
    """Return the number of changes of sign in each row."""
    return (batch[:, 1:].sign() != batch[:, :-1].sign()).sum(1)


def main() -> None:
    """Analyze, then train to predict the next number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    shardwise.init_distributed(verbose=False)
    data = rows()
    DistributedDataAnalyzer(
        data,
        batch_size=64,
        metric_names=["changes"],
        metric_functions=[changes],
        metric_types=["single_value_per_sample"],
        save_path=options.out,
    ).run_map_reduce()

    metric = {
        "index_to_sample_path": str(options.out / "changes" / "changes_index_to_sample_percentile_merged"),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": options.steps // 2, "difficulty_step": 1, "root_degree": 2},
    }
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {"changes": metric}},
            },
        },
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH - 1, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, *_ = shardwise.initialize(model=model, config=config, training_data=data)
    batches, whole = RepeatingLoader(engine.training_dataloader), torch.stack(data)
    for step, batch in zip(range(options.steps), batches, strict=False):
        engine.backward((engine(batch[:, :-1]) - batch[:, -1:]).square().mean())
        engine.step()
        if step % 10 == 9:
            with torch.no_grad():
                loss = (engine(whole[:, :-1]) - whole[:, -1:]).square().mean()
            hardest = int(changes(batch).max())
            if engine.global_rank == 0:
                print(f"step {step + 1}: loss of all samples {loss:.3f}, hardest of this batch {hardest}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
