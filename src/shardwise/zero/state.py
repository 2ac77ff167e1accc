"""Access to the state of a sharded model, for checkpoints and functions of single parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from shardwise.boxes import Region
from shardwise.memory.places import Acquisition, acquiring, in_turn
from shardwise.registry import HeldPart, LogicalTensor, Registry
from shardwise.zero.units import released
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.layout import ShardSlice
from shardwise.zero.units.unit import Unit, UnitState
from shardwise.zero.updates.update import Update

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel

T = TypeVar("T")


class ShardedState:
    """Values, gradients and optimizer state of a sharded model (`shardwise.checkpoint.protocols.CheckpointedModel`)."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self.module, self.optimizer = model.module, model.optimizer
        self.replica, self.device = model.sharding.norm_group or model.comm, model.device
        self.pass_group, self.place = model.comm, model.sharding.place
        replicas = model.sharding.replicas
        self.comm = self.replica if replicas is None else replicas[0].job
        self._saves = replicas is None or replicas[0].number == 0

    @property
    def registry(self) -> Registry:
        """The parameters, by name; another one after a refresh."""
        return self._model.registry

    @property
    def units(self) -> Sequence[Unit]:
        """All units."""
        return self._model.units

    @property
    def update(self) -> Update | None:
        """Update with the optimizer state; None without an optimizer."""
        return self._model.update

    def share_changes(self) -> None:
        """Copy values that the script has changed to the master weights (all ranks call)."""
        self._model.share_changes()

    def finish_gathers(self) -> None:
        """Wait for the all-gathers of updated parameters."""
        self._model.finish_gathers()

    def values_of(self, index: int) -> torch.Tensor:
        """Return the 1-D view of an unsharded parameter in its unit's memory."""
        section = self._model.section_of(index)
        slot = next(slot for slot in section.layout.slots if slot.index == index)
        return section.full[slot.offset : slot.offset + slot.numel]

    def gradient_runs(self, index: int) -> list[tuple[int, int, torch.Tensor]] | None:
        """Return (start, stop, values) that sum over ranks to the accumulated gradient; None: there is no gradient."""
        assert self._model.reducer is not None
        unit, section = self._model.unit_of(index), self._model.section_of(index)
        gradients = self._model.reducer.gradients[unit.index]
        if self._model.reducer.partial:
            number, slot = next((n, s) for n, s in enumerate(section.layout.slots) if s.index == index)
            held = gradients.buffers.get(unit.sections.index(section))
            if held is None or held.flat is None or not held.present[number]:
                return []
            values = held.flat[slot.offset : slot.offset + slot.numel]
            return [(0, slot.numel, values * self._model.reducer.prescale_of(gradients))]
        parts: list[tuple[tuple[int, int], torch.Tensor]] = []
        if gradients.accumulated:
            parts.append((section.own_range, section.own_gradient))
        if gradients.sums:  # sums over ranks of the inner dimensions
            ends = section.layout.range_of(section.domain.place, gradients.level)
            parts.append((ends, gradients.sums[unit.sections.index(section)]))
        if not parts:
            return None
        return [
            (p.start, p.stop, values[p.offset : p.offset + p.stop - p.start])
            for ends, values in parts
            for p in section.layout.pieces(*ends)
            if p.index == index
        ]

    def own_runs(
        self, index: int, runs: Iterable[tuple[int, int, torch.Tensor]]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Return the parts of (start, stop, values) that only this rank has (all, if the optimizer is replicated)."""
        section = self._model.section_of(index)
        if section.levels.optimizer in (0, section.domain.depth):
            return list(runs)
        own = [p for p in section.layout.pieces(*section.own_range) if p.index == index]
        cuts = [(max(p.start, start), min(p.stop, stop), start, v) for start, stop, v in runs for p in own]
        return [(low, high, v[low - start : high - start]) for low, high, start, v in cuts if low < high]

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of an unfinished accumulation window are stored."""
        reducer = self._model.reducer
        return reducer is not None and (
            reducer.partial or any(g.accumulated or g.sums or g.buffers for g in reducer.gradients.values())
        )

    def cut_states(self, shared: Mapping[int, Any]) -> None:
        """Let parameters with different step counts have state of their own (`Update.cut_by`)."""
        if self._model.update is not None:
            self._model.update.cut_by(shared)
            self._model.guards.note_groups()

    def rank_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state of this rank only, for its part of a checkpoint; None: no such state."""
        return None if self._model.update is None else self._model.update.rank_state()

    def load_rank_state(self, state: dict[str, Any] | None) -> bool:
        """Load a result of `rank_state` of this rank; return False if its layout differs."""
        if self._model.update is None:
            return state is None
        fits = self._model.update.load_rank_state(state)
        local = self._model.local
        if local is not None and local.has_own_values:
            self.publish()
        return fits

    def value_runs(self) -> dict[int, list[tuple[int, int, torch.Tensor]]]:
        """Return (start, stop, 1-D view) of master weights stepped here, or this rank's other values, by parameter."""
        self._model.presence.require("the engine's state cannot be read or written")
        self._model.take_changes()
        runs = {}
        for index, (section, own) in self._own_pieces().items():
            with self.materialized(index):
                if section.layout.trainable and self._model.update is not None:
                    runs[index] = self._model.update.master_pieces(index)
                else:
                    runs[index] = [
                        (p.start, p.stop, section.own_values[p.offset : p.offset + p.stop - p.start]) for p in own
                    ]
        return runs

    def box_of(self, tensor: LogicalTensor) -> Region | None:
        """Return the box of a tensor that contains this rank's ranges; None: all of it, as for its owner."""
        owned = self._model.update is not None and self._model.section_of(tensor.index).layout.cut
        return None if owned else tensor.box

    def owned_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """Return the ranges of each parameter that this rank saves. Over all ranks, each element is saved once."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for index, (section, own) in self._own_pieces().items():
            if not self._saves or (not self._model.numbering.counts[index] and not section.layout.cut):
                ranges[index] = []  # saved by other ranks
                continue
            finest = section.levels.optimizer == section.domain.depth
            if section.layout.trainable and self._model.update is not None and finest:
                ranges[index] = self._model.update.master_ranges(index)
            else:
                ranges[index] = [(piece.start, piece.stop) for piece in own]
        return ranges

    def _own_pieces(self) -> dict[int, tuple[FlatParamStorage, list[ShardSlice]]]:
        found: dict[int, tuple[FlatParamStorage, list[ShardSlice]]] = {}
        for unit in self._model.units:
            for section in unit.sections:
                found.update((slot.index, (section, [])) for slot in section.layout.slots)
                for piece in section.layout.pieces(*section.own_range):
                    found[piece.index][1].append(piece)
        return found

    def parts_of(self, index: int) -> Sequence[HeldPart]:
        """Return the parts that ranks have at the place of this parameter, each once; empty if tensors are equal."""
        return self._model.wholes.parts_of(index)

    @contextlib.contextmanager
    def writing_masters(self) -> Iterator[None]:
        """Acquire all state for the block, which may write master weights, and `publish` it (all ranks call)."""
        self.share_changes()
        self._model.await_copies()
        with self.acquired():
            yield
        self.publish()

    def publish(self, units: Sequence[Unit] | None = None) -> None:
        """Update all copies of the values after `value_runs` of `units` (None: all) were written (all ranks call)."""
        self._model.unsharder.reshard_kept()
        for unit in self._model.units if units is None else units:
            unit.wait_for_unshard()
            with self.acquired([unit]):
                if self._model.update is not None:
                    self._model.update.publish(unit)
                unit.all_gather_update("explicit", everything=True)
                unit.wait_for_unshard()
            if unit.sharded and unit.state is not UnitState.SHARDED:
                self._model.domain.gathers.follow()
                unit.gather_whole("explicit").wait()
                unit.rounded = False
                unit.note_values()
        self._model.values_changed()
        self._model.shards_written()

    def gather_parts(self, parameters: Iterable[nn.Parameter], kind: str = "explicit") -> list[Unit]:
        """Unshard the units of parameters outside of passes (all ranks call); return the units that were sharded.

        Parts of tensors stay parts. `kind` is the class of collectives that share one order with the all-gathers.
        """
        self._model.hooks.settle()
        self._model.presence.require("parameters cannot be gathered", values=True)
        wanted = self._model.units_of(parameters)
        self._model.unsharder.reshard_kept(wanted)
        changed: list[Unit] = []
        try:
            for unit in wanted:
                unit.wait_for_unshard()
                if unit.state is UnitState.SHARDED:
                    self._fill_now(unit, kind)
                    unit.pins += 1
                    self._model.pinned += 1
                    changed.append(unit)
        except BaseException:
            self.let_go(changed)
            raise
        return changed

    def _fill_now(self, unit: Unit, kind: str) -> None:
        self._model.domain.gathers.follow()
        with self._model.domain.gathers.aside():
            for section in unit.sections:
                section.allocate()
        try:
            unit.gather_whole(kind).wait()
        except BaseException:
            for section in unit.sections:
                section.free()
            raise
        unit.rounded = False
        unit.on_unsharded()
        unit.unguard()

    def let_go(self, gathered: Sequence[Unit]) -> None:
        """Reshard the units that `gather_parts` has returned."""
        with contextlib.ExitStack() as stack:  # all of them, also after an error
            for unit in reversed(gathered):
                stack.callback(self._let_go, unit)

    def _let_go(self, unit: Unit) -> None:
        # The script has resized them: the next pass raises, unless `engine.refresh()` takes them over before.
        pairs = zip(unit.tensors, unit.parameters, strict=True)
        resized = [(parameter, parameter.data) for tensor, parameter in pairs if parameter.shape != tensor.shape]
        unit.pins -= 1
        self._model.pinned -= 1
        unit.reshard()
        for parameter, values in resized:
            released.restore(parameter)
            parameter.data = values

    def put_parts_back(self, parameters: Iterable[nn.Parameter], gathered: Sequence[Unit], src: int | None) -> None:
        """End a `gather_parts`, and reshard the units. Raises UsageError if the values are rounded.

        All ranks take over the values of global rank `src`, into master weights too; None drops changes.
        """
        try:
            if src is not None:
                self._model.check_there("changed parameters cannot be stored")
                units = self._model.units_of(parameters)
                for unit in units:
                    self._model.allow_change(unit)
                for unit in units:
                    unit.take_assigned()
                    ranks = unit.domain.ranks
                    root = ranks.group_rank(src) if src in ranks.members else 0
                    for section in unit.sections:
                        ranks.broadcast(section.full, root, f"{unit.name}.modified").wait()
                        if self._model.sharding.replicas is not None:
                            self._model.sharding.replicas[0].spread(section.full, src, f"{unit.name}.modified")
                    unit.store_shard()
                    self._model.values_version += 1
                    if self._model.update is not None:
                        self._model.take_over(unit)
                if self._model.update is not None:
                    self._model.update.share_changes()
        finally:
            self._model.shards_written()
            for unit in gathered:
                unit.note()  # drops other changes
            self.let_go(gathered)

    @property
    def is_offloaded(self) -> bool:
        """Whether state is offloaded from the device."""
        return any(section.away for unit in self._model.units for section in unit.sections) or bool(
            self._model.owners is not None and self._model.owners.acquisitions()
        )

    def fetch(self, tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
        """Read (key, view) pairs in order, and prefetch the next from their tiers; `use` gets keys on the device."""
        away = [tiered for unit in self._model.units for section in unit.sections for tiered in section.away]
        away += [tiered for tiered, _ in self._model.owners.acquisitions()] if self._model.owners is not None else []
        owners = {storage: tiered for tiered in away for storage in tiered.storages}
        groups: list[tuple[list[T], list[Acquisition]]] = []
        for key, tensor in tensors:
            owner = owners.get(id(tensor.untyped_storage())) if owners else None
            if not groups or (owner is not None and groups[-1][1] and groups[-1][1][0][0] is not owner):
                groups.append(([], []))
            groups[-1][0].append(key)
            if owner is not None and not groups[-1][1]:
                groups[-1][1].append((owner, False))
        in_turn(groups, use)

    def iter_resident(self) -> Iterator[Collection[int]]:
        """Yield sets of parameters with their state on the device meanwhile, for reading and writing."""
        if not self.is_offloaded or (self._model.owners is not None and self._model.owners.acquisitions()):
            with self.acquired():  # whole tensors are acquired together
                yield range(len(self._model.registry))
            return
        for unit in self._model.units:
            with self.acquired([unit]):
                yield {tensor.index for tensor in unit.tensors}

    def acquired(self, units: Sequence[Unit] | None = None, *, written: bool = True) -> AbstractContextManager[None]:
        """Acquire the offloaded state of units (None: all) for the block. `written` False: for reading only.

        State of tensors that are stepped unsharded is acquired all at once.
        """
        self._model.presence.require("the engine's state cannot be read or written")
        wanted: list[Acquisition] = []
        for unit in self._model.units if units is None else units:
            wanted += unit.acquisitions()
            gradients = None if self._model.reducer is None else self._model.reducer.gradients.get(unit.index)
            if gradients is not None and gradients.tiered.away:
                wanted.append((gradients.tiered, True))
        if self._model.owners is not None:
            wanted += self._model.owners.acquisitions()
        return acquiring([(tiered, written and writes) for tiered, writes in wanted])

    @contextlib.contextmanager
    def materialized(self, index: int) -> Iterator[None]:
        """Permit views of a parameter's offloaded values and state in the block, without valid content."""
        with contextlib.ExitStack() as stack:
            for tiered in self._model.section_of(index).away:
                stack.enter_context(tiered.shown())
            for tiered, _ in self._model.owners.acquisitions() if self._model.owners is not None else ():
                stack.enter_context(tiered.shown())
            yield
