"""Unit: the parameters that are gathered, reduced and stepped together, and the memory behind them.

For each of its sections a unit holds

* `full`: one flat buffer whose views are the user's parameters. Sharded parameters have one only while they are
  gathered. A release lets go of it and never frees it by force: what else refers to it (a `state_dict()`, a NumPy view,
  a reference that the script keeps) stays valid, with the values of that time, and keeps the memory. What autograd has
  saved does not count among these: see `shardwise.zero.passes.saved`.
* `shard`: this rank's range of it, in the same dtype (`full` itself where parameters are not sharded).
* `master`: what the optimizer updates, in fp32 (or wider): this rank's range, which is everything where the optimizer
  is not sharded, and may be a part of the shard. It is a view of the shard (or of `full`) where that already has the
  right dtype.
* `gradient`: the accumulated gradient for `master`, from the backward pass that brings it to the end of the step.
* `second`: this rank's range of `full` where it is sharded over a few ranks only: what the forward pass has computed
  with, for the gather of the backward pass.

What lives elsewhere than on the device (`shardwise.memory.places`) has memory only while it is lent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.collective_queue import Launch, Work
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain
from shardwise.comm.native import PendingCollective
from shardwise.compat import is_shared, never_compiled, storage_users, without_overrides
from shardwise.device.ranges import named
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import ALL_AT_HAND, Borrowed, Homes, Loans, StateHome, borrowed
from shardwise.registry import LogicalTensor, Registry
from shardwise.zero.units import released
from shardwise.zero.units.joined import GradientPlaces
from shardwise.zero.units.layout import FlatParam, GroupRange
from shardwise.zero.units.plan import Levels


class UnitState(Enum):
    """Where a unit's whole values are."""

    RELEASED = "released"
    """Only this rank's range exists; `full` is empty."""
    GATHERING = "gathering"
    """`full` has memory and is being filled; the parameters must not be read yet."""
    GATHERED = "gathered"
    """`full` is valid on this rank; parameters are plain parameters."""


class UnshardReason(Enum):
    """What values are gathered for."""

    FORWARD = "forward"
    """A forward pass that may be differentiated."""
    BACKWARD = "backward"
    """Its backward pass."""
    PLAIN = "plain"
    """Anything else: evaluation, updated values, access by the script."""


class GatherSource(Protocol):
    """What a unit's whole values are gathered from.

    Attributes:
        fills: the gather writes into the whole buffers, which have memory before it is launched; else `finish` does,
            and they need none until then.
    """

    fills: bool

    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        """Return what is to be launched in turn (see `shardwise.comm.collective_queue.CollectiveQueue.start`)."""

    def finish(self) -> None:
        """Complete the whole buffers when the gather has ended."""


class Codes(GatherSource, Protocol):
    """A source that loses digits (`shardwise.zero.units.quantized_weights.UnitCodes`)."""

    def round(self) -> None:
        """Make exact whole values what they would be had they been gathered so."""


