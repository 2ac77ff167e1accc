"""How well lossy communication, low precision and each optimizer train, and what they send: the same GPT, real text.

    python bench/convergence.py [--nproc 4] [--steps 240] [--groups onebit,compression]

A byte-level GPT of 0.9 million parameters learns the Python language reference that comes with the interpreter. Every
rank draws its own windows of the text, by step and rank, so that all runs see the same data in the same order. Written
down every tenth step: mean loss of the ranks over the last ten steps, and bytes that rank 0 has sent so far, from the
ledger. At the end: loss on text that is held out.

The ledger counts every byte that a rank sends to another, whether through a network or memory; times are not compared
here, because on one machine there is no network that could be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Row, data_of, job, options_of, over_ranks, save, serve, show
from systems import GPT, Size, config_of

SIZE = Size(width=128, layers=4, heads=4, vocabulary=256, rows=4, length=96)
STEPS, EVERY = 240, 10
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 40, "warmup_type": "linear"}}


@dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
        group: what it is compared with.
        name: of the line in the plot.
        optimizer, params: by name.
        stage: of ZeRO.
        more: further keys of the configuration.
    """

    group: str
    name: str
    optimizer: str = "AdamW"
    params: Mapping[str, Any] = field(default_factory=lambda: {"lr": 3e-3})
    stage: int = 2
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The configuration for `shardwise.initialize`."""
        found = config_of(SIZE.rows, scheduler=WARMUP, zero_optimization={"stage": self.stage})
        found["optimizer"] = {"type": self.optimizer, "params": dict(self.params)}
        for name, value in self.more.items():
            found[name] = {**found.get(name, {}), **value} if isinstance(value, Mapping) else value
        return found


def ways(steps: int, nproc: int) -> list[Way]:
    """All ways (convergence.toml), for runs of so many steps."""
    given = {"warm_up": steps * 15 // 100, "frozen": steps * 40 // 100, "quarter": steps // 4}
    groups = data_of("convergence.toml", node=max(1, nproc // 2), **given)
    return [Way(group, name, **way) for group, own in groups.items() for name, way in own.items()]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes that are held out."""
    from pydoc_data.topics import topics

    paragraphs = list(dict.fromkeys("\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")))
    border = len(paragraphs) * 95 // 100
    parts = (paragraphs[:border], paragraphs[border:])
    train, held_out = (torch.tensor(list("\n\n".join(part).encode()), dtype=torch.int64) for part in parts)
    return train, held_out


class Logits(GPT):
    """The GPT of the other benchmarks, which returns logits of the next byte."""

    def __init__(self, layers: int = SIZE.layers) -> None:
        super().__init__(replace(SIZE, layers=layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, 256)."""
        return self.head(self.norm(self.hidden(ids)))


class NextByte(Logits):
    """The same, which returns its own loss."""

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy; `windows`: (rows, length + 1) bytes."""
        return loss_of(super().forward(windows[:, :-1]), windows)


def loss_of(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the bytes that follow."""
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def windows(data: torch.Tensor, seed: int, rows: int) -> torch.Tensor:
    """Draw windows by a seed."""
    starts = torch.randint(0, len(data) - SIZE.length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + SIZE.length + 1] for start in starts])


def drawn(data: torch.Tensor, step: int) -> torch.Tensor:
    """Draw this rank's windows of a step."""
    return windows(data, step * dist.get_world_size() + dist.get_rank(), SIZE.rows)


def mean(value: torch.Tensor) -> float:
    """Return the mean over ranks."""
    return over_ranks({"": float(value.detach())})[""]


def held_out_loss(engine: Any, data: torch.Tensor, draws: int = 4) -> float:
    """Return the loss of an engine that returns it, or logits, on held-out text: the mean over ranks."""
    engine.eval()
    with torch.no_grad():
        rows = (windows(data, seed, 16) for seed in range(draws))
        returns_loss = isinstance(engine.module, NextByte)
        losses = [engine(own) if returns_loss else loss_of(engine(own[:, :-1]), own) for own in rows]
    engine.train()
    return mean(torch.stack(losses).mean())


def train(way: Way, steps: int) -> Row:
    """Train one way on this rank, with the others."""
    import shardwise

    data, held_out = text()
    torch.manual_seed(0)
    engine, *_ = shardwise.initialize(model=NextByte(), config=way.config())
    seen, sent, marks, total = [], [], [], torch.zeros(())
    between, known = 0, engine.ledger.sequence  # bytes to other replicas, and the first record that is not counted
    for step in range(steps):
        loss = engine(drawn(data, step))
        engine.backward(loss)
        engine.step()
        records = list(engine.ledger.records(known))
        between += sum(record.sent for record in records if record.group == "replicate")
        known = records[-1].sequence + 1 if records else known
        total += loss.detach()
        if (step + 1) % EVERY == 0:
            seen.append(mean(total / EVERY))
            sent.append(sum(totals.sent for totals in engine.ledger.totals.values()))
            marks.append(step + 1)
            total.zero_()
    engine.synchronize_replicas()
    final = held_out_loss(engine, held_out, 8)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    engine.destroy()
    last = (sent[-1] - sent[-2]) / EVERY / parameters
    figures = {"last_loss": seen[-1], "held_out": final, "parameters": parameters}
    figures |= {"sent_bytes_a_parameter": sent[-1] / steps / parameters, "last_sent_bytes_a_parameter": last}
    figures["replicas_sent_bytes_a_parameter"] = between / steps / parameters
    curves = {"steps": marks, "loss": seen, "sent_bytes": sent}
    return {"system": way.name, **figures, **curves, "group": way.group, "configuration": way.config()}


def main() -> None:
    """Train every way in one job, print a line for each and keep the curves."""
    options = options_of(__doc__, quick={"steps": 2 * EVERY}, nproc=4, steps=STEPS, groups="", systems="")
    chosen = [
        way
        for way in ways(options.steps, options.nproc)
        if (not options.groups or way.group in options.groups.split(","))
        and (not options.systems or way.name in options.systems.split(";"))
    ]
    serve(lambda _: [train(way, options.steps) for way in chosen], options)
    rows = job(options.nproc)
    for group in dict.fromkeys(row["group"] for row in rows):
        part = [row for row in rows if row["group"] == group]
        configurations = {row["system"]: row.pop("configuration") for row in part}
        show(part)
        notes = {"ranks": options.nproc, "steps": options.steps, "configurations": configurations}
        save(options, f"convergence_{group}", part, **notes)


if __name__ == "__main__":
    main()
