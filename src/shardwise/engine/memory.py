"""Memory report of an engine: planned before the first step, measured during training, and the lower bound of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compat import never_compiled, transforming
from shardwise.engine.mesh import local_ranks
from shardwise.engine.observers import StepObserver
from shardwise.engine.plans import MemoryPlans, Planner, PlanningTarget, Room
from shardwise.errors import UsageError
from shardwise.memory import (
    Call,
    Category,
    MemoryLimit,
    MemoryReport,
    MemoryRow,
    Tier,
    like_cross_entropy,
    memory_limit,
    resident_bytes,
    shapes_of,
)
from shardwise.memory.limits import engine_room
from shardwise.memory.oom import OomContext, OutOfMemoryError, oom_error, over_limit, reporting_oom
from shardwise.units import format_size

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.batch import Batches
    from shardwise.engine.checkpointing import Checkpoints
    from shardwise.engine.faults import FaultTolerance
    from shardwise.engine.preflight import Budget
    from shardwise.engine.reserved import CommunicatorMemory
    from shardwise.engine.stages import PipelineRanks
    from shardwise.engine.step import TrainStep
    from shardwise.memory.watchdog import Watchdog
    from shardwise.zero.model import ShardedModel


class MemoryReporting(StepObserver):
    """Plans, measures and reports memory; `budget` is the plan made when the engine was built, or None.

    `place`: of this rank in a pipeline; None without one.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        resolution: Resolution,
        job: Communicator,
        step: TrainStep,
        batches: Batches,
        checkpoints: Checkpoints,
        faults: FaultTolerance,
        budget: Budget | None = None,
        watchdog: Watchdog | None = None,
        communicators: CommunicatorMemory | None = None,
        place: PipelineRanks | None = None,
    ) -> None:
        self._place = place
        self._communicators = communicators
        self.budget = budget
        self._watchdog = watchdog
        self.sharded = sharded
        self.accountant = sharded.accountant
        self.device = sharded.device
        self._comm = sharded.comm
        self._job = job
        self._resolution = resolution
        self._step = step
        self._batches = batches
        self._checkpoints = checkpoints
        self._faults = faults
        self._last_call: Call | None = None
        self._last_signature: tuple[Any, ...] | None = None
        measures = communicators is not None and communicators.on_device
        self.active = measures or resolution.config.memory_limits.device is not None

    def memory_report(
        self, sample_batch: Any = None, *, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> MemoryReport:
        """Return planned, measured and minimum memory of this rank, by category. Not a collective.

        The plan needs no training step. Activations are measured in steps under
        `shardwise.memory.track_activations(engine.accountant)`, and planned if a sample batch is given.

        Args:
            sample_batch: one micro-batch. A mapping is passed to the module as keyword arguments, a tuple or list as
                positional arguments, any other value as the only argument. Of a pipeline: a pair (inputs, labels), on
                all ranks.
            loss: returns a scalar from the module's output, as the training loop does. Default: the output's `loss`,
                the output itself, or the sum of its tensors.

        Example:
            >>> import shardwise
            >>> from shardwise.memory import Category
            >>> config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(512, 512, bias=False), config=config)
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
            target = self._target()
            plan, why = Planner(target, sample_batch, loss).window(target.setting)
        except Exception as error:  # a client optimizer runs in the dry run
            notes.append(f"Not planned: a dry run of the engine failed ({type(error).__name__}: {error}).")
        if why:
            notes.append(why[0].upper() + why[1:] + ".")
        snapshot = 0
        if plan is not None:
            snapshot = self._checkpoints.background.snapshot_bytes(plan.peaks[Category.OPTIMIZER.value])
        if snapshot:
            where = "counted under other" if self.device.type == "cpu" else "on the host and not in the table"
            notes.append(f"From the first asynchronous save on, its snapshot takes {format_size(snapshot)}, {where}.")
            snapshot = snapshot if self.device.type == "cpu" else 0
        notes += self._faults.notes_on_copies(plan)
        if not self.accountant.tracked:
            notes.append("Activations and temporaries are measured under shardwise.memory.track_activations.")
        if self._step.global_steps == 0:
            notes.append("No step has been taken: measured is what has been held so far.")
        planned, least, elsewhere = {}, {}, {}
        total = least_total = None
        if plan is not None:
            planned, least, elsewhere = dict(plan.peaks), dict(plan.floor), plan.elsewhere
            planned[Category.OTHER.value] += snapshot
            total, least_total = plan.total + snapshot, plan.least
        if sample_batch is None or why:
            for sizes in (planned, least):
                sizes.pop(Category.ACTIVATIONS.value, None)
        measured = {category.value: size for category, size in self.accountant.peak.items()}
        if not self.accountant.tracked:
            del measured[Category.ACTIVATIONS.value]
        cuda = self.device.type == "cuda"
        return MemoryReport(
            rows=tuple(
                MemoryRow(c.value, *(found.get(c.value) for found in (planned, measured, least))) for c in Category
            ),
            total=MemoryRow("total", total, self.accountant.peak_total, least_total),
            parameters=sum(tensor.numel for tensor in sharded.registry),
            rank=self._job.rank,
            world=self._comm.world,
            construction=self.accountant.construction_peak,
            resident=resident_bytes(),
            process=self.accountant.process_bytes,
            notes=tuple(notes),
            allocated=torch.cuda.max_memory_allocated(self.device) if cuda else None,
            reserved=torch.cuda.max_memory_reserved(self.device) if cuda else None,
            elsewhere=tuple(
                MemoryRow(tier.value, elsewhere.get(tier.value), held, None)
                for tier in (Tier.HOST, Tier.DISK)
                if (held := self.accountant.peak_total_in(tier)) or elsewhere.get(tier.value)
            ),
            moved={} if plan is None else plan.moved,
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
        """Return the planned memory of one rank under other settings with the same global batch. Not a collective.

        The engine's own code runs on fake tensors and a fake communicator.

        Args:
            sample_batch: micro-batch of the current size, to plan activations; see `memory_report`. For other sizes the
                first dimension changes of all tensors in which it is that of the first tensor.
            loss: as in `memory_report`.
            stages: ZeRO stages.
            micro_batches: micro-batch sizes, compensated by accumulation; default: the current size.
            ranks: numbers of data-parallel ranks; default: that of the engine.

        Raises:
            UsageError: a micro-batch size times a number of ranks does not divide the global batch.

        Example:
            >>> import shardwise
            >>> config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(512, 512, bias=False), config=config)
            >>> plans = engine.memory_plans(torch.ones(8, 512), stages=[1, 3], ranks=[8])
            >>> [plan.peaks["gradients"] * 8 == 512 * 512 * 4 for plan in plans.plans]
            [True, True]
            >>> engine.destroy()
        """
        self.sharded.check_open("engine.memory_plans()")
        target = self._target()
        now = target.setting
        batch = now.micro_batch * now.accumulation * now.ranks
        settings = []
        for world in ranks or [now.ranks]:
            for micro in micro_batches or [min(now.micro_batch, max(1, batch // world))]:
                if batch % (micro * world):
                    raise UsageError(
                        f"engine.memory_plans(): micro-batch {micro} on {world} ranks does not divide the global batch "
                        f"of {batch} samples"
                    )
                steps = batch // (micro * world)
                settings += [
                    replace(now, stage=stage, micro_batch=micro, accumulation=steps, ranks=world) for stage in stages
                ]
        limit, rooms = self._rooms()
        settings.sort(key=lambda setting: setting.cost)
        notes = [] if limit is None else [f"Limit: {limit.name}."]
        if sample_batch is None:
            notes.append("Activations are not in it; they are planned if a sample batch is given.")
        if self._resolution.config.checkpoint.in_background:
            notes.append("Snapshots of asynchronous saves are not in it: a copy of what each rank saves, on the host.")
        planner, room = Planner(target, sample_batch, loss), None if limit is None else rooms[0].size
        return MemoryPlans(tuple(planner.plan(setting, rooms) for setting in settings), room, tuple(notes))

    def _rooms(self) -> tuple[MemoryLimit | None, list[Room]]:
        """Return the device's limit, and the bytes available to the engine on the device (first) and on the host."""
        near = [Tier.DEVICE, Tier.HOST]
        kinds = [near] if self.device.type == "cpu" else [[tier] for tier in near]
        rooms, limits = [], []
        for tiers in kinds:
            device = self.device if Tier.DEVICE in tiers else torch.device("cpu")
            limits.append(memory_limit(device, local_ranks(self._job.world)))
            if (limit := limits[-1]) is not None:
                rooms.append(Room(tuple(tiers), engine_room(limit, self.accountant, device, tiers)))
        return limits[0], rooms

    def planning(self) -> tuple[Planner, list[Room]]:
        """Return a planner for micro-batches like the last one, and the bytes that the engine may take."""
        rooms, limits = self._rooms()[1], self._resolution.config.memory_limits
        if limits.device is not None:
            rooms.append(Room((Tier.DEVICE,), limits.device))
        if limits.host is not None:
            shared = self.device.type == "cpu" and limits.device is None
            tiers = (Tier.DEVICE, Tier.HOST) if shared else (Tier.HOST,)
            rooms.append(Room(tiers, limits.host // local_ranks(self._job.world)))
        return Planner(self._target(), self._last_call, like_cross_entropy), rooms

    def after_step(self) -> None:
        """Raise an OutOfMemoryError if the peak device memory exceeds `memory_limits.device`."""
        if self._communicators is not None:
            self._communicators.after_step()
        limit = self._resolution.config.memory_limits.device
        if limit is not None and self.accountant.peak_total > limit:
            raise over_limit(self._context(f"step {self._step.global_steps}"), limit)

    def close(self) -> None:
        """Stop the watchdog of the machine's memory."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _target(self) -> PlanningTarget:
        sharded, batches = self.sharded, self._batches
        replicas = None if sharded.sharding.replicas is None else sharded.sharding.replicas[0]
        model, domain = (sharded.module, sharded.optimizer), sharded.domain
        target = PlanningTarget.of(*model, self._resolution, domain, self._place, replicas)
        setting = replace(target.setting, micro_batch=batches.micro, accumulation=batches.steps)
        return replace(target, groups=sharded.client_groups, setting=setting)

    @never_compiled
    def remember_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the shapes of the module's arguments, to plan activations if memory runs out."""
        # Tensors of transforms are invalid after the transform. A stage of a pipeline gets no micro-batch.
        if transforming() or self._place is not None:
            return
        signature = _signature((*args, *kwargs.values()))
        if signature is None or self._last_call is None or (len(args), *kwargs, signature) != self._last_signature:
            self._last_call = shapes_of(Call(args, kwargs))
            self._last_signature = (len(args), *kwargs, signature)

    def reporting_oom(self, where: str, **more: bool) -> AbstractContextManager[None]:
        """Turn an out-of-memory error of the block, in the user's call `where`, into an `OutOfMemoryError`."""
        return reporting_oom(lambda: self._context(where, **more))

    def oom_error(self, error: BaseException, where: str) -> OutOfMemoryError:
        """Return the `OutOfMemoryError` for an out-of-memory error in the user's call `where`."""
        return oom_error(error, self._context(where))

    def _context(self, where: str, **more: bool) -> OomContext:
        report = functools.partial(self.memory_report, self._last_call, loss=like_cross_entropy)
        setting, processes = str(self._target().setting), local_ranks(self._job.world)
        return OomContext(where, setting, self.device, self.accountant, self._job.rank, processes, report, **more)


def _signature(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return a key of the arguments' shapes; None for nested ones. Called before every forward pass."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value.shape, value.dtype, value.requires_grad))
        elif value is None or isinstance(value, (bool, int, float, str)):
            found.append(value)
        else:
            return None
    return tuple(found)
