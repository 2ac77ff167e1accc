"""Memory accountant: live and peak bytes by category and tier.

The engine reports each allocation and release of its buffers, as a number of bytes (`add`, `remove`) or as a tensor
(`hold`), which counts until its memory is freed. So its memory is known exactly, independent of the allocator. Events
are evaluated on demand, because the category of optimizer state becomes known only after its creation among
temporaries.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple

import torch

_NOTHING = contextlib.nullcontext()


class Category(Enum):
    """Purpose of a byte."""

    PARAMETERS = "parameters"
    """Shards (whole copies if parameters are not sharded) in the compute dtype."""
    GRADIENTS = "gradients"
    """Accumulated gradients of this rank's range; whole gradients if not sharded."""
    MASTER = "master weights"
    """fp32 master weights of the optimizer."""
    OPTIMIZER = "optimizer state"
    """Optimizer state for each element (two moments for Adam)."""
    BUFFERS = "communication buffers"
    """Buckets of gradients for the reduction, and received parts."""
    GATHERED = "gathered window"
    """Unsharded units, between all-gather and reshard."""
    ACTIVATIONS = "activations"
    """Tensors saved by autograd for the backward pass, and temporaries of the modules and of the loss."""
    COMMUNICATORS = "communicators"
    """Device memory of NCCL's communicators, outside torch's allocator: an estimate, after the first step measured."""
    OTHER = "other"
    """Module buffers, temporaries of the optimizer's step, and on a CPU the snapshot of asynchronous saves."""

    __hash__ = object.__hash__  # faster than Enum's Python code; every event looks up its category


class Tier(Enum):
    """Storage tier of bytes."""

    DEVICE = "device"
    """Memory of the compute device."""
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__


class Moved(NamedTuple):
    """Bytes read from a tier and written to it."""

    read: int = 0
    written: int = 0

    def __add__(self, other: tuple[int, ...]) -> Moved:  # type: ignore[override]  # of counts, not of tuples
        return Moved(self.read + other[0], self.written + other[1])

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written)

    def times(self, count: int) -> Moved:
        """Return the bytes multiplied by `count`."""
        return Moved(self.read * count, self.written * count)


class Lap(NamedTuple):
    """Bytes in one tier: `live` ones, and peaks since the previous lap; `at_peak`: at the moment of `peak_total`."""

    live: dict[Category, int]
    peak: dict[Category, int]
    at_peak: dict[Category, int]
    total: int
    peak_total: int


