"""Unit: parameters that are unsharded, reduced and stepped together (FSDP2: parameter group; DDP: bucket)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from shardwise.comm.collective_queue import Work
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain
from shardwise.compat import fake_tensor, is_shared, never_compiled, share_memory, version_of, without_overrides
from shardwise.device.ranges import named
from shardwise.errors import UsageError
from shardwise.memory.places import Acquisition, acquiring
from shardwise.registry import LogicalTensor, Registry
from shardwise.zero.units import released
from shardwise.zero.units.flat_param import FlatParamStorage, same_bits, sum_of_bits
from shardwise.zero.units.layout import GroupRange
from shardwise.zero.units.sources import GatherSource, SecondShardSource, ShardSource


class UnitState(Enum):
    """Whether a unit's parameters are unsharded."""

    SHARDED = "sharded"
    """Only this rank's range has memory; `full` is empty."""
    UNSHARDING = "unsharding"
    """`full` has memory, and an all-gather fills it. The parameters must not be read yet."""
    UNSHARDED = "unsharded"
    """`full` is valid; parameters are plain parameters."""


class UnshardReason(Enum):
    """Why a unit is unsharded."""

    FORWARD = "forward"
    """A forward pass that may be differentiated."""
    BACKWARD = "backward"
    PLAIN = "plain"
    """Evaluation, updated values, or access by the script."""


def moved_out(name: str) -> UsageError:
    """Return the error of a parameter whose data the script has assigned to."""
    return UsageError(
        f"the values of parameter {name!r} have been moved out of the memory that the engine steps, by an assignment "
        "to its data. Copy into it instead: `with torch.no_grad(): parameter.copy_(values)`"
    )


