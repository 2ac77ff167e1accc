"""Steps of ranks of unequal speed, with equal parts of a batch and with parts by measured speed (`unequal_batches`).

    python bench/unequal.py [--nproc 4] [--slow 1,2,3] [--rows 8] [--rounds 5] [--steps 10]

The model sleeps for a set time per sample in its forward pass, and twice as long in its backward pass; on the last
rank `--slow` times as long. So ranks do not compete for cores. Everything else is real. Two engines with the same model
take turns in the same processes, after 60 steps in which one divides the batch anew every 20. "best" is the time of
only the samples if they could be divided exactly by speed.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.distributed as dist
from harness import Row, data_of, job, medians, options_of, over_ranks, save, serve, show, spent, turns
from pipeline import Wait, throttle
from systems import config_of
from torch import nn

SECONDS = 4e-3
"""Of a sample's forward pass."""


class Slow(nn.Module):
    """A few small layers that take a set time per sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.seconds = seconds / len(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = Wait.apply(layer(x).tanh(), 2 * self.seconds * len(x))
            throttle(self.seconds * len(x))
        return x


class Run:
    """An engine and its batches."""

    def __init__(self, options: argparse.Namespace, seconds: float, unequal: bool) -> None:
        import shardwise
        from shardwise.data import RepeatingLoader

        torch.manual_seed(1)
        config = config_of(
            options.rows,
            1e-3,
            dataloader_drop_last=True,
            zero_optimization={"stage": options.stage},
            unequal_batches={"enabled": unequal, "every": 20, "largest": 4.0},
        )
        data = list(torch.randn(4096, 64))
        self.engine = shardwise.initialize(model=Slow(seconds), config=config, training_data=data)[0]
        self.batches = RepeatingLoader(self.engine.training_dataloader)

    def steps(self, count: int) -> dict[str, float]:
        """Train; return the seconds of a step."""

        def train() -> None:
            for _ in range(count):
                x = next(self.batches)
                self.engine.backward((self.engine(x) - x).square().mean())
                self.engine.step()

        return over_ranks({"wall": spent(train)["wall"] / count})


def measure(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all slow ranks."""
    rows: list[Row] = []
    for slow in map(float, options.slow.split(",")):
        own = SECONDS * (slow if dist.get_rank() == options.nproc - 1 else 1.0)
        equal, unequal = (Run(options, own, divided) for divided in (False, True))
        unequal.steps(60)
        ways = {"equal": functools.partial(equal.steps, options.steps)}
        ways["unequal"] = functools.partial(unequal.steps, options.steps)
        found = {name: 1e3 * medians(own)["wall"] for name, own in turns(ways, options.rounds, warm=1).items()}
        best = 3e3 * SECONDS * options.rows * options.nproc / (options.nproc - 1 + 1 / slow)
        row: Row = {"system": f"{slow:g} times", "setting": {"ranks": options.nproc}}
        row |= {"equal_ms": found["equal"], "unequal_ms": found["unequal"], "best_ms": best}
        rows.append({**row, "parts": list(unequal.engine.training_dataloader.parts)})
        for run in (equal, unequal):
            run.engine.destroy()
    return rows


def main() -> None:
    """Run the cases, print the table and keep it."""
    options = options_of(__doc__, **data_of("options.toml")["unequal"])
    serve(measure, options)
    rows = job(options.nproc)
    show(rows)
    save(options, f"unequal_{options.nproc}", rows, rounds=options.rounds, steps=options.steps)


if __name__ == "__main__":
    main()