class FlatParamStorage:
    """The buffers of one section of a unit; see the module docstring.

    Args:
        layout: what lies where.
        domain: the ranks that have it.
        levels: over how many of their dimensions its state is divided.
        stepped: whether the optimizer steps the master here; elsewhere ranges at the finest level get new values.
        device: where it lies.
        master_dtype: of the master weights.
        accumulate_dtype: of the gradient.
        accountant: is told about the buffers.
        homes: where its state lives.
        label: the unit's name.

    Attributes:
        written_level: at which level this rank's range is that gets new values here.
        sharded: whether the whole values are released between uses.
        steps_on: where master weights, gradients and the optimizer's state are when it steps.
        optimizer_loans: lend the master weights and the optimizer's state.
        gradient_loans: lend the gradient.
        shard_loans: lend the shard.
        second_loans: lend the second shard.
    """

    def __init__(
        self,
        layout: FlatParam,
        *,
        domain: Domain,
        levels: Levels,
        stepped: bool = True,
        device: torch.device,
        master_dtype: torch.dtype,
        accumulate_dtype: torch.dtype,
        accountant: Accountant,
        homes: Homes = ALL_AT_HAND,
        label: str = "",
    ) -> None:
        self.layout = layout
        self.domain = domain
        self.levels = levels
        self.written_level = levels.optimizer if stepped and layout.trainable else domain.depth
        self.device = device
        self.accumulate_dtype = accumulate_dtype
        self._accountant = accountant
        home = homes.whole if layout.whole else homes.optimizer
        self.steps_on = home.used_on or device
        self.optimizer_loans = Loans(home, accountant, label)
        self.gradient_loans = Loans(homes.gradients, accountant, label)
        self.shard_loans, self.second_loans = (Loans(homes.parameters, accountant, label) for _ in range(2))
        alike = not layout.whole and levels.optimizer == levels.parameters
        self._shares = alike and self._in_place(self.shard_loans)
        self.full = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.sharded = levels.parameters > 0 or self.shard_loans.away
        self.master_start, self.master_stop = layout.range_of(domain.place, levels.optimizer)
        self.master_dtype = master_dtype
        self.shard = self.full[self.shard_range]
        self.source = self.full
        self.master: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.second: torch.Tensor | None = None
        self._second_range = slice(0)
        self._inherited: torch.Tensor | None = None
        accountant.hold(Category.GATHERED if self.sharded else Category.PARAMETERS, self.full)

    @cached_property
    def away(self) -> list[Loans]:
        """Loans of what lives elsewhere, but for the second shard."""
        return [loans for loans in (self.optimizer_loans, self.gradient_loans, self.shard_loans) if loans.away]

    @property
    def stepping(self) -> list[Borrowed]:
        """What has to be borrowed so that an optimizer can step the section."""
        found = [loans for loans in self.away if not self._in_place(loans)]
        wanted = [x for x in found if x is not self.gradient_loans or not self._fetches]
        return [
            (x, None if x is self.shard_loans and self._is_overwritten else x is not self.gradient_loans)
            for x in wanted
        ]

    @property
    def _is_overwritten(self) -> bool:
        """Whether a step writes each element of the shard, from masters of their own, and reads none."""
        if not self.layout.trainable or self.master_is_parameter or self.written_level != self.levels.parameters:
            return False
        first, last = self.master_start, self.master_stop
        stepped = sum(lane.stop - lane.start for lane in self.layout.segments(first, last))
        return self.shard_range == slice(first, last) and stepped == last - first

    def _in_place(self, loans: Loans) -> bool:
        """Whether what is lent elsewhere is worked on where it lives, because the optimizer steps there."""
        return self.steps_apart and loans.away and loans.home.at_hand

    @property
    def _fetches(self) -> bool:
        """Whether the gradient is read into memory of the host to be stepped: it is lent to another device."""
        loans = self.gradient_loans
        return self.steps_apart and loans.away and not loans.home.at_hand and loans.home.used_on is None

    @property
    def own_range(self) -> tuple[int, int]:
        """This rank's range at the finest level, of which no other rank has a part."""
        return self.layout.range_of(self.domain.place)

    @property
    def shard_range(self) -> slice:
        """Where the shard lies in `full`."""
        return slice(*self.layout.range_of(self.domain.place, self.levels.parameters))

    @property
    def written(self) -> torch.Tensor:
        """The view of the shard (or of `full`) that gets new values on this rank."""
        return self.domain.within(self.shard, self.levels.parameters, self.written_level)

    @property
    def own_values(self) -> torch.Tensor:
        """The view of the shard (or of `full`) at `own_range`."""
        return self.domain.within(self.shard, self.levels.parameters, self.domain.depth)

    @property
    def own_gradient(self) -> torch.Tensor:
        """The view of the accumulated gradient at `own_range` (given memory on first use)."""
        return self.domain.within(self.whole_gradient, self.levels.optimizer, self.domain.depth)

    @property
    def whole_gradient(self) -> torch.Tensor:
        """The gradient for `master` (given memory, of undefined content, on first use)."""
        size = self.master_stop - self.master_start
        if self.gradient is None:
            where = self._gradients.used_on or self.device
            self.gradient = torch.empty(size, dtype=self.accumulate_dtype, device=where)
            if self.gradient_loans.away:
                self.gradient_loans.keep(Category.GRADIENTS, self.gradient)
                return self.gradient
            self._accountant.disregard(self.gradient)  # its storage comes and goes: told by the bytes
            self._accountant.add(Category.GRADIENTS, self.gradient.nbytes, self._gradients.tier)
        elif size and not self.gradient_loans.away and not self.gradient.untyped_storage().nbytes():
            self.gradient.untyped_storage().resize_(self.gradient.nbytes)
            self._accountant.add(Category.GRADIENTS, self.gradient.nbytes, self._gradients.tier)
        return self.gradient

    @property
    def stepped_gradient(self) -> torch.Tensor:
        """The gradient for `master` where the optimizer reads it (once: it may be a copy)."""
        gradient = self.whole_gradient
        if self._in_place(self.gradient_loans):
            return self.gradient_loans.in_place(gradient)
        if self._fetches and not self.gradient_loans.lent:
            fetched = torch.empty(gradient.shape, dtype=gradient.dtype, device=self.steps_on)
            self._accountant.hold(Category.GRADIENTS, fetched, Tier.HOST)
            return self.gradient_loans.read(gradient, fetched)
        return gradient

    @property
    def lends_gradient(self) -> bool:
        """Whether `stepped_gradient` has to be borrowed."""
        return self.gradient_loans.away and not self._in_place(self.gradient_loans)

    @property
    def measured_gradient(self) -> torch.Tensor:
        """The view of it at `own_range`."""
        return self.domain.within(self.stepped_gradient, self.levels.optimizer, self.domain.depth)

    def free_gradient(self) -> None:
        """Give the gradient's memory back; views of it, which are all the engine's own, see the next one."""
        if self.gradient_loans.away:
            return
        if self.gradient is not None and self.gradient.untyped_storage().nbytes():
            self.gradient.untyped_storage().resize_(0)
            self._accountant.remove(Category.GRADIENTS, self.gradient.nbytes, self._gradients.tier)

    @contextlib.contextmanager
    def lending_gradient(self) -> Iterator[torch.Tensor]:
        """Show the gradient to an optimizer inside the block; memory that is still referred to afterwards is left.

        Not after an exception, whose frames refer to the gradient: the step may be tried again.
        """
        shown = self.stepped_gradient
        users = storage_users(shown)
        yield shown
        gradient = self.whole_gradient
        if not self._fetches and (users is None or storage_users(shown) != users):
            self.gradient = None
            if self.gradient_loans.away:
                self.gradient_loans.forget(gradient)
            else:
                self._accountant.remove(Category.GRADIENTS, gradient.nbytes, self._gradients.tier)

    @cached_property
    def places(self) -> GradientPlaces:
        """Where the gradients of the parameters lie in the flat gradient."""
        return GradientPlaces(self.layout.numel, [(slot.offset, slot.numel) for slot in self.layout.slots])

    @property
    def keeps_whole_gradient(self) -> bool:
        """Whether this rank needs all of the reduced gradient, because it updates all of the section."""
        return self.master_stop - self.master_start == self.layout.numel

    @property
    def master_is_parameter(self) -> bool:
        """Whether the optimizer updates the parameters' own memory."""
        return self.master_dtype == self.layout.dtype and (not self.steps_apart or self._shares)

    @property
    def master_is_stored(self) -> bool:
        """Whether the optimizer updates the parameters where they live, and are lent from to the device.

        Frozen parameters, and those of an engine without an optimizer, have no master.
        """
        return self.master is not None and self.master_is_parameter and self.steps_apart

    @property
    def steps_apart(self) -> bool:
        """Whether the optimizer steps in other memory than that of the device."""
        return self.optimizer_loans.home.used_on is not None

    @property
    def _gradients(self) -> StateHome:
        """Where the accumulated gradient lives."""
        return self.gradient_loans.home

    def widen_source(self, dtype: torch.dtype) -> None:
        """Read the initial values in a wider dtype than the parameters will have, so that masters start from them."""
        self.source = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
        self._accountant.hold(Category.OTHER, self.source)

    def settle(self, *, keep_master: bool) -> None:
        """Turn the whole initial values in `source` into parameters, shard and master weights.

        Args:
            keep_master: whether the optimizer steps masters kept here (False: somebody else owns them).
        """
        if self.source is not self.full:
            self.full.copy_(self.source)
        if self.sharded:
            self.shard = self.shard.clone()
            self.shard_loans.keep(Category.PARAMETERS, self.shard)
        if self.layout.trainable and keep_master:
            if not self.master_is_parameter:
                initial = self.source[self.master_start : self.master_stop]
                self.master = initial.to(self.steps_on, self.master_dtype, copy=True)
                self.optimizer_loans.keep(Category.MASTER, self.master)
            else:
                self.master = self.shard_loans.shared(self.shard) if self.steps_apart else self.published

    def forget_source(self) -> None:
        """Drop the wide initial values."""
        self.source = self.full

    def allocate(self) -> None:
        """Take memory, of undefined content, for the whole buffer."""
        if self._inherited is not None:
            self.full, self._inherited = self._inherited, None
            return
        self.full = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=self.device)
        self._accountant.hold(Category.GATHERED, self.full)

    def hand_on(self, heir: FlatParamStorage) -> None:
        """Let a section that is gathered next have the memory of this one, if it is as large and nobody refers to it.

        New memory costs the processor the time to clear it. (The allocators of devices keep memory themselves.)
        """
        alike = heir.layout.numel == self.layout.numel and heir.layout.dtype is self.layout.dtype
        if alike and self.full.numel() and not is_shared(self.full):
            heir._inherited = self.full.data  # with a count of changes of its own

    def renounce(self) -> None:
        """Give back what `hand_on` has left, if it has not been used."""
        self._inherited = None

    def keep_second(self, world: int, rank: int) -> None:
        """Keep a second shard, of the values sharded over `world` ranks of which this is number `rank`."""
        size = self.layout.numel // world
        self._second_range = slice(rank * size, (rank + 1) * size)
        self.second = torch.empty(size, dtype=self.layout.dtype, device=self.device)
        self.second_loans.keep(Category.PARAMETERS, self.second)

    def store_second(self) -> None:
        """Take the second shard from the whole values."""
        if self.second is not None:
            with self.second_loans.lent_out(read=False, written=True):
                self.second.copy_(self.full[self._second_range])

    def bring_shard(self) -> None:
        """Write the shard into its range of the whole buffer."""
        self.shard_loans.read(self.shard, self.full[self.shard_range])

    def begin_to_bring_shard(self) -> None:
        """Begin with that, if it takes time."""
        self.shard_loans.look_ahead(self.shard, self.full[self.shard_range])

    def free(self) -> None:
        """Let go of the whole buffer."""
        self.full = self.source = torch.empty(0, dtype=self.layout.dtype, device=self.device)

    def lie_in(self, full: torch.Tensor) -> None:
        """Let whole values that stay gathered lie in other memory, with what are views of them."""
        self.full = self.source = full
        self.shard = full[self.shard_range]
        if self.master is not None and self.master_is_parameter:
            self.master = self.published

    def drop(self) -> None:
        """Give all memory back (whole values are there, and nobody's any more)."""
        self.free()
        self.free_gradient()
        self.shard = self.full
        self.master = self.gradient = self.second = None
        for loans in (*self.away, self.second_loans):
            loans.clear()

    @property
    def published(self) -> torch.Tensor:
        """The low-precision parameters' memory that corresponds to `master`."""
        return self.domain.within(self.shard, self.levels.parameters, self.levels.optimizer)

    @property
    def written_in_place(self) -> bool:
        """Whether an optimizer that steps elsewhere writes `published` where it lives."""
        return self._in_place(self.shard_loans)

    @property
    def published_in_place(self) -> torch.Tensor:
        """`published`, where the optimizer writes it (`written_in_place`)."""
        shard = self.shard_loans.in_place(self.shard)
        return self.domain.within(shard, self.levels.parameters, self.levels.optimizer)

    def publish(self) -> None:
        """Write the updated master weights into the low-precision parameters' memory."""
        if self.master is not None and not self.master_is_parameter:
            self.published.copy_(self.master)

    def await_copies(self) -> None:
        """Let the host wait until nobody reads what it is going to update."""
        if self.master_is_stored:
            self.shard_loans.in_place(self.shard)