class Unit:
    """Parameters that are unsharded, reduced and stepped together; its flat parameters have the memory.

    `shardwise.zero.build` creates a unit unsharded, and then shards it. `modules` need the unit in `forward`.
    `take_over` is called after in-place changes of unsharded values, to update master weights; `allow_change` before
    shards are written: it may raise, and waits for copies that still read them.

    Attributes:
        sharded: whether the parameters are resharded between uses.
        level: level of the domain at which the parameters are sharded between uses.
        is_updated_elsewhere: whether a step updates parameters of this rank's shard on other ranks.
        away: whether shards are offloaded.
        unguarded: whether parameters have their own classes, and uses are not seen.
        pins: number of users outside of passes that keep the unit unsharded.
        exact, codes, second: sources of all-gathers: shards; in trained passes quantized weights; in backward passes
            secondary shards (None: there are none).
        second_valid: whether secondary shards have the current values.
        rounded: whether the unsharded values come from `codes`.
        dropped: names of parameters that were changed in place while their values were rounded.
        lost: True on the device if there was such a change, which the next step overwrites; None: none looked for.
    """

    def __init__(
        self,
        index: int,
        name: str,
        modules: Sequence[nn.Module],
        tensors: Sequence[LogicalTensor],
        registry: Registry,
        sections: Sequence[FlatParamStorage],
        domain: Domain,
        *,
        take_over: Callable[[Unit], None] | None = None,
        allow_change: Callable[[Unit], None] | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self._modules = [weakref.ref(module) for module in modules]  # because graphs keep units
        self.tensors = list(tensors)
        self.registry = registry
        self.sections = list(sections)
        self.trainable = [section for section in self.sections if section.layout.trainable]
        self.sharded = any(section.sharded for section in self.sections)
        self.level = max((section.levels.parameters for section in self.sections), default=0)
        self.is_updated_elsewhere = any(section.written_level > self.level for section in self.trainable)
        self.away = any(section.tiered_shard.away for section in self.sections)
        self.domain = domain
        self.state = UnitState.UNSHARDED
        self.unguarded = True
        self.pins = 0
        self._take_over, self._allow_change = take_over, allow_change
        self.exact: GatherSource = ShardSource(self.sections, domain)
        self.codes: GatherSource | None = None
        self.second: SecondShardSource | None = None
        self.second_valid = False
        self.rounded = False
        self.dropped: list[str] = []
        self.lost: torch.Tensor | None = None
        self._second_follows = False
        self._source: GatherSource = self.exact
        self._watched = False
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._sums: list[torch.Tensor] = []
        self._handle: Work | None = None
        self._arrived: Work | None = None
        self._refreshing: Work | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that need the unit in `forward`."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @cached_property
    def _classes(self) -> released.Classes:
        return released.classes_of(self.parameters)

    @cached_property
    def _blanks(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(parameter, released.blank_of(parameter)) for parameter in self.parameters]

    @cached_property
    def _places(self) -> list[tuple[nn.Parameter, FlatParamStorage, tuple[torch.Size, tuple[int, ...], int]]]:
        """Each parameter, its flat parameter, and the arguments of `as_strided` for its view."""
        return [
            (
                self.registry.parameters[slot.index],
                section,
                (shape := torch.Size(self.registry[slot.index].shape), released.strides_of(shape), slot.offset),
            )
            for section in self.sections
            for slot in section.layout.slots
        ]

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The user's parameter objects."""
        return [self.registry.parameters[tensor.index] for tensor in self.tensors]

    @cached_property
    def numel(self) -> int:
        """Elements of all flat parameters, padding included."""
        return sum(section.layout.numel for section in self.sections)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters, padding included."""
        return sum(section.layout.numel * section.layout.dtype.itemsize for section in self.sections)

    @property
    def between_uses(self) -> str:
        """Place of the values of a resharded unit, for errors."""
        parts = self.domain.parts(self.level)
        return f"sharded over {parts} ranks" if self.level else "kept elsewhere than on the device"

    @never_compiled
    def attach(self) -> None:
        """Point the parameters at their views of the flat buffers."""
        with without_overrides(), torch.no_grad():
            for parameter, section, place in self._places:
                parameter.data = section.full.as_strided(*place)

    @never_compiled
    def _detach(self) -> None:
        with without_overrides():
            for parameter, blank in self._blanks:
                parameter.data = blank

    def unshard(self, purpose: UnshardReason = UnshardReason.PLAIN) -> None:
        """Launch the all-gather of a sharded unit; the parameters stay guarded until it ends."""
        with named("gather", self.name):
            self._handle = self._launch(purpose)
        self.state = UnitState.UNSHARDING

    def all_gather_update(self, kind: str = "gather", *, everything: bool = False) -> None:
        """Launch the all-gather of values that the optimizer or (`everything`) a checkpoint has written on this rank.

        Unsharded parameters are valid after it; of a sharded unit the shard is. Collectives of a `kind` have one order.
        """
        sections = self.sections if everything else self.trainable
        level = self.level
        sections = [section for section in sections if section.written_level > level]
        if not sections:
            return
        shards = [(section.tiered_shard, True) for section in sections if section.tiered_shard.away]
        if shards:
            with acquiring(shards):
                self._all_gather_update(sections, kind)
                self.wait_for_update()
        else:
            self._all_gather_update(sections, kind)

    def _all_gather_update(self, sections: Sequence[FlatParamStorage], kind: str) -> None:
        level = self.level
        moves = [(s.shard, s.written, s.written_level) for s in sections]
        self.domain.gathers.follow()  # the current stream has written, and read the old values
        if self.sharded:
            self._refreshing = self.domain.gather(moves, level, self.name, kind)
        else:
            self.guard()
            self._handle = self.domain.gather(moves, level, self.name, kind)
            self.state = UnitState.UNSHARDING

    def wait_for_update(self) -> None:
        """Wait for the all-gather that makes the shard valid."""
        if self._refreshing is not None:
            with named("wait for gather", self.name):
                self._refreshing.wait()
            self._refreshing = None

    def _launch(self, purpose: UnshardReason, *, aside: bool = False) -> Work:
        """Launch an all-gather; `aside`: into memory that is freed after the all-gather."""
        if self._refreshing is not None:
            self.wait_for_update()
        self.rounded = self.codes is not None and purpose is not UnshardReason.PLAIN
        # Secondary shards get the values that the forward pass has computed with.
        self._second_follows = self.second is not None and purpose is UnshardReason.FORWARD
        if self.second is not None and self.second_valid and purpose is UnshardReason.BACKWARD:
            source: GatherSource = self.second
        else:
            source = self.exact if self.codes is None or purpose is UnshardReason.PLAIN else self.codes
        self._source = source
        full = [section.full for section in self.sections] if aside else ()
        if source.fills and (aside or self.state is UnitState.SHARDED):
            with self.domain.gathers.aside():
                for section in self.sections:
                    section.allocate()
        link = self.domain.gathers.start(source.launches(self.name))
        if aside:
            for section, values in zip(self.sections, full, strict=True):
                section.full = values
        return link

    def gather_whole(self, kind: str = "gather") -> Work:
        """Launch the all-gather from the shards into existing buffers, after the last `CollectiveQueue.follow`."""
        self.wait_for_update()
        return self.domain.gathers.start(self.exact.launches(self.name, kind))

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather; the values are valid then, and parameters of sharded units still guarded."""
        if self.state is not UnitState.UNSHARDING:
            if self._refreshing is not None:
                self.wait_for_update()
            if self._arrived is not None:
                self._arrived.wait()  # the current stream may not have waited
            return
        assert self._handle is not None
        with named("wait for gather", self.name):
            self._handle.wait()
            if not self._source.fills:
                for section in self.sections:
                    section.allocate()
                self._complete()
        arrived = self._handle if self.domain.async_gathers else None
        self.on_unsharded()
        self._arrived = arrived

    def _complete(self) -> None:
        self._source.finish()
        self.domain.gathers.follow()  # gathered memory belongs to the stream of all-gathers

    def join_unshard(self, purpose: UnshardReason) -> None:
        """Take part in an all-gather of the peers, although the unit is, or has been, unsharded here."""
        if self.domain.async_gathers and self.codes is None:
            self._launch(purpose, aside=True)
            self.domain.gathers.leave()
            return
        self.domain.gathers.follow()  # the current stream may still read the memory
        link = self._launch(purpose)
        with named("wait for gather", self.name):
            link.wait()
        if not self._source.fills:
            self._complete()
        self.note_values()

    def fetched(self, purpose: UnshardReason) -> None:
        """Complete a copy from the shards of peers: round the values as the all-gather of the peers does."""
        if self.codes is not None and purpose is not UnshardReason.PLAIN:
            self.codes.round()
            self.rounded = True
        self.on_unsharded()

    def on_unsharded(self) -> None:
        """Record that the unsharded values are valid."""
        self._handle = self._arrived = None
        if self.sharded:
            self.attach()
        self.state = UnitState.UNSHARDED
        self.note()
        if not self.sharded:
            self.unguard()

    def unguard(self) -> None:
        """Give the parameters their own classes: uses are not seen."""
        if not self.unguarded:
            self.unguarded = True
            for parameter, own, _ in self._classes:
                parameter.__class__ = own

    def guard(self) -> None:
        """Guard the parameters: each use is seen, and the values stay."""
        if self.unguarded and not self.pins:
            self.unguarded = False
            for parameter, _, guarded in self._classes:
                parameter.__class__ = guarded

    def owner_of(self, tensor: torch.Tensor) -> FlatParamStorage | None:
        """Return the flat parameter whose unsharded memory contains a tensor, or None."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata  # fake tensors of a dry run have no address
        return next((s for s in self.sections if s.full.numel() and s.full.untyped_storage()._cdata == storage), None)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lies in the unsharded memory of the unit."""
        return self.owner_of(tensor) is not None

    def reshard(self, heir: Unit | None = None) -> None:
        """Free the unsharded memory of a sharded unit; `heir`, the unit unsharded next, may get it."""
        if not self.sharded or self.state is UnitState.SHARDED or self.pins:
            return
        if self.state is UnitState.UNSHARDING and self._may_forget:
            self._handle = None  # nothing has used the memory, and it belongs to the stream of the gather
            self.domain.gathers.leave()
            for section in self.sections:
                section.free()
            self.state = UnitState.SHARDED
            return
        self.wait_for_unshard()
        try:
            self._keep_changes()
        finally:
            self._leave(heir)

    def _leave(self, heir: Unit | None) -> None:
        if self._second_follows:
            self._second_follows = False
            self._store_second()
        self.guard()
        self._detach()
        self.domain.gathers.follow()  # the memory belongs to that stream, which reuses it after all users
        if heir is not None and not self.domain.async_gathers:
            for section, other in zip(self.sections, heir.sections, strict=False):
                section.pass_memory_to(other)
        for section in self.sections:
            # The script may still compute with a view that it has kept; its last reference gives the memory back.
            if self.domain.async_gathers and section.full.numel() and is_shared(section.full):
                self.domain.ranks.streams.keep(section.full)
            section.free()
        self._arrived = None
        self.state = UnitState.SHARDED

    @property
    def _may_forget(self) -> bool:
        """Whether memory may be freed before the all-gather into it has ended."""
        return self.domain.async_gathers and self._source.fills and not self._second_follows

    def drop_inherited(self) -> None:
        """Free memory of another unit that has not been used."""
        for section in self.sections:
            section.drop_inherited()

    def hide(self) -> None:
        """Guard a unit that is never resharded, and point its parameters at blanks, because its memory moves."""
        self.wait_for_unshard()
        self._arrived = None  # it may refer to the memory
        self.guard()
        self._detach()
        self.state = UnitState.SHARDED

    def show(self) -> None:
        """Undo `hide`: point the parameters at the flat buffers, which have the values."""
        self.attach()
        self.state = UnitState.UNSHARDED
        self.unguard()

    def keep_unsharded(self) -> None:
        """Keep the unsharded values for the next pass, as if the unit had been resharded and unsharded again."""
        self.wait_for_unshard()
        self._keep_changes()
        self.note()
        self.guard()

    def note(self) -> None:
        """Take the current values as unchanged."""
        if self.sharded:
            self._versions, self._addresses = self._read_versions(), self._read_addresses()
        self.note_values()

    def watch(self, watched: bool) -> None:
        """Decide whether changes that no version counter shows (through `p.data`) are looked for from now on."""
        self._watched = watched
        if not watched:
            self._sums = []

    def note_values(self) -> None:
        """Take values that the engine has written as unchanged, for `look_for_lost`."""
        self._sums = [sum_of_bits(section.full) for section in self._kept_elsewhere] if self._watched else []

    def look_for_lost(self) -> None:
        """Compare the values with those of `note_values`; the result is `lost`."""
        for section, before in zip(self._kept_elsewhere, self._sums, strict=False):
            found = sum_of_bits(section.full) != before
            self.lost = found if self.lost is None else self.lost | found

    @cached_property
    def _kept_elsewhere(self) -> list[FlatParamStorage]:
        """Flat parameters whose values come from other memory (a shard, master weights)."""
        found = self.sections if self.sharded else [s for s in self.trainable if not s.master_is_parameter]
        return [] if self._is_imagined else list(found)

    @cached_property
    def _is_imagined(self) -> bool:
        fake = fake_tensor()
        return fake is not None and isinstance(self.sections[0].full, fake)

    def _read_addresses(self) -> list[int]:
        if self._is_imagined:
            return []
        with without_overrides():
            return list(map(torch.Tensor.data_ptr, self.parameters))

    def _read_versions(self) -> list[int]:
        with without_overrides():
            return list(map(version_of, self.parameters))

    def _keep_changes(self) -> None:
        """Store changes in place that `forward` has made (a codebook, a clamped weight), the same on all ranks.

        Changes of rounded values are dropped, because rounding hides them; an error gives the names.
        Raises UsageError if `forward` has assigned to the data of a parameter.
        """
        if self._addresses != self._read_addresses():
            self._refuse_assigned()
        if not self._versions or self._versions == self._read_versions():
            self.look_for_lost()
            return
        if self.rounded:
            self.dropped += self._changed_in_place()
            return
        second = self.second_valid
        self.store_shard()
        if second:
            self._store_second()
        if self._take_over is not None:
            self._take_over(self)

    def _changed_in_place(self) -> list[str]:
        now = zip(self.tensors, self._versions, self._read_versions(), strict=True)
        return [tensor.name for tensor, before, after in now if before != after]

    def _assigned(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield parameters that a script has assigned data of the same shape to, with their views of flat buffers."""
        for parameter, section, place in self._places:
            if parameter.shape == place[0] and not share_memory(parameter, section.full):
                yield parameter, section.full.as_strided(*place)

    @never_compiled
    def take_assigned(self) -> None:
        """Copy values that a script has assigned (`p.data = values`, of the same shape) to the flat buffers."""
        with without_overrides(), torch.no_grad():
            for parameter, values in self._assigned():
                values.copy_(parameter.data)
                parameter.data = values

    @never_compiled
    def _refuse_assigned(self) -> None:
        with without_overrides():
            assigned = list(self._assigned())
            for parameter, values in assigned:
                parameter.data = values
        for parameter, _ in assigned:
            tensor = self.registry.find(parameter)
            assert tensor is not None
            raise moved_out(tensor.name)

    def changed(self) -> list[str]:
        """Return the names of parameters of a sharded unit that were changed since `note`.

        Version counters show changes in place; this rank's range of the values shows changes through aliases.
        """
        if not self.sharded:
            return []  # the engine has been destroyed in the block
        self.take_assigned()
        names = self._changed_in_place()
        for section in self.sections:
            if not section.sharded:
                continue
            with section.tiered_shard.use(written=False):
                own = section.full[section.shard_range]
                if same_bits(own, section.shard):
                    continue
                for piece in section.layout.pieces(section.shard_range.start, section.shard_range.stop):
                    name, place = (
                        self.registry[piece.index].name,
                        slice(piece.offset, piece.offset + piece.stop - piece.start),
                    )
                    if name not in names and not same_bits(own[place], section.shard[place]):
                        names.append(name)
        return names

    def acquisitions(self) -> list[Acquisition]:
        """Return the tiered tensors needed to write any of the unit's state that is not stepped on its own tier."""
        wanted = [(section, tiered) for section in self.sections for tiered in section.away]
        return [(x, True) for section, x in wanted if x is not section.tiered_shard or not section.master_is_stored]

    def keep_second(self, group: Communicator) -> None:
        """Keep secondary shards over the ranks of `group`, for backward passes."""
        for section in self.sections:
            section.keep_second(group.world, group.rank)
        self.second = SecondShardSource(self.sections, group)

    def _store_second(self) -> None:
        for section in self.sections:
            section.store_second()
        self.second_valid = True

    def store_shard(self) -> None:
        """Copy this rank's range of the unsharded values into the shard. Raises UsageError if they are rounded."""
        if self.rounded:
            raise UsageError(
                f"parameters of unit {self.name!r} cannot be changed inside of a forward or backward pass: under "
                "zero_optimization.zero_quantized_weights or float8.all_gather they have rounded values there, and "
                "storing them would round the weights themselves. Change parameters between passes."
            )
        self.second_valid = False
        if self._allow_change is not None:
            self._allow_change(self)
        for section in self.sections:
            if section.sharded:
                with section.tiered_shard.use(read=False, written=True):
                    section.shard.copy_(section.full[section.shard_range])
        self.domain.gathers.follow()

    def look_ahead(self) -> None:
        """Prefetch an offloaded shard (`away`) for the all-gather that is launched next."""
        if self.state is UnitState.SHARDED and (self.level or self.domain.async_gathers):
            for section in self.sections:
                section.tiered_shard.look_ahead(section.shard)

    def segments(self) -> Iterator[tuple[FlatParamStorage, GroupRange]]:
        """Yield the ranges of optimizer groups that this rank's optimizer updates."""
        for section in self.trainable:
            for lane in section.layout.segments(section.master_start, section.master_stop):
                yield section, lane
