"""Ranks that differ: replicas that train on their own between exchanges (local SGD), and micro-batches by speed."""

from __future__ import annotations

from typing import Literal

from shardwise.errors import ConflictError

from .base import At, ConfigSection, Contradictions, Int, Ints, key, section


class OuterOptimizer(ConfigSection):
    """`local_sgd.outer_optimizer`: the optimizer whose gradient is the mean change of the parameters."""

    type: Literal["Nesterov", "SGD", "Average"] = key(
        "Nesterov", "SGD with Nesterov momentum (DiLoCo), SGD with momentum, or the mean of the parameters."
    )
    lr: float | None = key(None, "Learning rate; null: 0.7 for Nesterov, 1 for SGD.", gt=0)
    momentum: float | None = key(None, "Momentum; null: 0.9 for Nesterov, 0 for SGD.", ge=0, lt=1)

    @property
    def rate(self) -> float:
        """The learning rate, by default that of the type."""
        return (0.7 if self.type == "Nesterov" else 1.0) if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """The momentum, by default that of the type; 0: none."""
        return (0.9 if self.type == "Nesterov" else 0.0) if self.momentum is None else self.momentum

    def contradictions(self, at: At) -> Contradictions:
        """Yield options of a mean."""
        for name in ("lr", "momentum"):
            if self.type == "Average" and getattr(self, name) is not None:
                yield name, f"belongs to {at('type')} Nesterov and SGD, which is Average; remove it", ConflictError


class LocalSGD(ConfigSection):
    """`local_sgd`: local SGD and DiLoCo. Not a section of DeepSpeed."""

    enabled: bool = key(False, "Replicas exchange parameters at intervals instead of gradients in each step.")
    sync_every: Int = key(100, "Steps between two exchanges of a parameter.", gt=0)
    replica_size: Int | None = key(
        None,
        "Ranks of a replica, on one machine if they fit, over which ZeRO divides; null: of the mesh, or a machine.",
        gt=0,
    )
    outer_optimizer: OuterOptimizer = section(OuterOptimizer, "Steps on the mean change over replicas.")
    fragments: Int = key(1, "Parts of the model that are exchanged at different steps of an interval.", gt=0)
    quantize_bits: Literal[4, 8] | None = key(
        None, "Bits of an exchanged value, with error feedback; null: fp32, exactly."
    )
    overlap_steps: Int = key(0, "Steps that go on during an exchange, before its result is merged; 0: none.", ge=0)
    overlap_mixing: float | None = key(
        None, "Part of a replica's own parameters in those merged after `overlap_steps`; null: 0.5.", ge=0, lt=1
    )

    @property
    def mixing(self) -> float:
        """The part of a replica's own parameters in those it goes on with after an exchange."""
        if not self.overlap_steps:
            return 0.0
        return 0.5 if self.overlap_mixing is None else self.overlap_mixing

    def contradictions(self, at: At) -> Contradictions:
        """Yield more fragments than steps, and exchanges that would overlap each other."""
        if self.fragments > self.sync_every:
            message = f"is {self.fragments}, and {at('sync_every')} = {self.sync_every}: one step has one at most"
            yield "fragments", message, ConflictError
        elif self.overlap_steps >= (begins := self.sync_every // self.fragments):
            message = f"is {self.overlap_steps}, and the next exchange begins after {begins} steps; lower it"
            yield "overlap_steps", message, ConflictError
        if self.overlap_mixing is not None and not self.overlap_steps:
            yield "overlap_mixing", f"belongs to {at('overlap_steps')}, which is 0; remove it", ConflictError


class UnequalBatches(ConfigSection):
    """`unequal_batches`: data-parallel ranks take parts of different size of a batch, which stays the same. Not a
    section of DeepSpeed.
    """

    enabled: bool = key(
        False,
        "Divide each micro-batch of all ranks by their speed, or as `samples` says. Losses count by their samples.",
    )
    samples: Ints | None = key(
        None,
        "Samples of each data-parallel rank in a micro-batch, with a mean of train_micro_batch_size_per_gpu; null: by "
        "measured speed.",
    )
    every: Int = key(100, "Steps between two measurements; with `local_sgd` at the next exchange.", gt=0)
    largest: float = key(
        2.0, "Most samples of a rank, in multiples of train_micro_batch_size_per_gpu: its memory must suffice.", ge=1
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield samples that are no parts."""
        if self.samples is not None and min(self.samples, default=0) < 1:
            yield "samples", f"is {self.samples}; each rank needs at least 1", ConflictError
