"""The engine's memory table: planned before the first step, measured during it, and the floor of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compat import never_compiled, transforming
from shardwise.engine.exhausted import Circumstances, room_for
from shardwise.engine.plans import MemoryPlans, Planner, Setting, Subject
from shardwise.errors import UsageError
from shardwise.memory import (
    Call,
    Category,
    MemoryReport,
    MemoryRow,
    like_cross_entropy,
    resident_bytes,
    shapes_of,
)
from shardwise.memory.report import readable

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.dryrun import MemoryPlan
    from shardwise.memory import Accountant
    from shardwise.zero.model import ShardedModel


class MemoryReporting:
    """Mixin of `Engine`: `memory_report()`, `memory_plans()`, and what is known when memory runs out."""

    sharded: ShardedModel
    accountant: Accountant
    global_steps: int
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    _comm: Communicator
    _resolution: Resolution
    _last_call: Call | None
    _last_signature: tuple[Any, ...] | None

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one step."""
        raise NotImplementedError

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of one rank in one forward pass."""
        raise NotImplementedError

    def _snapshot_bytes(self, state: int) -> int:
        raise NotImplementedError

    if TYPE_CHECKING:  # defined by another mixin

        def _notes_on_copies(self, plan: MemoryPlan | None) -> list[str]: ...

    def memory_report(
        self, sample_batch: Any = None, *, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> MemoryReport:
        """Return planned, measured and least possible memory of this rank, by category. Not a collective.

        The plan needs no step to have been taken. Activations are measured in steps taken under
        `shardwise.memory.track_activations(engine.accountant)`, and planned if a sample batch is given.

        Args:
            sample_batch: one micro-batch, for planning activations: a mapping is passed to the module as keyword
                arguments, a tuple or list as positional ones, anything else as the only argument.
            loss: makes a scalar of the module's output, as the training loop does; by default the output's `loss`, or
                the output itself, or the sum of what it contains.

        Example:
            >>> import shardwise
            >>> from shardwise.memory import Category
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(512, 512, bias=False),
            ...     config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ... )
            >>> report = engine.memory_report(torch.ones(4, 512))
            >>> report.row(Category.PARAMETERS).planned == 512 * 512 * 4
            True
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.memory_report()")
        sharded = self.sharded
        notes = []
        if sample_batch is None:
            notes.append("Activations are planned if a sample batch is given.")
        plan, why = None, ""
        try:
            plan, why = self._planner(sample_batch, loss).window(self._setting())
        except Exception as error:  # an optimizer of the user's own, which runs in the dry run
            notes.append(f"Not planned: a dry run of the engine failed ({type(error).__name__}: {error}).")
        if why:
            notes.append(why[0].upper() + why[1:] + ".")
        snapshot = 0 if plan is None else self._snapshot_bytes(plan.peaks[Category.OPTIMIZER])
        if snapshot:
            where = "counted under other" if self.device.type == "cpu" else "on the host and not in the table"
            notes.append(f"The snapshot of asynchronous saves takes {readable(snapshot)}, {where}.")
        if self.device.type != "cpu":
            snapshot = 0
        notes += self._notes_on_copies(plan)
        if not self.accountant.tracked:
            notes.append("Activations and temporaries are measured under shardwise.memory.track_activations.")
        if any(section.layout.table for unit in sharded.units for section in unit.sections):
            notes.append("Sparse gradients of embeddings are planned as if they had to become dense.")
        if self.global_steps == 0:
            notes.append("No step has been taken: measured is what has been held so far.")
        measured = self.accountant.peak
        rows = []
        for category in Category:
            if category is Category.ACTIVATIONS:
                seen = measured[category] if self.accountant.tracked else None
                peak = None if plan is None or sample_batch is None or why else plan.peaks[category]
                rows.append(MemoryRow(category.value, peak, seen, peak))
            else:
                at_least = None if plan is None else plan.floor[category]
                expected = None if plan is None else plan.peaks[category]
                if category is Category.OTHER and snapshot:
                    at_least, expected = (at_least or 0) + snapshot, (expected or 0) + snapshot
                rows.append(MemoryRow(category.value, expected, measured[category], at_least))
        total = MemoryRow(
            "total",
            None if plan is None else plan.total + snapshot,
            self.accountant.peak_total,
            None if plan is None else plan.least + snapshot,
        )
        cuda = self.device.type == "cuda"
        return MemoryReport(
            rows=tuple(rows),
            total=total,
            parameters=sum(tensor.numel for tensor in sharded.registry),
            rank=self._comm.rank,
            world=self._comm.world,
            construction=self.accountant.construction_peak,
            resident=resident_bytes(),
            process=self.accountant.process_bytes,
            notes=tuple(notes),
            allocated=torch.cuda.max_memory_allocated(self.device) if cuda else None,
            reserved=torch.cuda.max_memory_reserved(self.device) if cuda else None,
        )

    def memory_plans(
        self,
        sample_batch: Any = None,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        stages: Sequence[int] = (0, 1, 2, 3),
        micro_batches: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> MemoryPlans:
        """Return what one rank would hold under other settings with the same global batch. Not a collective.

        Each is planned by the engine's own parts, built on fake tensors and imagined ranks beside the running engine.

        Args:
            sample_batch: a micro-batch of the size now in force, for planning activations; see `memory_report`. Tensors
                whose first dimension is that of its first tensor are cut for smaller micro-batches.
            loss: as in `memory_report`.
            stages: ZeRO stages to be planned.
            micro_batches: sizes to be planned; default: the one in force. Accumulation makes up for it.
            ranks: numbers of data-parallel ranks to be planned; default: that of the engine.

        Raises:
            UsageError: a micro-batch size times a number of ranks does not divide the global batch.

        Example:
            >>> import shardwise
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(512, 512, bias=False),
            ...     config={"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ... )
            >>> plans = engine.memory_plans(torch.ones(8, 512), stages=[1, 3], ranks=[8])
            >>> [plan.peaks["gradients"] * 8 == 512 * 512 * 4 for plan in plans.plans]
            [True, True]
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.memory_plans()")
        subject = self._subject()
        now = subject.setting
        batch = now.micro_batch * now.accumulation * now.ranks
        settings = []
        for world in ranks or [now.ranks]:
            for micro in micro_batches or [min(now.micro_batch, max(1, batch // world))]:
                if batch % (micro * world):
                    raise UsageError(
                        f"engine.memory_plans(): micro-batch {micro} on {world} ranks does not divide the global batch "
                        f"of {batch} samples"
                    )
                settings += [Setting(stage, micro, batch // (micro * world), world) for stage in stages]
        planner = self._planner(sample_batch, loss)
        limit, room = room_for(self._circumstances("engine.memory_plans()"), planner)
        settings.sort(key=lambda setting: setting.cost)
        notes = [] if limit is None else [f"Limit: {limit.name}."]
        if sample_batch is None:
            notes.append("Activations are not in it; they are planned if a sample batch is given.")
        if self._resolution.config.checkpoint.in_background:
            notes.append("Snapshots of asynchronous saves are not in it: a copy of what each rank saves, on the host.")
        return MemoryPlans(tuple(planner.plan(setting, room) for setting in settings), room, tuple(notes))

    def _setting(self) -> Setting:
        micro, steps = self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()
        return Setting(self.sharded.plan.stage, micro, steps, self._comm.world)

    def _planner(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> Planner:
        return Planner(self._subject(), batch, loss)

    def _subject(self) -> Subject:
        return Subject(
            self.sharded.module,
            self.optimizer,
            self.sharded.client_groups,
            self._resolution,
            self._comm,
            self._setting(),
            self.sharded.domain.arrangement,
        )

    @never_compiled
    def _remember_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the shapes of what the module is called with, for plans of its activations if memory runs out."""
        if transforming():
            return  # tensors are wrapped, and mean nothing after the transform
        signature = _signature((*args, *kwargs.values()))
        if signature is None or self._last_call is None or (len(args), *kwargs, signature) != self._last_signature:
            self._last_call = shapes_of(Call(args, kwargs))
            self._last_signature = (len(args), *kwargs, signature)

    def _circumstances(self, where: str, **more: Any) -> Circumstances:
        def report() -> MemoryReport:
            return self.memory_report(self._last_call, loss=like_cross_entropy)

        return Circumstances(
            where, self._subject(), self.accountant, self._comm.rank, self._last_call, report=report, **more
        )


def _signature(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return what decides on the shapes of plain arguments; None for nested ones. Asked before every forward pass."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value.shape, value.dtype, value.requires_grad))
        elif value is None or isinstance(value, (bool, int, float, str)):
            found.append(value)
        else:
            return None
    return tuple(found)
