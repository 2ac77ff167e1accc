"""Train a model whose state is eight times as large as the device: on the host, and on a disk.

    shardwise run --nproc 1 examples/offload.py [--times 8] [--steps 20]

On a machine without a GPU the processor plays the device: what the engine holds there is counted, and limited
(`memory_limits.device`, or `shardwise run --device-limit`). The script first asks for everything on the device, shows
how that is refused, and then trains with examples/offload.json. It ends with the memory table: planned, measured, and
the limit. Only the JSON file has anything to do with offloading.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.memory import OutOfMemoryError, track_activations

WIDTH, CONTEXT = 256, 64
SYMBOLS = 256  # bytes


class Block(nn.Module):
    """A layer that mixes features, and looks at the symbols before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.look = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for last in (self.look, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x: torch.Tensor, distance: int) -> torch.Tensor:
        y = self.norm(x)
        before = F.pad(y, (0, 0, distance, 0))[:, : y.shape[1]]
        x = x + self.look(torch.cat([y, before], dim=-1))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Predicts the next byte of a text; returns its own loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.symbols(text[:, :-1])
        for number, block in enumerate(self.blocks):
            x = block(x, 1 + number % 16)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


def batch(text: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return passages of a text."""
    starts = torch.randint(len(text) - CONTEXT - 1, (rows,), generator=generator).tolist()
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def initialize(layers: int, config: dict[str, Any]) -> Any:
    """Return an engine."""
    torch.manual_seed(0)
    engine, *_ = shardwise.initialize(model=Model(layers), config=config)
    return engine


def main() -> None:
    """Ask for too much, then for what fits, and train."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", default=str(Path(__file__).with_suffix(".json")))
    found.add_argument("--times", type=float, default=8, help="how much larger than the device the state is")
    found.add_argument("--layers", type=int, default=32)
    found.add_argument("--steps", type=int, default=20)
    options = found.parse_args()
    config = json.loads(Path(options.config).read_text())
    parameters = sum(parameter.numel() for parameter in Model(options.layers).parameters())
    shardwise.init_distributed()
    # Masters, two moments of Adam and gradients in fp32, and bf16 weights; each rank has its part.
    state = 18 * parameters // torch.distributed.get_world_size()
    limit = int(state / options.times)
    print(f"{parameters:,} parameters; state of a rank {state / 2**20:.0f} MiB; device {limit / 2**20:.0f} MiB")
    config["memory_limits"] = {"device": limit}

    resident = {key: value for key, value in config.items() if key != "activation_offload"}
    resident["zero_optimization"] = {"stage": 3}
    try:
        initialize(options.layers, resident)
    except OutOfMemoryError as error:
        print(f"everything on the device is refused:\n  {error}\n")

    engine = initialize(options.layers, config)
    text = torch.tensor(list(Path(__file__).read_bytes() * 4))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    rows = engine.train_micro_batch_size_per_gpu()
    began = time.perf_counter()
    for step in range(options.steps):
        with track_activations(engine.accountant):
            loss = engine(batch(text, rows, generator))
            engine.backward(loss)
            engine.step()
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3}  loss {loss.item():.3f}")
    seconds = (time.perf_counter() - began) / options.steps
    report = engine.memory_report(batch(text, rows, generator))
    report.print()
    measured = report.total.measured
    assert measured is not None
    print(
        f"on the device {measured / 2**20:.1f} MiB of {limit / 2**20:.1f}; {state / limit:.0f} x as much state; "
        f"{seconds:.2f} s a step"
    )
    engine.destroy()


if __name__ == "__main__":
    main()