class _Coming:
    """Shards that come from where they live into the whole buffers, which nobody else fills.

    Args:
        sections: theirs.
    """

    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, sections: Sequence[FlatParamStorage]) -> None:
        self._sections = sections
        for section in sections:
            section.begin_to_bring_shard()

    def wait(self) -> None:
        """Wait until they are there."""
        for section in self._sections:
            section.bring_shard()


class ShardSource(GatherSource):
    """The shards themselves, of all ranks that have them.

    Args:
        sections: the unit's.
        domain: the ranks that have it.
    """

    fills = True

    def __init__(self, sections: Sequence[FlatParamStorage], domain: Domain) -> None:
        self._sections = sections
        self._domain = domain
        self._level = max((section.levels.parameters for section in sections), default=0)
        self._away = any(section.shard_loans.away for section in sections)

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        sections, level = self._sections, self._level
        if not self._away:
            return self._domain.gathering([(s.full, s.shard, level) for s in sections], 0, label, kind)
        # What lives elsewhere is brought to where it is to be in the whole buffer, and gathered from there.
        moves = [(s.full, s.full[s.shard_range], level) for s in sections]
        launches = self._domain.gathering(moves, 0, label, kind)
        if not launches:
            return [lambda: _Coming(sections)]

        def begin() -> PendingCollective:
            for section in sections:
                section.bring_shard()
            return launches[0]()

        return [begin, *launches[1:]]

    def finish(self) -> None:
        """Nothing is left to be done."""


