"""The plan table: what a ZeRO stage means.

A stage is a row that says over which dimensions of the mesh optimizer state, gradients and parameters are divided
(Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020). Over the others they
are replicated: with a dimension beyond "shard" a row is HSDP, or MiCS (Zhang et al., "MiCS: Near-linear scaling for
training gigantic model on public cloud", 2022). Beside the row stands in which places they live. All other code reads
the columns; stage numbers occur in the configuration and here, nowhere else.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from shardwise.comm.domain import REPLICATE, SHARD, Domain
from shardwise.memory.places import ALL_ON_DEVICE, Where

if TYPE_CHECKING:
    from shardwise.config.schema import ZeroConfig


@dataclass(frozen=True)
class Row:
    """Over which dimensions of the mesh each kind of state is divided.

    Whoever divides gradients divides optimizer state over at least as many dimensions, and parameters over at most.
    """

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
    """At which level of a domain (`shardwise.comm.domain`) each kind of state lies."""

    optimizer: int
    gradients: int
    parameters: int


@dataclass(frozen=True)
class Plan:
    """How one engine shards, derived from the configuration.

    Attributes:
        stage: the number the user wrote; for messages only.
        reduces_micro_batches: whether the row of that stage reduces every micro-batch. One rank has nothing to shard,
            but a script must not find that out only when it gets a second one.
        over: over which dimensions of the mesh state is divided.
        where: in which places it lives.
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
    over: Row
    unit_cap: int
    prefetch: bool = True
    prefetch_elements: int = 0
    keeps_what_saves: bool = True
    persistent_elements: int = 0
    persistent_total: int = 0
    quantized_weights: bool = False
    secondary: int = 1
    where: Where = ALL_ON_DEVICE

    @property
    def shard_optimizer(self) -> bool:
        """Whether optimizer state and master weights cover only a part of the parameters on each rank."""
        return bool(self.over.optimizer)

    @property
    def shard_gradients(self) -> bool:
        """Whether each micro-batch is reduced, instead of being added up locally until the accumulation boundary."""
        return bool(self.over.gradients)

    @property
    def shard_parameters(self) -> bool:
        """Whether each rank keeps a part of the parameters only."""
        return bool(self.over.parameters)

    @property
    def releases(self) -> bool:
        """Whether parameters are gathered before use and released after it: divided, or not on the device."""
        return self.shard_parameters or self.where.parameters != "device"

    def levels(self, domain: Domain) -> Levels:
        """Return the levels of a domain that the row comes to."""
        over = self.over
        return Levels(domain.level(over.optimizer), domain.level(over.gradients), domain.level(over.parameters))

    @property
    def ahead(self) -> int | None:
        """Elements that may be gathered beyond the next unit; None if not even that is."""
        return self.prefetch_elements if self.prefetch else None

    @classmethod
    def of(cls, zero: ZeroConfig, domain: Domain, *, forced: bool = False, where: Where | None = None) -> Plan:
        """Derive the plan from the `zero_optimization` section.

        Args:
            zero: the section.
            domain: the ranks.
            forced: gather, release and reduce over dimensions of one rank, too. Otherwise nothing is divided over them.
            where: in which places state lives; None: as the section says.
        """
        if where is None:
            where = where_of(zero)
        row = TABLE[zero.stage]
        if row.optimizer and zero.optimizer_over_replicas:
            row = replace(row, optimizer=(*row.optimizer, REPLICATE))
        there = {name for name, size in zip(domain.names, domain.sizes, strict=True) if size > 1 or forced}
        row = Row(*(tuple(name for name in over if name in there) for over in astuple(row)))
        caps = [int(zero.reduce_bucket_size)]
        if where.optimizer != "device":
            caps.append(int(zero.sub_group_size))  # what is lent, or brought back, at a time
        if row.optimizer and not row.parameters:
            caps.append(int(zero.allgather_bucket_size))
        if row.parameters or where.parameters != "device":
            # Two units are gathered at a time: the one that computes and the one being prefetched.
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
            secondary=int(zero.zero_hpz_partition_size) if row.parameters else 1,
            where=where,
        )


_PLACES = {"none": "device", "cpu": "host", "nvme": "disk"}
_HOST = {True: "host", False: "pageable"}


def where_of(zero: ZeroConfig) -> Where:
    """Return in which places state lives, as the `zero_optimization` section says.

    Gradients wait for the optimizer where it steps unless they are asked to be on a disk: on the host, also if its
    state comes there from a disk.
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
