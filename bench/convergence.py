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
from harness import Row, job, options_of, over_ranks, save, serve, show
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
    """All ways, for runs of so many steps: warm-up phases are parts of them, as in the papers.

    Where a method treats neighbours differently, the ranks are two nodes.
    """
    warm_up, node = steps * 15 // 100, max(1, nproc // 2)
    adam = {"lr": 3e-3, "weight_decay": 0.0}
    lamb = {"lr": 1e-2, "weight_decay": 0.01}
    momentum = {"lr": 0.2, "momentum": 0.9}

    def compressed(name: str, kind: str, **params: Any) -> Way:
        return Way("compression", name, more={"compression": {"type": kind, "params": params}})

    def zero(name: str, **keys: Any) -> Way:
        keys = {"stage3_param_persistence_threshold": 0, **keys}  # small as it is, the model is gathered
        return Way("zeropp", name, stage=3, more={"zero_optimization": keys})

    def local(name: str, **keys: Any) -> Way:
        keys = {"enabled": True, "replica_size": node, "sync_every": 8, **keys}
        return Way("local_sgd", name, more={"local_sgd": keys})

    def bf16(name: str, **keys: Any) -> Way:
        return Way("precision", name, more={"bf16": {"enabled": True, **keys}})

    return [
        Way("onebit", "Adam", "Adam", adam, 0),
        Way("onebit", "1-bit Adam", "OnebitAdam", {**adam, "freeze_step": warm_up}, 0),
        Way(
            "onebit",
            "0/1 Adam",
            "ZeroOneAdam",
            {
                **adam,
                "var_freeze_step": steps * 40 // 100,
                "var_update_scaler": 4,
                "local_step_scaler": steps // 4,
                "local_step_clipper": 4,
            },
            0,
        ),
        Way("onebit", "LAMB", "Lamb", lamb, 0),
        Way("onebit", "1-bit LAMB", "OnebitLamb", {**lamb, "freeze_step": warm_up}, 0),
        Way("compression", "exact"),
        compressed("PowerSGD, rank 4", "powerSGD", matrix_approximation_rank=4, start_compressing_after_step=warm_up),
        compressed("top-k, 1 %", "topk", ratio=0.01, start_compressing_after_step=warm_up),
        compressed("int8", "int8"),
        compressed("int4, error feedback", "int4", use_error_feedback=True),
        Way("compression", "SGD, momentum", "SGD", momentum),
        Way(
            "compression",
            "deep gradient compression, 1 %",
            "SGD",
            {"lr": momentum["lr"]},
            more={"compression": {"type": "dgc", "params": {"momentum": 0.9, "ratio": 0.01}}},
        ),
        zero("stage 3"),
        zero("quantised gathers", zero_quantized_weights=True),
        zero("secondary shards", zero_hpz_partition_size=node),
        zero("quantised reduction", zero_quantized_gradients=True, zero_node_size=node),
        zero(
            "all three",
            zero_quantized_weights=True,
            zero_hpz_partition_size=node,
            zero_quantized_gradients=True,
            zero_node_size=node,
        ),
        Way("local_sgd", "gradients, each step", more={"zero_optimization": {"mics_shard_size": node}}),
        local("mean, 8 steps", outer_optimizer={"type": "Average"}),
        local("Nesterov, 8 steps"),
        local("Nesterov, momentum 0.5, 8 steps", outer_optimizer={"momentum": 0.5}),
        local("Nesterov, 8 steps, 4 fragments", fragments=4),
        local("Nesterov, 8 steps, 8 bits", quantize_bits=8),
        local("Nesterov, 8 steps, 4 bits", quantize_bits=4),
        Way("precision", "fp32"),
        bf16("bf16, fp32 masters"),
        bf16("bf16 only, nearest", master_weights="none", rounding="nearest"),
        bf16("bf16 only, stochastic", master_weights="none", rounding="stochastic"),
        bf16("bf16 only, Kahan", master_weights="none", rounding="kahan"),
        Way("optimizers", "AdamW"),
        Way("optimizers", "Lion", "Lion", {"lr": 2e-4, "weight_decay": 0.1}),
        Way("optimizers", "LAMB", "Lamb", lamb),
        Way("optimizers", "Muon", "Muon", {"muon_lr": 0.02, "adam_lr": 1e-3}),
        Way("optimizers", "Adafactor", "Adafactor", {"lr": 1e-2}),
        Way("optimizers", "Adagrad", "Adagrad", {"lr": 2e-2}),
        Way("optimizers", "SGD", "SGD", momentum),
    ]


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