class SecondShardSource(GatherSource):
    """The second shards, of a few ranks (ZeRO++, hpZ).

    Args:
        sections: the unit's.
        comm: the ranks over which they are sharded.
    """

    fills = True

    def __init__(self, sections: Sequence[FlatParamStorage], comm: Communicator) -> None:
        self._sections = sections
        self._comm = comm
        self.world = comm.world

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        seconds = [(s, s.second) for s in self._sections if s.second is not None]
        return [
            lambda: self._comm.all_gather([(s.full, s.second_loans.read(own)) for s, own in seconds], label, kind=kind)
        ]

    def finish(self) -> None:
        """Nothing is left to be done."""


class Unit:
    """See the module docstring. Created whole by `shardwise.zero.building`, then sharded.

    Attributes:
        trainable: sections that receive gradients.
        sharded: whether the whole values are released between uses.
        level: at which level of the domain the parameters are divided between uses.
        take_over: called when gathered values have been changed in place, to bring master weights up to date.
        await_copies: called before that, and before the shard is written: somebody may still be copying them.
        exact: gathers from the shards.
        codes: gathers for passes that are trained go this way; None: all are exact.
        second: gathers from the second shards; None: there are none.
        second_valid: whether the second shard has the values of the last forward pass, and they still count.
        rounded: whether the values are, or were when last gathered, what has come out of `codes`.
        dropped: names of parameters that have been changed in place while they were rounded.
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
    ) -> None:
        self.index = index
        self.name = name
        self.modules = list(modules)
        self.tensors = list(tensors)
        self.registry = registry
        self.sections = list(sections)
        self.trainable = [section for section in self.sections if section.layout.trainable]
        self.sharded = any(section.sharded for section in self.sections)
        self.level = max((section.levels.parameters for section in self.sections), default=0)
        self.domain = domain
        self.state = UnitState.GATHERED
        self.exposed = True
        self.pins = 0
        self.take_over: Callable[[Unit], None] | None = None
        self.await_copies: Callable[[], None] | None = None
        self.exact: GatherSource = ShardSource(self.sections, domain)
        self.codes: Codes | None = None
        self.second: SecondShardSource | None = None
        self.second_valid = False
        self.rounded = False
        self.dropped: list[str] = []
        self._second_follows = False
        self._source: GatherSource = self.exact
        self._versions: list[int] = []
        self._handle: Work | None = None
        self._arrived: Work | None = None
        self._refreshing: Work | None = None

    @cached_property
    def _classes(self) -> released.Classes:
        return released.classes_of(self.parameters)

    @cached_property
    def _blanks(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(parameter, released.blank_of(parameter)) for parameter in self.parameters]

    @cached_property
    def _places(self) -> list[tuple[nn.Parameter, int, tuple[torch.Size, tuple[int, ...], int]]]:
        """Each parameter with the number of its section and the arguments of `as_strided` for its place in it."""
        return [
            (
                self.registry.parameters[slot.index],
                number,
                (shape := torch.Size(self.registry[slot.index].shape), released.strides_of(shape), slot.offset),
            )
            for number, section in enumerate(self.sections)
            for slot in section.layout.slots
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The user's parameter objects."""
        return [self.registry.parameters[tensor.index] for tensor in self.tensors]

    @cached_property
    def numel(self) -> int:
        """Elements of all sections, padding included."""
        return sum(section.layout.numel for section in self.sections)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole values, padding included."""
        return sum(section.layout.numel * section.layout.dtype.itemsize for section in self.sections)

    @property
    def between_uses(self) -> str:
        """Where the values of a sharded unit are between uses, for errors."""
        parts = self.domain.parts(self.level)
        return f"sharded over {parts} ranks" if self.level else "kept elsewhere than on the device"

    @never_compiled
    def attach(self) -> None:
        """Make every parameter a view of its place in the flat buffers."""
        with without_overrides(), torch.no_grad():
            buffers = [section.full for section in self.sections]
            for parameter, number, place in self._places:
                parameter.data = buffers[number].as_strided(*place)

    @never_compiled
    def _detach(self) -> None:
        """Leave the flat buffers: the parameters refer to no value (`shardwise.zero.units.released.blank_of`)."""
        with without_overrides():
            for parameter, blank in self._blanks:
                parameter.data = blank

    def start_gather(self, purpose: UnshardReason = UnshardReason.PLAIN) -> None:
        """Launch the gather of the whole values of a sharded unit; the parameters are withheld until it ends."""
        with named("gather", self.name):
            self._handle = self._launch(purpose)
        self.state = UnitState.GATHERING

    def spread(self, kind: str = "gather", *, everything: bool = False) -> None:
        """Launch the gather of what has been written on this rank, by the optimizer or from a checkpoint.

        Whole values are valid when the gather has ended. Those of a sharded unit are released; its shard is valid then.

        Args:
            kind: with which collectives it is in one order.
            everything: new values are in all sections; else in those that are trained.
        """
        sections = self.sections if everything else self.trainable
        level = self.level
        sections = [section for section in sections if section.written_level > level]
        if not sections:
            return
        shards = [(section.shard_loans, True) for section in sections if section.shard_loans.away]
        if shards:
            with borrowed(shards):
                self._spread(sections, kind)
                self.finish_spread()
        else:
            self._spread(sections, kind)

    def _spread(self, sections: Sequence[FlatParamStorage], kind: str) -> None:
        level = self.level
        moves = [(s.shard, s.written, s.written_level) for s in sections]
        self.domain.gathers.follow()  # the current stream has written, and has read what was there before
        if self.sharded:
            self._refreshing = self.domain.gather(moves, level, self.name, kind)
        else:
            self.conceal()
            self._handle = self.domain.gather(moves, level, self.name, kind)
            self.state = UnitState.GATHERING

    def finish_spread(self) -> None:
        """Wait until the shard is valid."""
        if self._refreshing is not None:
            with named("wait for gather", self.name):
                self._refreshing.wait()
            self._refreshing = None

    def _source_for(self, purpose: UnshardReason) -> GatherSource:
        """Choose from what whole values are gathered, the same on all ranks."""
        if self.second is not None and self.second_valid and purpose is UnshardReason.BACKWARD:
            return self.second
        return self.exact if self.codes is None or purpose is UnshardReason.PLAIN else self.codes

    def _launch(self, purpose: UnshardReason, *, aside: bool = False) -> Work:
        """Launch the gather that a purpose asks for; `aside`: into memory that is given back when it has ended."""
        self.finish_spread()
        self.rounded = self.codes is not None and purpose is not UnshardReason.PLAIN
        # What is released after a forward pass is what it has computed with.
        self._second_follows = self.second is not None and purpose is UnshardReason.FORWARD
        self._source = source = self._source_for(purpose)
        full = [section.full for section in self.sections]
        if source.fills and (aside or self.state is UnitState.RELEASED):
            with self.domain.gathers.aside():
                for section in self.sections:
                    section.allocate()
        link = self.domain.gathers.start(source.launches(self.name))
        if aside:
            for section, values in zip(self.sections, full, strict=True):
                section.full = values
        return link

    def gather_whole(self, kind: str = "gather") -> Work:
        """Launch the exact gather of the whole values, which have memory, from the shards.

        On a device it runs behind what `CollectiveQueue.follow` has been told of, not behind the current stream.
        """
        self.finish_spread()
        return self.domain.gathers.start(self.exact.launches(self.name, kind))

    def finish_gather(self) -> None:
        """Wait for the gather. Afterwards the values are valid; those of sharded units still have to be exposed."""
        if self.state is not UnitState.GATHERING:
            self.finish_spread()
            if self._arrived is not None:
                self._arrived.wait()  # the stream that goes on now may be another than the one that has waited
            return
        assert self._handle is not None
        with named("wait for gather", self.name):
            self._handle.wait()
            if not self._source.fills:
                for section in self.sections:
                    section.allocate()
            self._complete()
        arrived = self._handle if self.domain.async_gathers else None
        self.fill_done()
        self._arrived = arrived

    def _complete(self) -> None:
        self._source.finish()
        if not self._source.fills:
            self.domain.gathers.follow()  # to which the memory of what has been gathered belongs

    def join_gather(self, purpose: UnshardReason) -> None:
        """Take part in a gather of the others though the whole values are here already, or have been."""
        if self.domain.async_gathers and self.codes is None:
            self._launch(purpose, aside=True)
            self.domain.gathers.leave()
            return
        self.domain.gathers.follow()  # the current stream may still read what is written once more
        link = self._launch(purpose)
        with named("wait for gather", self.name):
            link.wait()
        self._complete()

    def fetched(self, purpose: UnshardReason) -> None:
        """The exact whole values have come another way than by a gather; make them what the others compute with."""
        if self.codes is not None and purpose is not UnshardReason.PLAIN:
            self.codes.round()
            self.rounded = True
        self.fill_done()

    def fill_done(self) -> None:
        """Declare the whole values valid."""
        self._handle = self._arrived = None
        if self.sharded:
            self.attach()
        self.state = UnitState.GATHERED
        self.note()
        if not self.sharded:
            self.expose()

    def expose(self) -> None:
        """Let the parameters be plain parameters: whoever uses them now need not be noticed."""
        if not self.exposed:
            self.exposed = True
            released.restore_all(self._classes)

    def conceal(self) -> None:
        """Withhold the parameters, so that their use is noticed; the values stay where they are."""
        if self.exposed and not self.pins:
            self.exposed = False
            released.withhold_all(self._classes)

    def owner_of(self, tensor: torch.Tensor) -> FlatParamStorage | None:
        """Return the section in the memory of whose whole values a tensor lies."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata  # not its address, which tensors of a dry run have not
        return next((s for s in self.sections if s.full.numel() and s.full.untyped_storage()._cdata == storage), None)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of the whole values."""
        return self.owner_of(tensor) is not None

    def release(self, heir: Unit | None = None) -> None:
        """Let go of the memory of the whole values (sharded units only).

        Args:
            heir: the unit that is gathered next; may have it.
        """
        if not self.sharded or self.state is UnitState.RELEASED or self.pins:
            return
        if self.state is UnitState.GATHERING and self._may_forget:
            self._handle = None  # nothing has used the memory, and it belongs to the stream of the gather
            self.domain.gathers.leave()
            for section in self.sections:
                section.free()
            self.state = UnitState.RELEASED
            return
        self.finish_gather()
        self._keep_changes()
        if self._second_follows:
            self._second_follows = False
            self._store_second()
        self.conceal()
        self._detach()
        self.domain.gathers.follow()  # to which the memory belongs: it takes it again behind what has used it
        if heir is not None and not self.domain.async_gathers:
            for section, other in zip(self.sections, heir.sections, strict=False):
                section.hand_on(other)
        for section in self.sections:
            # The script may still compute with a view that it has kept; its last reference gives the memory back.
            if self.domain.async_gathers and section.full.numel() and is_shared(section.full):
                self.domain.ranks.streams.keep(section.full)
            section.free()
        self._arrived = None
        self.state = UnitState.RELEASED

    @property
    def _may_forget(self) -> bool:
        """Whether a gather that is under way need not be waited for before its memory is given back."""
        return self.domain.async_gathers and self._source.fills and not self._second_follows

    def renounce(self) -> None:
        """Give back memory that another unit has left, if it has not been used."""
        for section in self.sections:
            section.renounce()

    def hide(self) -> None:
        """Take the parameters of a unit that stays gathered out of its memory, which is to go: their use is noticed.

        See `show`.
        """
        self.finish_gather()
        self._arrived = None  # it may refer to the memory
        self.conceal()
        self._detach()
        self.state = UnitState.RELEASED

    def show(self) -> None:
        """Put the parameters into the memory again that the sections have now, and that has their values."""
        self.attach()
        self.state = UnitState.GATHERED
        self.expose()

    def wait_concealed(self) -> None:
        """Keep the whole values for the next pass, as if they had been released and gathered again."""
        self.finish_gather()
        self._keep_changes()
        self.note()
        self.conceal()

    def note(self) -> None:
        """Take the whole values of a sharded unit as they are now for unchanged."""
        if self.sharded:
            self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        with without_overrides():
            return [parameter._version for parameter, _, _ in self._classes]

    def _keep_changes(self) -> None:
        """Take over what `forward` has changed in place (a codebook, a clamped weight) before it is given back.

        All ranks are taken to have made the same change, as where parameters are not sharded: each stores its range. In
        rounded values a change cannot be told from the rounding: the names are noted, for an error, and it is dropped.
        """
        if not self._versions or self._versions == self._read_versions():
            return
        if self.rounded:
            self.dropped += self._changed_in_place()
            return
        second = self.second_valid
        self.store_shard()
        if second:
            self._store_second()
        if self.take_over is not None:
            self.take_over(self)

    def _changed_in_place(self) -> list[str]:
        now = zip(self.tensors, self._versions, self._read_versions(), strict=True)
        return [tensor.name for tensor, before, after in now if before != after]

    def changed(self) -> list[str]:
        """Return the names of parameters whose whole values were changed since `note`, of a sharded unit.

        Changes in place are seen by version counters, changes through aliases in this rank's range of the values.
        """
        names = self._changed_in_place()
        for section in self.sections:
            if not section.sharded or section.shard_loans.away:
                continue
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

    def borrowing(self) -> list[Borrowed]:
        """Return what has to be borrowed to write any of the unit's state.

        What is stepped where it is lent from is written there.
        """
        wanted = [(section, loans) for section in self.sections for loans in section.away]
        return [(x, True) for section, x in wanted if x is not section.shard_loans or not section.master_is_stored]

    def keep_second(self, group: Communicator) -> None:
        """Keep a second shard, sharded over `group`, for backward passes."""
        for section in self.sections:
            section.keep_second(group.world, group.rank)
        self.second = SecondShardSource(self.sections, group)

    def _store_second(self) -> None:
        for section in self.sections:
            section.store_second()
        self.second_valid = True

    def store_shard(self) -> None:
        """Copy this rank's range of the (changed) whole values back into the shard.

        Raises:
            UsageError: the whole values are rounded, and so would the shard be.
        """
        if self.rounded:
            raise UsageError(
                f"parameters of unit {self.name!r} cannot be changed inside of a forward or backward pass: under "
                "zero_optimization.zero_quantized_weights they have rounded values there, and storing them would round "
                "the weights themselves. Change parameters between passes."
            )
        self.second_valid = False
        if self.await_copies is not None:
            self.await_copies()
        for section in self.sections:
            if section.sharded:
                with section.shard_loans.lent_out(read=False, written=True):
                    section.shard.copy_(section.full[section.shard_range])
        self.domain.gathers.follow()

    def look_ahead(self) -> None:
        """Begin to bring the shard, if the gather that is launched next would wait for it."""
        if self.state is UnitState.RELEASED and (self.level or self.domain.async_gathers):
            for section in self.sections:
                section.shard_loans.look_ahead(section.shard)

    def segments(self) -> Iterator[tuple[FlatParamStorage, GroupRange]]:
        """Yield the lanes of the range that this rank's optimizer updates."""
        for section in self.trainable:
            for lane in section.layout.segments(section.master_start, section.master_stop):
                yield section, lane


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns True if two 1-D tensors of one dtype and device have equal bytes, so that NaN equals itself."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
