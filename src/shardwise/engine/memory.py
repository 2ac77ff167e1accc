"""The engine's memory table: planned before the first step, measured during it, and the floor of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwise.memory import Category, MemoryReport, MemoryRow, plan_activations, resident_bytes

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.memory import Accountant, ActivationPlan
    from shardwise.zero.model import ShardedModel


class MemoryReporting:
    """Mixin of `Engine`: `memory_report()`."""

    sharded: ShardedModel
    accountant: Accountant
    global_steps: int
    _comm: Communicator

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in one step."""
        raise NotImplementedError

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
        from shardwise.zero import memory as zero

        self.sharded.check_open("engine.memory_report()")
        sharded, accumulation = self.sharded, self.gradient_accumulation_steps()
        notes = []
        activations = plan = floor = None
        if sample_batch is None:
            notes.append("Activations are planned if a sample batch is given.")
        else:
            try:
                activations = self._plan_activations(sample_batch, loss)
            except Exception as error:  # whatever the user's module raises when it has no values to compute with
                notes.append(f"Activations not planned: a dry run failed ({type(error).__name__}: {error}).")
        try:
            plan = zero.planned(sharded, accumulation, activations)
            floor = zero.floor(sharded, accumulation, activations)
        except Exception as error:  # an optimizer of the user's own, which runs in the dry run
            notes.append(f"Not planned: a dry run of the optimizer failed ({type(error).__name__}: {error}).")
        if not self.accountant.tracked:
            notes.append("Activations and temporaries are measured under shardwise.memory.track_activations.")
        if self.global_steps == 0:
            notes.append("No step has been taken: measured is what has been held so far.")
        measured = self.accountant.peak
        rows = []
        for category in Category:
            if category is Category.ACTIVATIONS:
                seen = measured[category] if self.accountant.tracked else None
                peak = None if activations is None else activations.peak
                rows.append(MemoryRow(category.value, peak, seen, peak))
            else:
                at_least = None if floor is None else floor.peaks[category]
                expected = None if plan is None else plan.peaks[category]
                rows.append(MemoryRow(category.value, expected, measured[category], at_least))
        total = MemoryRow(
            "total",
            None if plan is None else plan.total,
            self.accountant.peak_total,
            None if floor is None else floor.total,
        )
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
        )

    def _plan_activations(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> ActivationPlan:
        registry = self.sharded.registry
        dtypes = {id(p): t.dtype for p, t in zip(registry.parameters, registry, strict=True)}
        return plan_activations(
            self.sharded.module, batch, loss=loss, dtypes=dtypes, own_hooks=self.sharded.hooks.ids()
        )
