"""Plan table: dimensions and tiers of the state of each ZeRO stage.

A stage is a row: the mesh dimensions over which optimizer state, gradients and parameters are sharded (Rajbhandari et
al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020); over others they are replicated. A
row with a dimension beyond "shard" is HSDP, or MiCS (Zhang et al., "MiCS: Near-linear scaling for training gigantic
model on public cloud", 2022). Tiers are independent of the row. Stage numbers occur in the configuration and here only.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from shardwise.comm.domain import REPLICATE, SHARD, Domain
from shardwise.memory.places import ALL_ON_DEVICE, Where

if TYPE_CHECKING:
    from shardwise.config.schema import ZeroConfig
    from shardwise.config.schema.precision import Float8


@dataclass(frozen=True)
class Row:
    """Mesh dimensions over which each kind of state is sharded (parameters <= gradients <= optimizer state)."""

    optimizer: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


_OVER = (SHARD,)

TABLE: dict[int, Row] = {
    0: Row(),
    1: Row(optimizer=_OVER),
    2: Row(optimizer=_OVER, gradients=_OVER),
    3: Row(optimizer=_OVER, gradients=_OVER, parameters=_OVER),
}


@dataclass(frozen=True)
class Levels:
    """Level of each kind of state in a domain (`shardwise.comm.domain`)."""

    optimizer: int
    gradients: int
    parameters: int


@dataclass(frozen=True)
class Plan:
    """Sharding of one engine, derived from the configuration.

    Attributes:
        stage: ZeRO stage in the configuration; for messages only.
        reduces_micro_batches: whether the stage reduces every micro-batch; on one rank too, for equal behaviour.
        over: mesh dimensions over which state is sharded.
        where: tiers of the state.
        unit_cap: largest number of elements in a unit (a larger parameter is a unit of its own).
        prefetch: whether the next unit is unsharded while the current one computes.
        prefetch_elements: elements that may be prefetched beyond the next unit.
        keeps_what_saves: keep units unsharded whose resharding would not lower the peak.
        persistent_elements, persistent_total: keep units of at most so many elements, in all, unsharded.
        quantized_weights: all-gathers of trained passes send 8-bit codes (ZeRO++, qwZ).
        float8_weights: all-gathers of trained passes send weights of float8 layers in 8 bits.
        secondary: ranks that share a secondary shard for backward passes (ZeRO++, hpZ); 1: none.
    """

    stage: int
    reduces_micro_batches: bool
    over: Row
    unit_cap: int
    prefetch: bool = True
    prefetch_elements: int = 0
    keeps_what_saves: bool = True
    persistent_elements: int = 0
    persistent_total: int = 0
    quantized_weights: bool = False
    float8_weights: bool = False
    secondary: int = 1
    where: Where = ALL_ON_DEVICE

    @property
    def shard_optimizer(self) -> bool:
        """Whether each rank has only a shard of optimizer state and master weights."""
        return bool(self.over.optimizer)

    @property
    def shard_gradients(self) -> bool:
        """Whether each micro-batch is reduced, instead of accumulated locally until the accumulation boundary."""
        return bool(self.over.gradients)

    @property
    def shard_parameters(self) -> bool:
        """Whether each rank has only a shard of the parameters."""
        return bool(self.over.parameters)

    @property
    def releases(self) -> bool:
        """Whether parameters are unsharded before use and resharded after it: sharded, or not on the device."""
        return self.shard_parameters or self.where.parameters != "device"

    def levels(self, domain: Domain) -> Levels:
        """Return the levels of each kind of state in a domain."""
        over = self.over
        return Levels(domain.level(over.optimizer), domain.level(over.gradients), domain.level(over.parameters))

    @property
    def ahead(self) -> int | None:
        """Elements that may be prefetched beyond the next unit; None: no prefetching."""
        return self.prefetch_elements if self.prefetch else None

    @classmethod
    def of(
        cls,
        zero: ZeroConfig,
        domain: Domain,
        *,
        forced: bool = False,
        where: Where | None = None,
        float8: Float8 | None = None,
    ) -> Plan:
        """Derive the plan. `forced` shards over dimensions of one rank, too. `where` overrides the section's tiers."""
        if where is None:
            where = where_of(zero)
        row = TABLE[zero.stage]
        if row.optimizer and zero.optimizer_over_replicas:
            row = replace(row, optimizer=(*row.optimizer, REPLICATE))
        there = {name for name, size in zip(domain.names, domain.sizes, strict=True) if size > 1 or forced}
        row = Row(*(tuple(name for name in over if name in there) for over in astuple(row)))
        caps = [int(zero.reduce_bucket_size)]
        if where.optimizer != "device":
            caps.append(int(zero.sub_group_size))  # copied between tiers at a time
        if row.optimizer and not row.parameters:
            caps.append(int(zero.allgather_bucket_size))
        if row.parameters or where.parameters != "device":
            # Two units are unsharded at a time: the computing one and the prefetched one.
            caps.append(int(zero.stage3_max_live_parameters) // 2)
        ahead = zero.stage3_prefetch_bucket_size
        small = zero.stage3_param_persistence_threshold
        return cls(
            stage=zero.stage,
            reduces_micro_batches=bool(TABLE[zero.stage].gradients),
            over=row,
            unit_cap=max(1, min(caps)),
            prefetch=ahead != 0,
            prefetch_elements=int(ahead or 0),
            keeps_what_saves=small != 0,
            persistent_elements=int(small or 0),
            persistent_total=int(zero.stage3_model_persistence_threshold),
            quantized_weights=bool(row.parameters) and zero.zero_quantized_weights,
            float8_weights=bool(row.parameters) and float8 is not None and float8.enabled and float8.all_gather,
            secondary=int(zero.zero_hpz_partition_size) if row.parameters else 1,
            where=where,
        )


_PLACES = {"none": "device", "cpu": "host", "nvme": "disk"}
_HOST = {True: "host", False: "pageable"}


def where_of(zero: ZeroConfig) -> Where:
    """Return the tiers of the state, from the `zero_optimization` section.

    Gradients wait on the host if the optimizer steps there, even if its state is on a disk; `gradients` may say disk.
    """
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    stepped = "device" if optimizer is None else _PLACES[optimizer.device]
    kept = "device" if parameters is None else _PLACES[parameters.device]
    waiting = "device"
    if optimizer is not None and stepped != "device":
        waiting = "disk" if optimizer.gradients == "nvme" else _HOST[optimizer.pin_memory]
    return Where(
        optimizer=stepped,
        gradients=waiting,
        parameters=_HOST[parameters.pin_memory] if parameters is not None and kept == "host" else kept,
        share=1.0 if optimizer is None or stepped == "device" else optimizer.ratio,
        near=int(parameters.max_in_cpu) if parameters is not None and kept == "disk" else 0,
    )
