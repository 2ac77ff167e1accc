"""Memory of a flat parameter: unsharded values, this rank's shard, master weights and gradient.

* `full`: one flat buffer with the user's parameters as views; empty while resharded. Resharding drops only the
  reference: another reference (a `state_dict()`, a NumPy view) keeps the memory and the values of that time. Tensors
  that autograd has saved: `shardwise.zero.passes.saved`.
* `shard`: this rank's range of it, in the same dtype (`full` itself if parameters are not sharded).
* `master`: range that the optimizer updates, in fp32 or wider: all elements if the optimizer is not sharded, maybe a
  part of the shard. It is a view of the shard (or `full`) if dtypes are equal.
* `gradient`: accumulated gradient for `master`, from the backward pass that reduces it to the end of the step.
* `second`: secondary shard, over a few ranks: values of the last forward pass, for the backward pass's all-gather.

Offloaded state (`shardwise.memory.places`) has memory on the device only while it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property

import torch

from shardwise.comm.domain import Domain
from shardwise.compat import is_shared, storage_users
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import ALL_AT_HAND, Acquisition, Homes, TieredTensors
from shardwise.zero.units.gradient_buffers import GradientPlaces
from shardwise.zero.units.layout import FlatParam
from shardwise.zero.units.plan import Levels


class FlatParamStorage:
    """Memory of one flat parameter of a unit; see the module docstring.

    If the optimizer does not step the master here (`stepped`), ranges at the finest level get new values. `steps_on` is
    the device of a step. The four `TieredTensors` are tiered tensors of the state.

    Attributes:
        written_level: level at which this rank's range gets new values.
        sharded: whether the parameters are resharded between uses.
        steps_apart: whether the optimizer steps on another tier than the device.
        written_in_place: whether such an optimizer writes `published` there.
        gradient_needs_acquiring: whether `stepped_gradient` is offloaded to another tier.
        master_is_parameter: whether master weights are the parameters themselves.
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
        self.tiered_state = TieredTensors(home, accountant, label)
        self.tiered_gradient = TieredTensors(homes.gradients, accountant, label)
        self.tiered_shard, self.tiered_second = (TieredTensors(homes.parameters, accountant, label) for _ in range(2))
        self.steps_apart = home.used_on is not None
        self.written_in_place = self._in_place(self.tiered_shard)
        self._gradient_in_place = self._in_place(self.tiered_gradient)
        self.gradient_needs_acquiring = self.tiered_gradient.away and not self._gradient_in_place
        self._fetches = self.steps_apart and self.gradient_needs_acquiring and homes.gradients.used_on is None
        shares = not layout.whole and levels.optimizer == levels.parameters and self.written_in_place
        self.master_is_parameter = master_dtype == layout.dtype and (not self.steps_apart or shares)
        self.full = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.sharded = levels.parameters > 0 or self.tiered_shard.away
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
    def away(self) -> list[TieredTensors]:
        """Tiered tensors of offloaded state, except the secondary shard."""
        return [tiered for tiered in (self.tiered_state, self.tiered_gradient, self.tiered_shard) if tiered.away]

    @property
    def stepping(self) -> list[Acquisition]:
        """Tiered tensors that a step acquires."""
        found = [tiered for tiered in self.away if not self._in_place(tiered)]
        wanted = [x for x in found if x is not self.tiered_gradient or not self._fetches]
        return [
            (x, None if x is self.tiered_shard and self._is_overwritten else x is not self.tiered_gradient)
            for x in wanted
        ]

    @property
    def _is_overwritten(self) -> bool:
        """Whether a step overwrites the shard, because all of it is copied from master weights."""
        if not self.layout.trainable or self.master_is_parameter or self.written_level != self.levels.parameters:
            return False
        first, last = self.master_start, self.master_stop
        stepped = sum(lane.stop - lane.start for lane in self.layout.segments(first, last))
        return self.shard_range == slice(first, last) and stepped == last - first

    def _in_place(self, tiered: TieredTensors) -> bool:
        """Whether offloaded state is used on its tier, because the optimizer steps there."""
        return self.steps_apart and tiered.away and tiered.home.at_hand

    @property
    def own_range(self) -> tuple[int, int]:
        """This rank's range at the finest level, which overlaps no other rank's."""
        return self.layout.range_of(self.domain.place)

    @property
    def shard_range(self) -> slice:
        """Range of the shard in `full`."""
        return slice(*self.layout.range_of(self.domain.place, self.levels.parameters))

    @property
    def written(self) -> torch.Tensor:
        """View of the shard (or of `full`) that this rank updates."""
        return self.domain.within(self.shard, self.levels.parameters, self.written_level)

    @property
    def own_values(self) -> torch.Tensor:
        """View of the shard (or of `full`) at `own_range`."""
        return self.domain.within(self.shard, self.levels.parameters, self.domain.depth)

    @property
    def own_gradient(self) -> torch.Tensor:
        """View of the accumulated gradient at `own_range` (allocated at first use)."""
        gradient, level, depth = self.whole_gradient, self.levels.optimizer, self.domain.depth
        return gradient if level == depth else self.domain.within(gradient, level, depth)

    @property
    def whole_gradient(self) -> torch.Tensor:
        """Gradient for `master` (allocated at first use, with undefined content)."""
        size = self.master_stop - self.master_start
        if self.gradient is None:
            where = self.tiered_gradient.home.used_on or self.device
            self.gradient = torch.empty(size, dtype=self.accumulate_dtype, device=where)
            if self.tiered_gradient.away:
                self.tiered_gradient.keep(Category.GRADIENTS, self.gradient)
                return self.gradient
            self._accountant.disregard(self.gradient)  # its storage is freed and allocated again: bytes are counted
            self._accountant.add(Category.GRADIENTS, self.gradient.nbytes, self.tiered_gradient.home.tier)
        elif size and not self.tiered_gradient.away and not self.gradient.untyped_storage().nbytes():
            self.gradient.untyped_storage().resize_(self.gradient.nbytes)
            self._accountant.add(Category.GRADIENTS, self.gradient.nbytes, self.tiered_gradient.home.tier)
        return self.gradient

    @property
    def stepped_gradient(self) -> torch.Tensor:
        """Gradient for `master` on the tier of the optimizer; each access may copy it."""
        gradient = self.whole_gradient
        if self._gradient_in_place:
            return self.tiered_gradient.in_place(gradient)
        if self._fetches and not self.tiered_gradient.acquired:
            fetched = torch.empty(gradient.shape, dtype=gradient.dtype, device=self.steps_on)
            self._accountant.hold(Category.GRADIENTS, fetched, Tier.HOST)
            return self.tiered_gradient.read(gradient, fetched)
        return gradient

    @property
    def measured_gradient(self) -> torch.Tensor:
        """View of `stepped_gradient` at `own_range`."""
        return self.domain.within(self.stepped_gradient, self.levels.optimizer, self.domain.depth)

    def free_gradient(self) -> None:
        """Free the memory of the gradient. Views of it, which only the engine has, show the next gradient."""
        if self.tiered_gradient.away:
            return
        if self.gradient is not None and self.gradient.untyped_storage().nbytes():
            self.gradient.untyped_storage().resize_(0)
            self._accountant.remove(Category.GRADIENTS, self.gradient.nbytes, self.tiered_gradient.home.tier)

    @contextlib.contextmanager
    def acquiring_gradient(self) -> Iterator[torch.Tensor]:
        """Yield the gradient for an optimizer; if the optimizer keeps a reference, leave the memory to it.

        Not after an exception, whose frames refer to the gradient: the step may be tried again.
        """
        shown = self.stepped_gradient
        users = storage_users(shown)
        yield shown
        gradient = self.whole_gradient
        if not self._fetches and (users is None or storage_users(shown) != users):
            self.gradient = None
            if self.tiered_gradient.away:
                self.tiered_gradient.forget(gradient)
            else:
                self._accountant.remove(Category.GRADIENTS, gradient.nbytes, self.tiered_gradient.home.tier)

    @cached_property
    def places(self) -> GradientPlaces:
        """Positions of the parameters' gradients in the flat gradient."""
        return GradientPlaces(self.layout.numel, [(slot.offset, slot.numel) for slot in self.layout.slots])

    @property
    def keeps_whole_gradient(self) -> bool:
        """Whether this rank updates all elements, and needs the full reduced gradient."""
        return self.master_stop - self.master_start == self.layout.numel

    @property
    def master_is_stored(self) -> bool:
        """Whether the optimizer updates offloaded parameters on their tier. Frozen parameters have no master."""
        return self.master is not None and self.master_is_parameter and self.steps_apart

    def widen_source(self, dtype: torch.dtype) -> None:
        """Keep the initial values in a wider dtype than the parameters', for master weights."""
        self.source = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
        self._accountant.hold(Category.OTHER, self.source)

    def settle(self, *, keep_master: bool) -> None:
        """Make parameters, shard and (`keep_master`) master weights of the unsharded initial values in `source`."""
        if self.source is not self.full:
            self.full.copy_(self.source)
        if self.sharded:
            self.shard = self.shard.clone()
            self.tiered_shard.keep(Category.PARAMETERS, self.shard)
        if self.layout.trainable and keep_master:
            if not self.master_is_parameter:
                initial = self.source[self.master_start : self.master_stop]
                self.master = initial.to(self.steps_on, self.master_dtype, copy=True)
                self.tiered_state.keep(Category.MASTER, self.master)
            else:
                self.master = self.tiered_shard.shared(self.shard) if self.steps_apart else self.published

    def forget_source(self) -> None:
        """Drop the wide initial values."""
        self.source = self.full

    def allocate(self) -> None:
        """Allocate the unsharded buffer, with undefined content."""
        if self._inherited is not None:
            self.full, self._inherited = self._inherited, None
            return
        with torch.inference_mode(False), self.domain.allocating():  # a later pass may differentiate
            self.full = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=self.device)
        self._accountant.hold(Category.GATHERED, self.full)

    def pass_memory_to(self, heir: FlatParamStorage) -> None:
        """Give unshared memory to a flat parameter of the same size, because a CPU must clear new memory."""
        alike = heir.layout.numel == self.layout.numel and heir.layout.dtype is self.layout.dtype
        if alike and self.full.numel() and not is_shared(self.full):
            heir._inherited = self.full.data  # with its own version counter

    def drop_inherited(self) -> None:
        """Free memory of `pass_memory_to` that has not been used."""
        self._inherited = None

    def keep_second(self, world: int, rank: int) -> None:
        """Keep a secondary shard: range `rank` of `world`."""
        size = self.layout.numel // world
        self._second_range = slice(rank * size, (rank + 1) * size)
        self.second = torch.empty(size, dtype=self.layout.dtype, device=self.device)
        self.tiered_second.keep(Category.PARAMETERS, self.second)

    def store_second(self) -> None:
        """Copy the unsharded values to the secondary shard."""
        if self.second is not None:
            with self.tiered_second.use(read=False, written=True):
                self.second.copy_(self.full[self._second_range])

    def bring_shard(self) -> None:
        """Copy an offloaded shard into its range of the unsharded buffer."""
        self.tiered_shard.read(self.shard, self.full[self.shard_range])

    def begin_to_bring_shard(self) -> None:
        """Prefetch the copy of `bring_shard`."""
        self.tiered_shard.look_ahead(self.shard, self.full[self.shard_range])

    def free(self) -> None:
        """Drop the unsharded buffer."""
        self.full = self.source = torch.empty(0, dtype=self.layout.dtype, device=self.device)

    def lie_in(self, full: torch.Tensor) -> None:
        """Move values that are never resharded to other memory, with shard and master weights, which are views."""
        self.full = self.source = full
        self.shard = full[self.shard_range]
        if self.master is not None and self.master_is_parameter:
            self.master = self.published

    def drop(self) -> None:
        """Free all memory; the unsharded values belong to the parameters."""
        self.free()
        self.free_gradient()
        self.shard = self.full
        self.master = self.gradient = self.second = None
        for tiered in (*self.away, self.tiered_second):
            tiered.clear()

    @property
    def published(self) -> torch.Tensor:
        """Range of the low-precision parameters that corresponds to `master`."""
        return self.domain.within(self.shard, self.levels.parameters, self.levels.optimizer)

    @property
    def published_in_place(self) -> torch.Tensor:
        """`published` on the tier of the optimizer (`written_in_place`)."""
        shard = self.tiered_shard.in_place(self.shard)
        return self.domain.within(shard, self.levels.parameters, self.levels.optimizer)

    def publish(self) -> None:
        """Copy master weights to the low-precision parameters."""
        if self.master is not None and not self.master_is_parameter:
            self.published.copy_(self.master)

    def await_copies(self) -> None:
        """Wait until no copy reads the values that the host is going to update."""
        if self.master_is_stored:
            self.tiered_shard.in_place(self.shard)


def sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a 1-D tensor's bytes, read as integers, as a 0-D tensor on its device.

    >>> ones = torch.ones(5)
    >>> bool(sum_of_bits(ones) == sum_of_bits(torch.ones(5))), bool(sum_of_bits(ones) == sum_of_bits(2 * ones))
    (True, False)
    """
    raw = values.detach().view(torch.uint8)
    whole = raw.numel() // 8 * 8 if raw.storage_offset() % 8 == 0 else 0
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two 1-D tensors of one dtype and device have equal bytes (NaN equals itself)."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
