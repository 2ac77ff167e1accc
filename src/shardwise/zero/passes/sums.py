"""Sums of a step over ranks: squares of gradients, and local statistics in the same all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.communicator import Communicator
from shardwise.memory import Accountant, Category
from shardwise.memory.places import Acquisition, in_turn
from shardwise.precision.norms import Runs, total_of
from shardwise.zero.passes.reduce import Reducer
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.unit import Unit


@dataclass
class _Part:
    """Flat parameters with gradients that are read together, and the ranges of these gradients."""

    sections: Sequence[FlatParamStorage]
    runs: Runs | None = None
    seen: Sequence[torch.Tensor] = ()


class GradientSums:
    """Sums of one engine. `norm_group` contains the pass group `comm`, and pass groups of other parameters."""

    def __init__(
        self,
        units: Sequence[Unit],
        numbering: GlobalTensorIds,
        comm: Communicator,
        norm_group: Communicator,
        device: torch.device,
        accountant: Accountant,
        reducer: Reducer,
    ) -> None:
        self._units = units
        self._numbering = numbering
        self._parameters = len(numbering.names)
        self._comm = comm
        self._norm_group = norm_group
        self._device = device
        self._accountant = accountant
        self._reducer = reducer
        # Offloaded gradients are acquired unit by unit; the others are read at once on each device.
        self._offloaded: list[tuple[_Part, list[Acquisition]]] = []
        by_device: dict[torch.device, list[FlatParamStorage]] = {}
        for unit in units:
            acquired = [section for section in unit.trainable if section.gradient_needs_acquiring]
            if acquired:
                self._offloaded.append((_Part(acquired), [(section.tiered_gradient, False) for section in acquired]))
            for section in unit.trainable:
                if not section.gradient_needs_acquiring:
                    by_device.setdefault(section.steps_on, []).append(section)
        self._at_hand = [_Part(sections) for sections in by_device.values()]

    def own_squares(self) -> torch.Tensor:
        """Return this rank's sums of squares by tensor (no collective). Raises OffloadError."""
        with self._accountant.owning(Category.OTHER):
            own = self._formed(Runs.sums_of_squares)
            return own.mul_(self._comm.world) if self._reducer.local else own

    def nothing(self) -> torch.Tensor:
        """Return zeros, for a rank that cannot compute its sums."""
        return torch.zeros(self._parameters, dtype=torch.float64, device=self._device)

    def total(
        self, own: torch.Tensor, facts: Sequence[float | torch.Tensor], *, tensors: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Sum the squares `own` of all gradients, and `facts`, over the norm group, in one all-reduce of a few numbers.

        The host does not wait for facts on a device. Returns (fp64 tensor whose sum is the sum of squares, sums of
        `facts`, sums by tensor over the pass group if `tensors`). Unreduced gradients give a bound (`_own_runs`).
        """
        joined = tensors and self._norm_group is self._comm
        with self._accountant.owning(Category.OTHER):
            squares = own if joined else total_of(own).reshape(1)
            sums = torch.cat([squares, self._on_device(facts)])
            self._norm_group.all_reduce(sums, "gradient_norm").wait()
        squares, summed = sums[: len(squares)], sums[len(squares) :]
        return squares, summed, squares if joined else self.by_tensor(own) if tensors else None

    def by_tensor(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sums of `own_squares` over the pass group, by tensor, in a new tensor."""
        sums = own.clone()
        self.add(sums, "gradient_norms")
        return sums

    def probe(self) -> torch.Tensor:
        """Return `Runs.probe` of this rank's accumulated gradients (no collective). Raises OffloadError."""
        with self._accountant.owning(Category.OTHER):
            return self._formed(Runs.probe)

    def add(self, values: torch.Tensor, label: str) -> None:
        """Replace values by their sums over ranks, for a report. Fake ranks exchange nothing: their values differ."""
        if not self._comm.imagined:
            self._comm.all_reduce(values, label).wait()

    def _formed(self, form: Callable[[Runs], torch.Tensor]) -> torch.Tensor:
        if self._reducer.local:
            return form(self._own_runs())
        formed: list[torch.Tensor] = []
        if self._offloaded:
            in_turn(self._offloaded, lambda part: formed.append(form(self._reduced_runs(part)).to(self._device)))
        for part in self._at_hand:
            formed.append(form(self._reduced_runs(part)).to(self._device))
        return functools.reduce(torch.add, formed) if formed else self.nothing()

    def _reduced_runs(self, part: _Part) -> Runs:
        """Return the ranges of reduced gradients on this rank. They are rebuilt if the gradients have new memory."""
        sections = part.sections
        gradients = [section.stepped_gradient for section in sections]
        if part.runs is None or list(map(id, gradients)) != list(map(id, part.seen)):
            part.seen = gradients
            places, counts = self._numbering.places, self._numbering.counts
            runs = [
                (places[piece.index], measured[piece.offset : piece.offset + piece.stop - piece.start])
                for section, measured in zip(sections, [s.measured_gradient for s in sections], strict=True)
                for piece in section.layout.pieces(*section.own_range)
                if counts[piece.index]
            ]
            part.runs = Runs(runs, self._parameters, gradients[0].device)
        return part.runs

    def _own_runs(self) -> Runs:
        """Return this rank's own gradients, for optimizers that compress them before the reduction.

        The norm is the root of the mean over ranks of the squared norms of own gradients, an upper bound of the norm of
        the mean. Because an own gradient counts as the number of ranks times the local sum, `own_squares` has a factor.
        """
        runs = [
            (slot.index, self._reducer.own_gradient(section)[slot.offset : slot.offset + slot.numel])
            for unit in self._units
            for section in unit.trainable
            for slot in section.layout.slots
        ]
        return Runs(runs, self._parameters, self._device)

    def of(self, facts: Sequence[float | torch.Tensor], label: str) -> torch.Tensor:
        """Return the sums of some numbers over the norm group."""
        totals = self._on_device(facts)
        self._norm_group.all_reduce(totals, label).wait()
        return totals

    def _on_device(self, facts: Sequence[float | torch.Tensor]) -> torch.Tensor:
        # Filling launches a kernel; copying from the host would wait for the device.
        return torch.stack(
            [
                fact.to(self._device)  # losses may be on another device
                if isinstance(fact, torch.Tensor)
                else torch.full((), fact, dtype=torch.float64, device=self._device)
                for fact in facts
            ]
        )
