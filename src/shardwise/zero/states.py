"""State that leaves the device for a while between steps, because somebody else needs the memory.

Everything keeps its identity. What only the engine refers to gives its memory back by force; whole parameters, of which
a script may have views, are let go of instead: what it keeps of them stays as it is, and keeps the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import ON_DEVICE, StateHome
from shardwise.memory.stash import Stash
from shardwise.zero.passes.gradients import UnitGradients
from shardwise.zero.units.presence import OffloadStateTypeEnum, Presence
from shardwise.zero.units.released import blank
from shardwise.zero.units.unit import FlatParamStorage, Unit
from shardwise.zero.updates.update import Update


class _Part(NamedTuple):
    """A tensor of the engine's state.

    Attributes:
        home: where it lives.
        counted: category under which its bytes are told; None: it is held as a tensor.
    """

    tensor: torch.Tensor
    home: StateHome
    counted: Category | None = None


class MovingStates:
    """Moves the state of one engine to the host, and back.

    Args:
        units: all units.
        update: steps them; None for a model that is only evaluated.
        gradients: of the units that are trained.
        device: where state is used.
        accountant: is told of the bytes.
        presence: is told what is away.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        update: Update | None,
        gradients: Collection[UnitGradients],
        device: torch.device,
        accountant: Accountant,
        presence: Presence,
    ) -> None:
        self._units = units
        self._update = update
        self._gradients = gradients
        self._device = device
        self._accountant = accountant
        self._presence = presence
        self._stash: Stash | None = None
        self._whole: list[tuple[FlatParamStorage, torch.Tensor]] = []

    def offload(self, kinds: Collection[OffloadStateTypeEnum], *, pinned: bool, wait: bool) -> None:
        """Move what is on the device; nothing may be gathered but what always is.

        Args:
            kinds: those that are moved; the others stay where they are.
            pinned: see `shardwise.memory.stash.Stash`.
            wait: until that is done; else it has begun.
        """
        if self._stash is None:
            self._stash = Stash(self._device, self._accountant, pinned=pinned)
        stash = self._stash
        new = [kind for kind in OffloadStateTypeEnum if kind in kinds and kind not in self._presence.away]
        for kind in new:
            self._presence.away |= {kind}
            if kind is OffloadStateTypeEnum.lp_grads:
                self._free_spent_gradients()
            for tensor, home, counted in self._parts(kind):
                if home.tier is Tier.DEVICE and tensor.device.type == self._device.type:
                    stash.put(tensor, counted)
            if kind is OffloadStateTypeEnum.lp_params:
                for unit in self._units:
                    if not unit.sharded:
                        self._withdraw(unit, stash)
                self._take_new_views()
        if wait:
            stash.synchronize()

    def reload(self, *, wait: bool) -> None:
        """Bring everything back, for the current stream; the host goes on unless it is to `wait`."""
        if self._stash is None:
            return
        self._stash.bring()
        while self._whole:
            section, values = self._whole[-1]
            full = torch.empty(section.layout.numel, dtype=section.layout.dtype, device=self._device)
            self._accountant.hold(Category.PARAMETERS, full)
            self._stash.fill(full, values)
            section.lie_in(full)
            self._accountant.remove(Category.PARAMETERS, values.numel(), Tier.HOST)
            self._whole.pop()
        if OffloadStateTypeEnum.lp_params in self._presence.away:
            self._take_new_views()
            for unit in self._units:
                if not unit.sharded:
                    unit.show()
        if wait:
            self._stash.synchronize()
        self._presence.away = frozenset()
        self._stash = None

    def close(self) -> None:
        """Forget the engine."""
        self._units, self._update, self._gradients = [], None, []

    def tiers(self, kind: OffloadStateTypeEnum) -> set[Tier]:
        """Return on what state of a kind lies now; nothing if there is none of it."""
        found = set()
        for tensor, home, _ in self._parts(kind):
            if self._stash is not None and self._stash.has(tensor):
                found.add(Tier.HOST)
            elif home.tier is not Tier.DEVICE or tensor.untyped_storage().nbytes():
                found.add(home.tier)
        if kind is OffloadStateTypeEnum.lp_params:
            whole = [section for unit in self._units if not unit.sharded for section in unit.sections]
            found |= {Tier.HOST if kind in self._presence.away else Tier.DEVICE for section in whole}
        return found

    def _parts(self, kind: OffloadStateTypeEnum) -> Iterator[_Part]:
        """Yield what there is of a kind, but for whole parameters."""
        if kind is OffloadStateTypeEnum.lp_params:
            for unit in self._units:
                for section in unit.sections:
                    if section.sharded:
                        yield _Part(section.shard, section.shard_loans.home)
                    if section.second is not None:
                        yield _Part(section.second, section.second_loans.home)
        elif kind is OffloadStateTypeEnum.hp_params:
            for unit in self._units:
                for section in unit.trainable:
                    if section.master is not None and not section.master_is_parameter:
                        yield _Part(section.master, section.optimizer_loans.home)
            if self._update is not None:
                yield from (_Part(*own) for own in self._update.own_masters())
        elif kind is OffloadStateTypeEnum.optim_states:
            if self._update is not None:
                yield from (_Part(*own) for own in self._update.own_state())
        elif kind is OffloadStateTypeEnum.lp_grads:
            for gradients in self._gradients:
                for section in gradients.unit.trainable:
                    if section.gradient is not None:
                        yield _Part(section.gradient, section.gradient_loans.home, Category.GRADIENTS)
                for total in gradients.sums.values():
                    yield _Part(total, ON_DEVICE)
        else:
            yield from self._unreduced()

    def _unreduced(self) -> Iterator[_Part]:
        for gradients in self._gradients:
            sections = gradients.unit.sections
            for place, buffer in gradients.buffers.items():
                # The accumulator itself may be the buffer.
                if buffer.flat is not None and buffer.flat is not sections[place].gradient:
                    yield _Part(buffer.flat, gradients.loans.home)

    def _free_spent_gradients(self) -> None:
        """Give memory back that only waits for the next window."""
        for gradients in self._gradients:
            if not gradients.accumulated and not gradients.buffers:
                for section in gradients.unit.trainable:
                    section.free_gradient()

    def _withdraw(self, unit: Unit, stash: Stash) -> None:
        unit.hide()
        for section in unit.sections:
            values = stash.copy(section.full)
            self._accountant.add(Category.PARAMETERS, values.numel(), Tier.HOST)
            self._whole.append((section, values))
            section.lie_in(blank(section.full))

    def _take_new_views(self) -> None:
        if self._update is not None:
            self._update.take_new_views()
