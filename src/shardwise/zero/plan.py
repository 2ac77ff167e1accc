"""The plan table: what a ZeRO stage means.

A stage is a row that says what is sharded over the data-parallel ranks (Rajbhandari et al., "ZeRO: Memory optimizations
toward training trillion parameter models", 2020). All other code reads the columns; stage numbers occur in the
configuration and here, nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config.schema import ZeroConfig


@dataclass(frozen=True)
class Row:
    """What one stage shards."""

    optimizer: bool
    gradients: bool
    parameters: bool


TABLE: dict[int, Row] = {
    0: Row(optimizer=False, gradients=False, parameters=False),
    1: Row(optimizer=True, gradients=False, parameters=False),
    2: Row(optimizer=True, gradients=True, parameters=False),
    3: Row(optimizer=True, gradients=True, parameters=True),
}


@dataclass(frozen=True)
class Plan:
    """How one engine shards, derived from the configuration.

    Attributes:
        stage: the number the user wrote; for messages only.
        reduces_micro_batches: whether the row of that stage reduces every micro-batch. One rank has nothing to shard,
            but a script must not find that out only when it gets a second one.
        shard_optimizer: optimizer state and master weights cover only this rank's range.
        shard_gradients: each micro-batch is reduced into this rank's range, instead of being added up locally and
            reduced once at the accumulation boundary.
        shard_parameters: parameters are gathered before use and released after it.
        unit_cap: largest number of elements in a unit (a larger parameter is a unit of its own).
        prefetch: whether the next unit is gathered while the current one computes.
        prefetch_elements: how many elements may be on their way beyond the next unit.
        keeps_what_saves: units whose release would not lower the peak stay gathered.
        persistent_elements: so do units of at most this many elements.
        persistent_total: of the latter at most this many elements in all.
        quantized_weights: gathers for passes that are trained travel as 8-bit codes (ZeRO++, qwZ).
        secondary: ranks over which a second copy of the parameters is sharded, for backward passes (ZeRO++, hpZ); 1:
            there is none.
    """

    stage: int
    reduces_micro_batches: bool
    shard_optimizer: bool
    shard_gradients: bool
    shard_parameters: bool
    unit_cap: int
    prefetch: bool = True
    prefetch_elements: int = 0
    keeps_what_saves: bool = True
    persistent_elements: int = 0
    persistent_total: int = 0
    quantized_weights: bool = False
    secondary: int = 1

    @property
    def ahead(self) -> int | None:
        """Elements that may be gathered beyond the next unit; None if not even that is."""
        return self.prefetch_elements if self.prefetch else None

    @classmethod
    def of(cls, zero: ZeroConfig, world: int) -> Plan:
        """Derive the plan from the `zero_optimization` section for `world` ranks; one rank has nothing to shard."""
        row = TABLE[zero.stage if world > 1 else 0]
        caps = [int(zero.reduce_bucket_size)]
        if row.optimizer and not row.parameters:
            caps.append(int(zero.allgather_bucket_size))
        if row.parameters:
            # Two units are gathered at a time: the one that computes and the one being prefetched.
            caps.append(int(zero.stage3_max_live_parameters) // 2)
        ahead = zero.stage3_prefetch_bucket_size
        small = zero.stage3_param_persistence_threshold
        return cls(
            stage=zero.stage,
            reduces_micro_batches=TABLE[zero.stage].gradients,
            shard_optimizer=row.optimizer,
            shard_gradients=row.gradients,
            shard_parameters=row.parameters,
            unit_cap=max(1, min(caps)),
            prefetch=ahead != 0,
            prefetch_elements=int(ahead or 0),
            keeps_what_saves=small != 0,
            persistent_elements=int(small or 0),
            persistent_total=int(zero.stage3_model_persistence_threshold),
            quantized_weights=row.parameters and zero.zero_quantized_weights,
            secondary=int(zero.zero_hpz_partition_size) if row.parameters else 1,
        )
