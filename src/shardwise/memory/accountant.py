"""The accountant: live and peak bytes by category and tier.

The engine tells it about each of its buffers when the buffer comes and goes, either as a number of bytes (`add`,
`remove`) or as a tensor (`hold`), which is then counted until its memory is really given back. The engine's memory is
therefore known exactly at any time, on any device, without asking an allocator.

Events are written into a log and evaluated when somebody asks. A tensor whose purpose becomes known a little after its
creation (optimizer state, made in the middle of a step among temporaries) is thus counted for that purpose from the
beginning, and never shows up in a peak of something else.
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
    """What a byte is for."""

    PARAMETERS = "parameters"
    """Shards (or, where parameters are not sharded, whole copies) in the dtype the modules compute with."""
    GRADIENTS = "gradients"
    """Accumulated gradients of this rank's range, and whole ones where gradients are not sharded."""
    MASTER = "master weights"
    """fp32 copies that the optimizer updates."""
    OPTIMIZER = "optimizer state"
    """What the optimizer keeps for each element (two moments for Adam)."""
    BUFFERS = "communication buffers"
    """Gradients on their way to the reduction, and pieces received for it."""
    GATHERED = "gathered window"
    """Whole units that are gathered for computing and released after it."""
    ACTIVATIONS = "activations"
    """Tensors saved by autograd for the backward pass, and temporaries of the modules and of the loss."""
    COMMUNICATORS = "communicators"
    """Device memory of NCCL's communicators, beside torch's allocator: a reserve, after the first step as measured."""
    OTHER = "other"
    """Module buffers, temporaries of the optimizer's step, and on a CPU the snapshot of asynchronous saves."""

    __hash__ = object.__hash__  # that of Enum is Python code, and every event is looked up by its category


class Tier(Enum):
    """On what bytes lie."""

    DEVICE = "device"
    """Where the model computes."""
    HOST = "host"
    """The memory of the machine that the device belongs to."""
    DISK = "disk"
    """Files."""

    __hash__ = object.__hash__


class Moved(NamedTuple):
    """Bytes between a tier and where they are used.

    Attributes:
        read: brought from the tier.
        written: stored there.
    """

    read: int = 0
    written: int = 0

    def __add__(self, other: tuple[int, ...]) -> Moved:  # type: ignore[override]  # of counts, not of tuples
        return Moved(self.read + other[0], self.written + other[1])

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written)

    def times(self, count: int) -> Moved:
        """Return as much so many times."""
        return Moved(self.read * count, self.written * count)


class Lap(NamedTuple):
    """Bytes in one tier.

    Attributes:
        live: held now, by category.
        peak: most held at once in each category since the lap before.
        at_peak: held by category at the moment of `peak_total`.
        total: held now.
        peak_total: most held at once since the lap before.
    """

    live: dict[Category, int]
    peak: dict[Category, int]
    at_peak: dict[Category, int]
    total: int
    peak_total: int


class _Counts:
    """Bytes of one tier; peaks are those of the lap under way, and `before` has those of the laps before it."""

    __slots__ = ("at_peak", "before", "live", "peak", "peak_total", "total")

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)
        self.total = 0
        self.begin()

    def begin(self) -> None:
        """Let peaks start from what is live now."""
        self.before: tuple[dict[Category, int], dict[Category, int], int] | None = None
        self._start()

    def _start(self) -> None:
        self.peak, self.at_peak, self.peak_total = dict(self.live), dict(self.live), self.total

    def lap(self) -> Lap:
        """Return what is held now, and most since the lap before; peaks since `begin` go on."""
        ended = Lap(dict(self.live), self.peak, self.at_peak, self.total, self.peak_total)
        self.before = self.peaks()
        self._start()
        return ended

    def peaks(self) -> tuple[dict[Category, int], dict[Category, int], int]:
        """Return `peak`, `at_peak` and `peak_total` since `begin`."""
        if self.before is None:
            return self.peak, self.at_peak, self.peak_total
        peak, at_peak, total = self.before
        highest = {category: max(size, peak[category]) for category, size in self.peak.items()}
        return (highest, self.at_peak, self.peak_total) if self.peak_total > total else (highest, at_peak, total)


class _Told:
    """Bytes of which somebody tells."""

    __slots__ = ("category", "evaluated", "tier")

    def __init__(self, category: Category, tier: Tier) -> None:
        self.category = category
        self.evaluated = True
        self.tier = tier


