"""Moves of the engine's state to the host and back (`engine.offload_states()`), to free the device between steps.

Tensors keep their identity. Memory that only the engine refers to is freed by resizing its storage. Replicated
parameters, of which a script may have views, get other memory; such views keep the old memory and values.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.errors import UsageError
from shardwise.memory import Category, Tier, give_back_freed_memory
from shardwise.memory.moved import HostCopy, MovedTensors
from shardwise.memory.places import ON_DEVICE, StateHome
from shardwise.zero.passes.order import Phase
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.presence import OffloadStateTypeEnum
from shardwise.zero.units.released import blank
from shardwise.zero.units.unit import Unit

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


class _Part(NamedTuple):
    """Tensor of the engine's state, and its tier. `counted`: category, if the accountant counts bytes only."""

    tensor: torch.Tensor
    home: StateHome
    counted: Category | None = None


class MovingStates:
    """Moves the state of a sharded model to the host, and back."""

    def __init__(self, model: ShardedModel) -> None:
        self._model: ShardedModel = weakref.proxy(model)  # because the model keeps this object
        self._gradients = () if model.reducer is None else model.reducer.gradients.values()
        self._device, self._accountant, self._presence = model.device, model.accountant, model.presence
        self._moved: MovedTensors | None = None
        self._whole: list[tuple[FlatParamStorage, HostCopy]] = []

    def offload(self, kinds: Collection[OffloadStateTypeEnum], *, pinned: bool, wait: bool) -> None:
        """Move kinds of state from the device to the host, until `reload` (all ranks call, between passes).

        `pinned` uses page-locked memory. `wait` returns when the device memory is free, else when the copies have been
        launched. Raises UsageError in a pass, while parameters are gathered, or if the optimizer averages over ranks.
        """
        model = self._model
        model.hooks.settle()
        if model.update is not None:
            model.update.check_movable("engine.offload_states()")
        busy = model.model_pass.order.phase is not Phase.IDLE or model.unsharder.suspended
        if busy or any(unit.pins for unit in model.units):
            raise UsageError(
                "engine.offload_states(): a pass is under way, or parameters are gathered (GatheredParameters, "
                "engine.gathered()). Call it between steps, outside of such blocks"
            )
        model.unsharder.reshard_kept()
        model.finish_gathers()
        model.await_copies()
        if OffloadStateTypeEnum.lp_params in kinds:
            self._barrier("offload_states()")
        self._move(kinds, pinned=pinned)
        if wait:
            assert self._moved is not None
            self._moved.synchronize()
            give_back_freed_memory()

    def _barrier(self, where: str) -> None:
        """Wait for the other ranks: a rank in a pass may fetch this rank's shards."""
        if self._model.channel is not None:
            self._model.comm.barrier(where)

    def _move(self, kinds: Collection[OffloadStateTypeEnum], *, pinned: bool) -> None:
        if self._moved is None:
            self._moved = MovedTensors(self._device, self._accountant)
        moved = self._moved
        moved.pinned = pinned
        new = [kind for kind in OffloadStateTypeEnum if kind in kinds and kind not in self._presence.away]
        for kind in new:
            self._presence.away |= {kind}
            if kind is OffloadStateTypeEnum.lp_grads:
                self._free_spent_gradients()
            for tensor, home, counted in self._parts(kind):
                if home.tier is Tier.DEVICE and tensor.device.type == self._device.type:
                    moved.put(tensor, counted)
            if kind is OffloadStateTypeEnum.lp_params:
                for unit in self._model.units:
                    if not unit.sharded:
                        self._move_replicated(unit, moved)
                self._take_new_views()

    def reload(self, *, wait: bool) -> None:
        """Move all state back (all ranks call). Without `wait`, later work of the current stream waits for it."""
        parameters = OffloadStateTypeEnum.lp_params in self._presence.away
        self.bring_back(wait=wait)
        self._model.shards_written()
        if parameters:
            self._barrier("reload_states()")

    def bring_back(self, *, wait: bool = False) -> None:
        """Move all state back on this rank only."""
        if self._moved is None or not self._presence.away:
            return
        self._moved.bring()
        while self._whole:
            section, copied = self._whole[-1]
            full = torch.empty(section.layout.numel, dtype=section.layout.dtype, device=self._device)
            self._accountant.hold(Category.PARAMETERS, full)
            self._moved.fill(full, copied)
            section.lie_in(full)
            self._accountant.remove(Category.PARAMETERS, copied.values.numel(), Tier.HOST)
            self._whole.pop()
        if OffloadStateTypeEnum.lp_params in self._presence.away:
            self._take_new_views()
            for unit in self._model.units:
                if not unit.sharded:
                    unit.show()
        if wait:
            self._moved.synchronize()
        self._presence.away = frozenset()

    def close(self) -> None:
        """Drop the gradients and the host memory of the closed model."""
        self._gradients, self._moved = (), None

    def tiers(self, kind: OffloadStateTypeEnum) -> set[Tier]:
        """Return the tiers of the state of a kind; empty if there is none."""
        found = set()
        for tensor, home, _ in self._parts(kind):
            if self._moved is not None and self._moved.has(tensor):
                found.add(Tier.HOST)
            elif home.tier is not Tier.DEVICE or tensor.untyped_storage().nbytes():
                found.add(home.tier)
        if kind is OffloadStateTypeEnum.lp_params:
            whole = [section for unit in self._model.units if not unit.sharded for section in unit.sections]
            found |= {Tier.HOST if kind in self._presence.away else Tier.DEVICE for section in whole}
        return found

    def _parts(self, kind: OffloadStateTypeEnum) -> Iterator[_Part]:
        if kind is OffloadStateTypeEnum.lp_params:
            for unit in self._model.units:
                for section in unit.sections:
                    if section.sharded:
                        yield _Part(section.shard, section.tiered_shard.home)
                    if section.second is not None:
                        yield _Part(section.second, section.tiered_second.home)
        elif kind is OffloadStateTypeEnum.hp_params:
            for unit in self._model.units:
                for section in unit.trainable:
                    if section.master is not None and not section.master_is_parameter:
                        yield _Part(section.master, section.tiered_state.home)
            if self._model.update is not None:
                yield from (_Part(*own) for own in self._model.update.own_masters())
        elif kind is OffloadStateTypeEnum.optim_states:
            if self._model.update is not None:
                yield from (_Part(*own) for own in self._model.update.own_state())
        elif kind is OffloadStateTypeEnum.lp_grads:
            for gradients in self._gradients:
                for section in gradients.unit.trainable:
                    if section.gradient is not None:
                        yield _Part(section.gradient, section.tiered_gradient.home, Category.GRADIENTS)
                for total in gradients.sums.values():
                    yield _Part(total, ON_DEVICE)
        else:
            yield from self._unreduced()

    def _unreduced(self) -> Iterator[_Part]:
        for gradients in self._gradients:
            sections = gradients.unit.sections
            for place, buffer in gradients.buffers.items():
                # The buffer may be the accumulator.
                if buffer.flat is not None and buffer.flat is not sections[place].gradient:
                    yield _Part(buffer.flat, gradients.tiered.home)

    def _free_spent_gradients(self) -> None:
        for gradients in self._gradients:
            if not gradients.accumulated and not gradients.buffers:
                for section in gradients.unit.trainable:
                    section.free_gradient()

    def _move_replicated(self, unit: Unit, moved: MovedTensors) -> None:
        unit.hide()
        for section in unit.sections:
            copied = moved.copy(section.full)
            self._accountant.add(Category.PARAMETERS, copied.values.numel(), Tier.HOST)
            self._whole.append((section, copied))
            section.lie_in(blank(section.full))

    def _take_new_views(self) -> None:
        if self._model.update is not None:
            self._model.update.take_new_views()
