"""Memory tiers of state: tensors on host or disk, acquired for use and released afterwards.

A tier takes over a tensor's memory and stores its values: in host memory, or in files. The tensor object and its views
stay, but have memory only while acquired. `start` begins to fetch the values, `finish` waits for them, and a release
stores them if they were written. Tensors on the device are always available at no cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shardwise.compat import can_hand_memory_on, hand_memory_on
from shardwise.device.ranges import launched, named, watched
from shardwise.memory.accountant import Accountant, Category, Tier

_NOTHING = contextlib.nullcontext()


class Stored(Protocol):
    """The stored values of one tensor, which starts out acquired.

    `staged`: they pass through host memory, which the tier counts, in the order of a stream.
    """

    staged: bool

    def start(self, *, read: bool) -> None:
        """Allocate the tensor's memory and start to fetch the values; its content is undefined unless `read`."""

    def finish(self) -> None:
        """Make the current stream wait for the values."""

    def give_back(self, *, written: bool) -> None:
        """Release the tensor's memory, after the current stream's work, also after a `start` that has failed. Start to
        store the values if `written`.
        """

    def follow(self) -> None:
        """Order the reuse of the acquired memory, which the tensor keeps for now, after the current stream's work."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the stored values into another tensor of the same layout, for the current stream (on any thread)."""

    def settle(self, leave: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        """Block the host until the memory released by `give_back` is free. `leave` receives it instead of the system
        (if the tier lags, and without staging).
        """

    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        """Prefetch the values for `start`, or for `copy_to` into `target` (undefined until then), if it takes time."""

    def in_place(self) -> torch.Tensor:
        """Return the stored bytes for the host to read and write, after all copies (if `at_hand`)."""

    def shared(self) -> torch.Tensor:
        """Return the stored bytes for the host to keep (if `at_hand`). From now on each store of values blocks the host
        until its end. Before a write, the host itself waits with `in_place` for copies that read the bytes.
        """


class StateHome:
    """A memory tier for tensors of one device; in this class each tensor stays in place.

    Attributes:
        needs_acquiring: tensors have memory only while acquired.
        at_hand: the host can use the stored values in place.
        lags: memory released dirty is free only after its store, for which the host waits.
        used_on: device on which tensors are used; None: the engine's device.
    """

    needs_acquiring = False
    at_hand = True
    lags = False

    def __init__(self, tier: Tier, used_on: torch.device | None = None) -> None:
        self.tier = tier
        self.used_on = used_on

    def keep(self, tensor: torch.Tensor) -> Stored | None:
        """Store the memory of a contiguous tensor with its own storage; None: the tensor stays in place."""
        return None

    def close(self) -> None:
        """Free all stored values; the tier must be empty afterwards."""


ON_DEVICE = StateHome(Tier.DEVICE)
ON_HOST = StateHome(Tier.HOST, torch.device("cpu"))
"""Host memory for state that the CPU uses."""


def tier_in_use(home: StateHome) -> Tier:
    """Return the tier of a tensor's memory while it is acquired."""
    return Tier.DEVICE if home.used_on is None else Tier.HOST


@dataclass(frozen=True)
class Where:
    """Names of the memory tiers of each kind of state. Master weights are with the optimizer state; parameters stepped
    directly are with the parameters. `share`: fraction of elements with optimizer state and gradients off the device,
    in whole units. `near`: elements of a rank's parameters that stay on the host if the tier is slower.
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    share: float = 1.0
    near: int = 0

    @property
    def names(self) -> set[str]:
        """The names of all tiers."""
        return {self.optimizer, self.gradients, self.parameters}


ALL_ON_DEVICE = Where()


@dataclass(frozen=True)
class Homes:
    """Memory tiers of each kind of state: `parameters` between uses, accumulated `gradients`, `optimizer` state stepped
    in segments or in `whole` tensors (on the device); `near`: of the first `Where.near` elements of the parameters.
    """

    optimizer: StateHome = ON_DEVICE
    whole: StateHome = ON_DEVICE
    gradients: StateHome = ON_DEVICE
    parameters: StateHome = ON_DEVICE
    near: StateHome = ON_DEVICE

    def close(self) -> None:
        """Free the stored values of all tiers."""
        for home in (self.optimizer, self.whole, self.gradients, self.parameters, self.near):
            home.close()


ALL_AT_HAND = Homes()


@dataclass
class _Tiered:
    """A tensor stored in a tier.

    `fresh`: before its first store. `given`: the current memory was allocated here. `ahead`: bytes of other host memory
    into which values are prefetched.
    """

    tensor: torch.Tensor
    stored: Stored
    category: Category
    fresh: bool = True
    view: torch.Tensor | None = None
    ahead: int = 0
    given: bool = False


class Spare:
    """Pool of host memory from released tensors, for later tensors of the same size, because the CPU must zero new
    memory. Pool and acquired tensors never exceed the peak of acquired memory: before a new allocation, as many pooled
    bytes are freed.
    """

    def __init__(self, accountant: Accountant) -> None:
        self.bytes = 0
        self.accountant = accountant
        self._counted = 0
        self._left: list[torch.UntypedStorage] = []

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Add the memory of a storage to the pool; `count` reports it."""
        size = storage.nbytes()
        if not (can_hand_memory_on and storage.resizable()):  # a NumPy array of the memory would see later content
            storage.resize_(0)
        elif size:
            kept = torch.UntypedStorage(0, device=storage.device)
            hand_memory_on(storage, kept)
            self._left.append(kept)
            self.bytes += size

    def give(self, storage: torch.UntypedStorage, size: int) -> None:
        """Allocate `size` bytes of undefined content for a storage from the pool, or free as many pooled bytes."""
        fits = next((number for number, kept in enumerate(self._left) if kept.nbytes() == size), None)
        if fits is not None:
            hand_memory_on(self._left.pop(fits), storage)
            self.bytes -= size
        else:
            self._free(size)
        self.count()

    def count(self) -> None:
        """Report the pooled bytes to the accountant."""
        self.accountant.add(Category.BUFFERS, self.bytes - self._counted, Tier.HOST)
        self._counted = self.bytes

    def clear(self) -> None:
        """Free all pooled memory."""
        self._free(self.bytes)
        self.count()

    def _free(self, size: int) -> None:
        while self._left and size > 0:
            freed = self._left.pop(0).nbytes()
            self.bytes -= freed
            size -= freed


class TieredTensors:
    """Tensors of one tier that are acquired together; nested acquisition transfers nothing.

    `away`: tensors must be acquired before use. `acquired`: number of nested acquisitions. `spare`: pool of host
    memory, if any; see `in_turn`.

    >>> tiered = TieredTensors(ON_DEVICE, Accountant())
    >>> tiered.keep(Category.MASTER, torch.zeros(4))
    >>> with tiered.use(written=True):
    ...     tiered.away
    False
    """

    def __init__(self, home: StateHome, accountant: Accountant, label: str = "") -> None:
        self.home = home
        self.away = home.needs_acquiring
        self.acquired = 0
        self._label = label
        self._on_its_way: list[Callable[[], None]] = []  # callbacks for the end of transfers
        self.spare: Spare | None = None
        self.accountant = accountant
        self._tier = tier_in_use(home)
        self._written = False
        self._kept: dict[int, _Tiered] = {}  # by storage
        self._unsettled: list[_Tiered] = []

    def keep(self, category: Category, tensor: torch.Tensor) -> None:
        """Count a tensor and store it in the tier, at once or at the end of the current acquisition."""
        if not self.away:
            self.accountant.hold(category, tensor, self.home.tier)
            return
        if id(tensor.untyped_storage()) in self._kept:
            return
        size = tensor.untyped_storage().nbytes()
        alone = tensor.is_contiguous() and tensor.nbytes == size
        with self.accountant.owning(None):
            stored = self.home.keep(tensor) if alone and size else None
        if stored is None:
            self.accountant.hold(category, tensor, self._tier)
            return
        self.accountant.disregard(tensor)  # its bytes are reported by number
        self.accountant.add(category, size, self._tier)
        self.accountant.add(category, size, self.home.tier)
        entry = _Tiered(tensor, stored, category)
        self._kept[id(tensor.untyped_storage())] = entry
        if not self.acquired:
            self._return(entry, written=True)
            self.settle()

    def keep_only(self, category: Category, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the tensors of a category."""
        wanted = {id(tensor.untyped_storage()) for tensor in tensors}
        for key, entry in list(self._kept.items()):
            if entry.category is category and key not in wanted:
                self.forget(entry.tensor)
        for tensor in tensors:
            self.keep(category, tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Remove a tensor, which keeps its current memory; ignore unknown tensors."""
        self.settle()
        entry = self._kept.pop(id(tensor.untyped_storage()), None)
        if entry is not None:
            self._arrived(entry)
            self.accountant.remove(entry.category, tensor.nbytes, self.home.tier)
            if self.acquired:
                entry.stored.follow()
                self.accountant.remove(entry.category, tensor.nbytes, self._tier)

    def clear(self) -> None:
        """Remove all tensors."""
        for entry in list(self._kept.values()):
            self.forget(entry.tensor)

    @property
    def storages(self) -> Collection[int]:
        """The `id` of each storage in the tier."""
        return self._kept.keys()

    def start(self, *, read: bool = True) -> None:
        """Start to acquire all tensors; their content is undefined unless `read` or acquired already. If memory runs
        out, all are released again.
        """
        if self.acquired:
            self.acquired += 1
            return
        self.settle()
        with self._shown("acquire"), contextlib.ExitStack() as undo:
            undo.callback(self._land)
            if read:
                self._set_out("bring")
            for entry in self._kept.values():
                self._start(entry, undo, read=read)
            undo.pop_all()
        self.acquired = 1

    def _start(self, entry: _Tiered, undo: contextlib.ExitStack, *, read: bool) -> None:
        entry.given = True
        spare = self._spare_of(entry)
        if spare is not None:
            spare.give(entry.tensor.untyped_storage(), entry.tensor.nbytes)
        self.accountant.add(entry.category, entry.tensor.nbytes, self._tier)
        undo.callback(self._return, entry, written=False)
        with self.accountant.owning(None):
            entry.stored.start(read=read)
        if read:
            self._move(read=entry.tensor.nbytes)

    def acquire(self, *, read: bool = True) -> None:
        """Acquire all tensors, for the current stream; none if an error ends it."""
        self.start(read=read)
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_back, written=False)
            self.finish()
            undo.pop_all()

    def _shown(self, what: str) -> AbstractContextManager[Any]:
        return named(what, self._label, self._size) if self._kept and watched() else _NOTHING

    @property
    def _size(self) -> int:
        return sum(entry.tensor.nbytes for entry in self._kept.values())

    def _set_out(self, what: str) -> None:
        if self._kept and watched():
            self._on_its_way.append(launched(what, self._label, self._size))

    def _land(self) -> None:
        while self._on_its_way:
            self._on_its_way.pop()()

    def finish(self) -> None:
        """Make the current stream wait for all values."""
        with self._shown("wait for tensors"):
            for entry in self._kept.values():
                if not entry.fresh:
                    entry.stored.finish()
                    self._arrived(entry)
        self._land()

    def give_back(self, *, written: bool) -> None:
        """Release all tensors. The last release stores them if any acquisition has written; see `settle`."""
        self.acquired -= 1
        self._written |= written
        if not self.acquired:
            self._land()
            written, self._written = self._written, False
            with self._shown("store"), contextlib.ExitStack() as all_of_them:
                if written:
                    self._set_out("take")
                for entry in reversed(self._kept.values()):
                    all_of_them.callback(self._return, entry, written=written or entry.fresh)

    def _return(self, entry: _Tiered, *, written: bool) -> None:
        self._arrived(entry)
        if written:
            self._move(written=entry.tensor.nbytes)
        self._unsettled.append(entry)
        if entry.stored.staged:  # copied to host memory, in the order of a stream
            self.accountant.remove(entry.category, entry.tensor.nbytes, self._tier)
        with self.accountant.owning(None):
            entry.stored.give_back(written=written)
        entry.fresh = False
        if not (self.home.lags and written):
            self.settle()

    def settle(self) -> None:
        """Free the memory of released tensors; the host waits for stores. An OffloadError if one has failed."""
        if not self._unsettled:
            return
        with self._shown("wait for store"), contextlib.ExitStack() as all_of_them:
            all_of_them.callback(self._land)
            while self._unsettled:
                entry = self._unsettled.pop()
                spare = self._spare_of(entry)
                if spare is not None:
                    all_of_them.callback(spare.count)
                if not entry.stored.staged:
                    all_of_them.callback(self.accountant.remove, entry.category, entry.tensor.nbytes, self._tier)
                all_of_them.callback(self._arrived, entry)
                all_of_them.callback(entry.stored.settle, *(() if spare is None else (spare.leave,)))

    def _spare_of(self, entry: _Tiered) -> Spare | None:
        """Return None for state made in the optimizer's first step: its memory would exceed the pool's bound."""
        return self.spare if self.home.lags and entry.given and not entry.stored.staged else None

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's stored values for the host to read and write (if `home.at_hand`)."""
        entry = self._kept.get(id(tensor.untyped_storage()))
        if entry is None or self.acquired:
            return tensor
        values = entry.stored.in_place()
        if entry.view is None:
            entry.view = values.view(tensor.dtype).view(tensor.shape)
        return entry.view

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's stored values for the host to keep; see `Stored.shared`."""
        entry = self._kept.get(id(tensor.untyped_storage()))
        return tensor if entry is None else entry.stored.shared().view(tensor.dtype).view(tensor.shape)

    def use(self, *, read: bool = True, written: bool) -> AbstractContextManager[None]:
        """Acquire all tensors inside the block; without `read` the block overwrites them."""
        return acquiring([(self, written if read else None)])

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Allow the creation of views inside the block: torch creates none of empty storages, so memory is allocated
        and never touched.
        """
        storages = [] if self.acquired else [entry.tensor.untyped_storage() for entry in self._kept.values()]
        self.settle()
        try:
            for entry, storage in zip(self._kept.values(), storages, strict=False):
                storage.resize_(entry.tensor.nbytes)
            yield
        finally:
            for storage in storages:
                storage.resize_(0)

    def read(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor's values: the tensor itself if available, else a copy, in `into` if given."""
        entry = self._kept.get(id(tensor.untyped_storage()))
        if entry is None or self.acquired:
            return tensor if into is None else into.copy_(tensor)
        target = torch.empty_like(tensor) if into is None else into
        self._move(read=tensor.nbytes)
        with named("copy", self._label, tensor.nbytes), self.accountant.owning(None):
            entry.stored.copy_to(target)
        self._arrived(entry)
        return target

    def look_ahead(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Prefetch a tensor for the next `read` (into the same memory), if fetching takes time."""
        entry = self._kept.get(id(tensor.untyped_storage()))
        if entry is not None and self.home.lags and not (self.acquired or entry.ahead):
            if into is None and not entry.stored.staged:
                entry.ahead = tensor.nbytes
                self.accountant.add(Category.BUFFERS, entry.ahead, Tier.HOST)
            with self.accountant.owning(None):
                entry.stored.look_ahead(into)

    def _move(self, *, read: int = 0, written: int = 0) -> None:
        self.accountant.move(self.home.tier, read=read, written=written)
        if self.home.tier is Tier.DISK and self.home.used_on is None:
            self.accountant.move(Tier.HOST, read=read, written=written)  # through host memory

    def _arrived(self, entry: _Tiered) -> None:
        if entry.ahead:
            self.accountant.remove(Category.BUFFERS, entry.ahead, Tier.HOST)
            entry.ahead = 0


Acquisition = tuple[TieredTensors, bool | None]
"""Tensors to acquire, and whether they are written; None: completely overwritten, without fetching the values."""

T = TypeVar("T")


@contextlib.contextmanager
def acquiring(wanted: Sequence[Acquisition]) -> Iterator[None]:
    """Acquire tensors inside the block."""
    try:
        with _acquired(wanted) as finish:
            finish()
            yield
    finally:
        settle(wanted)


@contextlib.contextmanager
def _acquired(wanted: Sequence[Acquisition]) -> Iterator[Callable[[], None]]:
    """After an error, tensors that were not fetched or not overwritten are not stored, to keep their good values."""
    come = done = False

    def finish() -> None:
        nonlocal come
        for tiered, _ in wanted:
            tiered.finish()
        come = True

    started: list[Acquisition] = []
    try:
        for acquisition in wanted:
            acquisition[0].start(read=acquisition[1] is not None)
            started.append(acquisition)
        yield finish
        done = True
    finally:
        with contextlib.ExitStack() as all_of_them:
            for tiered, written in reversed(started):
                all_of_them.callback(tiered.give_back, written=done if written is None else written and come)


def settle(wanted: Sequence[Acquisition]) -> None:
    """Free the memory of released tensors."""
    with contextlib.ExitStack() as all_of_them:
        for tiered, _ in reversed(wanted):
            all_of_them.callback(tiered.settle)


@contextlib.contextmanager
def _sparing(wanted: Sequence[Acquisition]) -> Iterator[Spare | None]:
    lagging = [tiered for tiered, _ in wanted if tiered.home.lags and tiered.spare is None]
    if not (lagging and can_hand_memory_on):
        yield None
        return
    spare = Spare(lagging[0].accountant)
    try:
        for tiered in lagging:
            tiered.spare = spare
        yield spare
    finally:
        for tiered in lagging:
            tiered.spare = None
        spare.clear()


def in_turn(
    parts: Sequence[tuple[T, Sequence[Acquisition]]],
    use: Callable[[T], None],
) -> None:
    """Process parts in order, each acquired for `use`, as a pipeline: the next part is fetched meanwhile, and the
    previous one may still be stored. It needs memory for three parts, and reuses each part's host memory for the third
    after it.
    """
    everything = [acquisition for _, wanted in parts for acquisition in wanted]
    with _sparing(everything) as spare:
        try:
            with contextlib.ExitStack() as ahead:
                for number, (part, wanted) in enumerate(parts):
                    with ahead.pop_all(), _acquired(wanted) as finish:
                        if number >= 2:
                            settle(parts[number - 2][1])
                        for tiered, written in parts[number + 1][1] if number + 1 < len(parts) else ():
                            tiered.start(read=written is not None)
                            ahead.callback(tiered.give_back, written=False)
                        if spare is not None:
                            spare.clear()  # left-over memory of other sizes
                        finish()
                        use(part)
        finally:
            settle(everything)