class _Held(weakref.ref[torch.UntypedStorage]):
    """Bytes of a storage, which come and go with it; without a category they are not counted.

    Category and tier may be corrected as long as its first event is not evaluated. `claimed`: somebody who knows has
    said what it is.
    """

    __slots__ = ("category", "claimed", "evaluated", "key", "size", "tier")

    key: int
    category: Category | None
    size: int
    claimed: bool
    evaluated: bool
    tier: Tier


class Accountant:
    """Counts bytes by category and tier. What is said of no tier is of the device.

    Attributes:
        default: category of tensors that the tracker sees and nobody claims; see `owning`.
        trackers: how many trackers report tensors now.
        tracked: whether `shardwise.memory.track_activations` has been active since the last `reset_peak()`.
        construction_peak: most bytes held at once while the engine was built.
        process_bytes: resident bytes of the process before the engine was built, without the model; None if unknown.
        process_addresses: the same of its address space.

    Example:
        >>> accountant = Accountant()
        >>> accountant.add(Category.GATHERED, 100)
        >>> accountant.remove(Category.GATHERED, 60)
        >>> accountant.live[Category.GATHERED], accountant.peak[Category.GATHERED], accountant.peak_total
        (40, 100, 100)
        >>> buffer = torch.zeros(25)
        >>> accountant.hold(Category.BUFFERS, buffer)
        >>> accountant.total
        140
        >>> del buffer
        >>> accountant.total, accountant.peak_total
        (40, 140)
    """

    _LOG_LENGTH = 4096
    """Events kept before they are evaluated."""
    _TRACKED_LOG_LENGTH = 1 << 20
    """The same while a tracker is active: longer than a step, so that late claims are exact."""

    def __init__(self) -> None:
        self.default: Category | None = Category.ACTIVATIONS
        self.tracked = False
        self.construction_peak = 0
        self.process_bytes: int | None = None
        self.process_addresses: int | None = None
        self.trackers = 0
        self._counts = {tier: _Counts() for tier in Tier}
        self._device = self._counts[Tier.DEVICE]
        self._near = self._peak_near = 0  # of device and host together
        self._moved = dict.fromkeys(Tier, Moved())
        self._moving = threading.Lock()
        # Deaths of tensors are reported by callbacks that may run in the middle of anything, so all they do is append.
        self._log: list[tuple[_Told | _Held, int]] = []
        self._evaluating = threading.Lock()  # threads that go on with chains of collectives tell of buffers, too
        self._told = {tier: {category: _Told(category, tier) for category in Category} for tier in Tier}
        self._held: dict[int, _Held] = {}

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> dict[Category, int]:
        """Bytes held now, by category."""
        return self.live_in(Tier.DEVICE)

    @property
    def peak(self) -> dict[Category, int]:
        """Most bytes held at once in each category since the last `reset_peak()`; not all at the same time."""
        self._evaluate()
        return dict(self._device.peaks()[0])

    @property
    def total(self) -> int:
        """Bytes held now."""
        self._evaluate()
        return self._device.total

    @property
    def peak_total(self) -> int:
        """Most bytes held at once since the last `reset_peak()`."""
        return self.peak_total_in(Tier.DEVICE)

    @property
    def at_peak(self) -> dict[Category, int]:
        """Bytes by category at the moment of `peak_total`."""
        self._evaluate()
        return dict(self._device.peaks()[1])

    def live_in(self, tier: Tier) -> dict[Category, int]:
        """Return the bytes held in a tier now, by category."""
        self._evaluate()
        return dict(self._counts[tier].live)

    def peak_total_in(self, tier: Tier) -> int:
        """Return the most bytes held in a tier at once since the last `reset_peak()`."""
        self._evaluate()
        return self._counts[tier].peaks()[2]

    @property
    def peak_near(self) -> int:
        """Most bytes held at once on device and host together, which are the same memory where the device is a CPU."""
        self._evaluate()
        return self._peak_near

    def moved(self, tier: Tier) -> Moved:
        """Return what has been moved between a tier and where it is used, since the engine was made."""
        return self._moved[tier]

    def reset_peak(self) -> None:
        """Begin a new measurement: peaks start from what is live now."""
        self._evaluate()
        for counts in self._counts.values():
            counts.begin()
        self._peak_near = self._near
        self.tracked = self.trackers > 0

    def lap(self) -> dict[Tier, Lap]:
        """Return what is held in each tier, and most since this was last called, by whoever follows a run.

        What `peak` and its like say goes on.

        >>> accountant = Accountant()
        >>> accountant.add(Category.GATHERED, 100)
        >>> accountant.remove(Category.GATHERED, 60)
        >>> [accountant.lap()[Tier.DEVICE].peak_total for _ in range(2)], accountant.peak_total
        ([100, 40], 100)
        """
        with self._evaluating:
            self._evaluate_log()
            return {tier: counts.lap() for tier, counts in self._counts.items()}

    # -- telling -----------------------------------------------------------------------------------------------------

    def add(self, category: Category, size: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `size` more bytes."""
        self._note(self._told[tier][category], size)

    def remove(self, category: Category, size: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `size` fewer bytes."""
        self._note(self._told[tier][category], -size)

    def move(self, tier: Tier, *, read: int = 0, written: int = 0) -> None:
        """Take note of bytes that are brought from a tier, or stored there."""
        with self._moving:  # threads of autograd and of saves bring values, too
            self._moved[tier] += (read, written)

    def hold(self, category: Category, tensor: torch.Tensor, tier: Tier = Tier.DEVICE) -> None:
        """Count the memory behind a tensor, once however many views it has, until it is given back.

        The first who says what memory is for is right; until then it is what the tracker has taken it for.
        """
        self._claim(category, tensor, tier)

    def disregard(self, tensor: torch.Tensor) -> None:
        """Leave the memory behind a tensor out: its bytes are told by `add` and `remove`."""
        self._claim(None, tensor)

    def rehouse(self, tensor: torch.Tensor, tier: Tier) -> None:
        """Count the memory behind a tensor, as large as it was, in another tier from now on.

        Nothing happens if it is not counted as a tensor's.
        """
        entry = self._held.get(id(tensor.untyped_storage()))
        if entry is None:
            return
        self._evaluate()
        if entry.category is not None and entry.tier is not tier:
            self.remove(entry.category, entry.size, entry.tier)
            self.add(entry.category, entry.size, tier)
        entry.tier = tier

    def observe(self, tensor: torch.Tensor) -> None:
        """Count the memory behind a new tensor under `default`, unless somebody has claimed it or will."""
        if not self.knows(tensor):
            self._enter(self.default, tensor.untyped_storage(), claimed=False)

    def _enter(
        self, category: Category | None, storage: torch.UntypedStorage, tier: Tier = Tier.DEVICE, claimed: bool = True
    ) -> None:
        entry = _Held(storage, self._died)
        entry.key = key = id(storage)
        entry.category, entry.tier, entry.claimed, entry.evaluated = category, tier, claimed, False
        entry.size = size = storage.nbytes()
        self._held[key] = entry
        self._note(entry, size)

    def _claim(self, category: Category | None, tensor: torch.Tensor, tier: Tier = Tier.DEVICE) -> None:
        storage = tensor.untyped_storage()
        entry = self._held.get(id(storage))
        if entry is None:
            self._enter(category, storage, tier)
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

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the memory behind a tensor is counted, or disregarded."""
        return id(tensor.untyped_storage()) in self._held

    def claims(self, tensor: torch.Tensor) -> bool:
        """Whether somebody who knows has said what the memory behind a tensor is for."""
        known = self._held.get(id(tensor.untyped_storage()))
        return known is not None and known.claimed

    def owning(self, category: Category | None) -> AbstractContextManager[None]:
        """Have the tracker count tensors that are made inside the block, and that nobody claims, under `category`.

        None: it does not count them.
        """
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
        """Mark the time in which a tracker reports tensors (used by `shardwise.memory.track_activations`)."""
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

    def _note(self, entry: _Told | _Held, delta: int) -> None:
        log = self._log
        log.append((entry, delta))
        # Not if that is being done: by another thread, or by this one, in the middle of which a finalizer runs.
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
        # Taken piece by piece: an entry that dies meanwhile is appended and found by the same loop.
        done = 0
        for entry, delta in self._log:
            done += 1
            entry.evaluated = True
            category = entry.category
            if category is None:
                continue
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