class Journal:
    """Events of an accountant, in the order in which they are evaluated.

    Attributes:
        events: category, tier, and bytes more or fewer; None where peaks are restarted.
        moves: tier, bytes read and bytes written; None likewise.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Category, Tier, int] | None] = []
        self.moves: list[tuple[Tier, int, int] | None] = []


class _Counts:
    """Bytes of one tier. Peaks are of the current lap; `before` has the peaks of earlier laps."""

    __slots__ = ("at_peak", "before", "live", "peak", "peak_total", "total")

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)
        self.total = 0
        self.begin()

    def begin(self) -> None:
        self.before: tuple[dict[Category, int], dict[Category, int], int] | None = None
        self._start()

    def _start(self) -> None:
        self.peak, self.at_peak, self.peak_total = dict(self.live), dict(self.live), self.total

    def lap(self) -> Lap:
        ended = Lap(dict(self.live), self.peak, self.at_peak, self.total, self.peak_total)
        self.before = self.peaks()
        self._start()
        return ended

    def peaks(self) -> tuple[dict[Category, int], dict[Category, int], int]:
        if self.before is None:
            return self.peak, self.at_peak, self.peak_total
        peak, at_peak, total = self.before
        highest = {category: max(size, peak[category]) for category, size in self.peak.items()}
        return (highest, self.at_peak, self.peak_total) if self.peak_total > total else (highest, at_peak, total)


class _Reported:
    __slots__ = ("category", "evaluated", "tier")

    def __init__(self, category: Category, tier: Tier) -> None:
        self.category = category
        self.evaluated = True
        self.tier = tier


class _Held(weakref.ref[torch.UntypedStorage]):
    """Bytes of a storage, until it is freed; without a category they do not count. Category and tier may be corrected
    until its first event is evaluated. `claimed`: the owner has set the category.
    """

    __slots__ = ("category", "claimed", "evaluated", "key", "size", "tier")

    key: int
    category: Category | None
    size: int
    claimed: bool
    evaluated: bool
    tier: Tier


class Accountant:
    """Counts bytes by category and tier, by default of the device.

    Args:
        journal: to be written; events are otherwise only summed.

    Attributes:
        default: category of unclaimed tensors that the tracker sees; see `owning`.
        tracked: `shardwise.memory.track_activations` was active since the last `reset_peak()`.
        construction_peak: peak bytes during the engine's construction.
        process_bytes, process_addresses: resident and virtual bytes before it, without the model; None if unknown.

    Example:
        >>> accountant = Accountant()
        >>> accountant.add(Category.GATHERED, 100)
        >>> accountant.remove(Category.GATHERED, 60)
        >>> buffer = torch.zeros(25)
        >>> accountant.hold(Category.BUFFERS, buffer)
        >>> accountant.live[Category.GATHERED], accountant.total, accountant.peak_total
        (40, 140, 140)
        >>> del buffer
        >>> accountant.total, accountant.peak_total
        (40, 140)
    """

    _LOG_LENGTH = 4096
    """Maximum number of unevaluated events."""
    _TRACKED_LOG_LENGTH = 1 << 20
    """Maximum with an active tracker: longer than a step, for exact late claims."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self.default: Category | None = Category.ACTIVATIONS
        self.tracked = False
        self.construction_peak = 0
        self.process_bytes: int | None = None
        self.process_addresses: int | None = None
        self.trackers = 0
        self._counts = {tier: _Counts() for tier in Tier}
        self._device = self._counts[Tier.DEVICE]
        self._near = self._peak_near = 0  # device and host together
        self._moved = dict.fromkeys(Tier, Moved())
        self._moving = threading.Lock()
        # Because finalizers of tensors may run anywhere, they only append to the log.
        self._log: list[tuple[_Reported | _Held, int]] = []
        self._evaluating = threading.Lock()  # threads of collective queues also report buffers
        self._reported = {tier: {category: _Reported(category, tier) for category in Category} for tier in Tier}
        self._held: dict[int, _Held] = {}

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> dict[Category, int]:
        """Current bytes on the device, by category."""
        return self.live_in(Tier.DEVICE)

    @property
    def peak(self) -> dict[Category, int]:
        """Peak bytes of each category since the last `reset_peak()`; peaks need not coincide."""
        self._evaluate()
        return dict(self._device.peaks()[0])

    @property
    def total(self) -> int:
        """Current bytes on the device."""
        self._evaluate()
        return self._device.total

    @property
    def peak_total(self) -> int:
        """Peak bytes on the device since the last `reset_peak()`."""
        return self.peak_total_in(Tier.DEVICE)

    @property
    def at_peak(self) -> dict[Category, int]:
        """Bytes by category at the moment of `peak_total`."""
        self._evaluate()
        return dict(self._device.peaks()[1])

    def live_in(self, tier: Tier) -> dict[Category, int]:
        """Return the current bytes in a tier, by category."""
        self._evaluate()
        return dict(self._counts[tier].live)

    def peak_total_in(self, tier: Tier) -> int:
        """Return the peak bytes in a tier since the last `reset_peak()`."""
        self._evaluate()
        return self._counts[tier].peaks()[2]

    @property
    def peak_near(self) -> int:
        """Peak bytes of device and host together, which are the same memory if the device is a CPU."""
        self._evaluate()
        return self._peak_near

    def moved(self, tier: Tier) -> Moved:
        """Return the bytes read from and written to a tier since the engine was built."""
        return self._moved[tier]

    def reset_peak(self) -> None:
        """Restart peaks from the current bytes."""
        self._evaluate()
        for counts in self._counts.values():
            counts.begin()
        self._peak_near = self._near
        self.tracked = self.trackers > 0
        if self._journal is not None:
            self._journal.events.append(None)
            self._journal.moves.append(None)

    def lap(self) -> dict[Tier, Lap]:
        """Return current and peak bytes of each tier since the last call; `peak` and other peaks continue."""
        with self._evaluating:
            self._evaluate_log()
            return {tier: counts.lap() for tier, counts in self._counts.items()}

    # -- reporting ---------------------------------------------------------------------------------------------------

    def add(self, category: Category, size: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `size` more bytes."""
        self._note(self._reported[tier][category], size)

    def remove(self, category: Category, size: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `size` fewer bytes."""
        self._note(self._reported[tier][category], -size)

    def move(self, tier: Tier, *, read: int = 0, written: int = 0) -> None:
        """Count bytes read from a tier or written to it."""
        with self._moving:  # autograd and checkpoint threads also move values
            self._moved[tier] += (read, written)
            if self._journal is not None:
                self._journal.moves.append((tier, read, written))

    def hold(self, category: Category | None, tensor: torch.Tensor, tier: Tier = Tier.DEVICE) -> None:
        """Count the memory of a tensor, once for all its views, until it is freed; None: under no category. The first
        claim sets the category; before, the tracker's category holds.
        """
        storage = tensor.untyped_storage()
        entry = self._held.get(id(storage))
        if entry is None:
            entry = _Held(storage, self._died)
            entry.key = key = id(storage)
            entry.category, entry.tier, entry.claimed, entry.evaluated = category, tier, True, False
            entry.size = size = storage.nbytes()
            self._held[key] = entry
            self._note(entry, size)
            return
        if entry.claimed:
            return
        entry.claimed = True
        if entry.evaluated and (entry.category, entry.tier) != (category, tier):
            self._evaluate()
            if entry.category is not None:
                self.remove(entry.category, entry.size, entry.tier)
            if category is not None:
                self.add(category, entry.size, tier)
        entry.category, entry.tier = category, tier

    def disregard(self, tensor: torch.Tensor) -> None:
        """Exclude the memory of a tensor, because `add` and `remove` report its bytes."""
        self.hold(None, tensor)

    def rehouse(self, tensor: torch.Tensor, tier: Tier) -> None:
        """Move the count of a tensor's memory, with its original size, to another tier; ignore uncounted tensors."""
        entry = self._held.get(id(tensor.untyped_storage()))
        if entry is None:
            return
        self._evaluate()
        if entry.category is not None and entry.tier is not tier:
            self.remove(entry.category, entry.size, entry.tier)
            self.add(entry.category, entry.size, tier)
        entry.tier = tier

    def observe(self, tensor: torch.Tensor) -> None:
        """Count the memory of a new tensor under `default`, until it is claimed."""
        if not self.knows(tensor):
            self.hold(self.default, tensor)
            self._held[id(tensor.untyped_storage())].claimed = False

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a tensor is counted or disregarded."""
        return id(tensor.untyped_storage()) in self._held

    def claims(self, tensor: torch.Tensor) -> bool:
        """Return True if the category of a tensor's memory has been claimed."""
        known = self._held.get(id(tensor.untyped_storage()))
        return known is not None and known.claimed

    def owning(self, category: Category | None) -> AbstractContextManager[None]:
        """Set the tracker's category for unclaimed tensors created inside the block; None: they do not count."""
        return self._owning(category) if self.trackers else _NOTHING

    @contextlib.contextmanager
    def _owning(self, category: Category | None) -> Iterator[None]:
        before, self.default = self.default, category
        try:
            yield
        finally:
            self.default = before

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Mark a period of an active tracker (`shardwise.memory.track_activations`)."""
        self._evaluate()
        self.trackers += 1
        self.tracked = True
        try:
            yield
        finally:
            self.trackers -= 1
            self._evaluate()

    # -- evaluating --------------------------------------------------------------------------------------------------

    def _died(self, entry: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(entry, _Held)
        self._held.pop(entry.key, None)
        self._log.append((entry, -entry.size))

    def _note(self, entry: _Reported | _Held, delta: int) -> None:
        log = self._log
        log.append((entry, delta))
        # Skipped during an evaluation: by another thread, or by this one, inside which a finalizer runs.
        if (
            len(log) > self._LOG_LENGTH
            and (not self.trackers or len(log) > self._TRACKED_LOG_LENGTH)
            and self._evaluating.acquire(blocking=False)
        ):
            try:
                self._evaluate_log()
            finally:
                self._evaluating.release()

    def _evaluate(self) -> None:
        with self._evaluating:
            self._evaluate_log()

    def _evaluate_log(self) -> None:
        # Events appended during the evaluation are processed by the same loop.
        done = 0
        for entry, delta in self._log:
            done += 1
            entry.evaluated = True
            category = entry.category
            if category is None:
                continue
            if self._journal is not None:
                self._journal.events.append((category, entry.tier, delta))
            counts = self._counts[entry.tier]
            live = counts.live
            live[category] = now = live[category] + delta
            counts.total = total = counts.total + delta
            if delta > 0:
                if now > counts.peak[category]:
                    counts.peak[category] = now
                if total > counts.peak_total:
                    counts.peak_total = total
                    counts.at_peak = live.copy()
            if entry.tier is not Tier.DISK:
                self._near += delta
                if self._near > self._peak_near:
                    self._peak_near = self._near
        del self._log[:done]
