"""Activations on the host: what autograd saves for the backward pass leaves the device and comes back before its use.

Every large tensor that a node of a graph saves is copied to the host on a stream of its own, behind the computation,
and its memory on the device is free for others. The backward pass reads nodes in the reverse of the order in which they
were made; so while it is at one, what the nodes before it have saved is on its way back.

What one node saves is a *group*. The device keeps the groups around the place where a pass is, and no more bytes of
them than the largest two that follow one another have: with less, a node could not run while the next one's values
travel. So the forward pass goes on while the last groups are copied, waits for the copies if it is faster than they
are, and leaves the last groups on the device, which the backward pass needs first.

Memory is copied, not tensors: a whole storage where a tensor reaches over half of it, else the bytes from its first to
its last element. Views of one storage share one copy, and come back with the strides that they had.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.compat import (
    at_end_of_backward,
    backward_pass,
    check_version,
    fake_tensor,
    has_values,
    never_compiled,
    number_now,
    reason_against_saved_hooks,
    saved_hooks_in_force,
    share_version_counter,
    transforming,
    version_counter,
)
from shardwise.device import staging
from shardwise.device.hostbuffers import HostBuffers
from shardwise.device.staging import Copied
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category, Tier
from shardwise.utils.logging import warn_once

MIN_BYTES = 1 << 20
"""Memory below this size stays on the device, unless told otherwise: a copy of it takes longer to launch than to make,
and a model's small tensors (statistics of norms, masks) are a few per cent of its activations."""

_ALIGNMENT = 512
"""Copies of parts of a storage begin at multiples of it, so that kernels find the alignment that they had."""

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class ActivationOffload:
    """Keeps on the host what autograd saves inside of `with` blocks (see `offload_activations`).

    One object serves any number of blocks, one after the other or inside of one another.

    Args:
        min_bytes: memory of at least this size is moved.
        device: whose tensors are moved; None: those of CUDA devices where there are any, else those of the CPU.
        accountant: is told of the bytes on the host (`engine.accountant`), and knows memory that is not to be moved.
        keep_buffers: keep memory of the host for the next pass; None: where it is pinned, which takes time.
        stay: tensors that are alive anyway, such as buffers of the model.

    Raises:
        UsageError: `min_bytes` is negative or no integer.
    """

    def __init__(
        self,
        *,
        min_bytes: int = MIN_BYTES,
        device: torch.device | None = None,
        accountant: Accountant | None = None,
        keep_buffers: bool | None = None,
        stay: Iterable[torch.Tensor] = (),
    ) -> None:
        if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
            raise UsageError(f"offload_activations(min_bytes={min_bytes!r}): expected a number of bytes, 0 or more")
        self.min_bytes = min_bytes
        self.accountant = accountant
        self._kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        self._keeps = keep_buffers
        self._stay = _storages_of(stay)
        self._lock = threading.RLock()
        self._lanes: dict[torch.device, _Lane] = {}
        self._known: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()  # by id() of storages
        self._open = _Open()
        self._groups = 0
        self._last: weakref.ref[_Group] | None = None
        self._window: dict[int, weakref.ref[_Group]] = {}  # by number, in the order in which they came
        self._front: weakref.ref[_Group] | None = None  # the earliest that the backward pass has asked for
        self._now = self._task = -1
        self.held = 0
        """Bytes that are on the device, too."""

    # -- blocks --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> ActivationOffload:
        self._open.pairs.append(self._begin(()))
        return self

    def __exit__(self, *error: Any) -> None:
        pair = self._open.pairs.pop()
        if pair is not None:
            pair.end()

    @contextmanager
    def around(self, stay: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Move what autograd saves inside of the block.

        Args:
            stay: further tensors that are alive anyway, such as the inputs of a model.
        """
        pair = self._begin(stay)
        try:
            yield
        finally:
            if pair is not None:
                pair.end()

    @never_compiled
    def _begin(self, stay: Iterable[torch.Tensor]) -> _Pair | None:
        outer = saved_hooks_in_force(True)
        owner = getattr(outer[0], "__self__", None) if outer is not None else None
        # Other pairs (a checkpoint around this block) keep tensors in a way of their own, or keep none.
        foreign = outer is not None and not hasattr(owner, "lets_go")
        if foreign or transforming() or reason_against_saved_hooks() is not None:
            return None
        if isinstance(owner, _Pair) and owner.offload is self:
            return None
        return _Pair(self, outer, {**self._stay, **_storages_of(stay)})

    def keep_buffers(self) -> None:
        """Keep memory of the host from pass to pass from now on."""
        self._keeps = True
        for lane in self._lanes.values():
            lane.buffers.keep = True

    def close(self) -> None:
        """Give back what is kept for further passes. What graphs still hold goes with them."""
        with self._lock:
            for lane in self._lanes.values():
                lane.buffers.close()

    # -- saving --------------------------------------------------------------------------------------------------------

    def moves(self, tensor: torch.Tensor, stay: _Storages) -> bool:
        """Whether a tensor is an activation that is worth moving.

        Args:
            tensor: that autograd saves.
            stay: memory that is not moved.
        """
        # Parameters and other subclasses have types of their own.
        if type(tensor) is not torch.Tensor and type(tensor) is not fake_tensor():
            return False
        if tensor.device.type != self._kind or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        root = tensor if tensor._base is None else tensor._base
        if isinstance(root, nn.Parameter) or (root.is_leaf and root.requires_grad):
            return False
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return False
        storage = _storage_of(tensor)
        if storage is None or storage.nbytes() < self.min_bytes:
            return False
        if id(storage) in stay and stay[id(storage)]() is storage:
            return False
        return self.accountant is None or not self.accountant.claims(tensor)

    def move(self, tensor: torch.Tensor) -> _Saved:
        """Begin to copy a tensor to the host, unless that has been done, and return what stands for it."""
        with self._lock, torch.no_grad():
            moved, group = self._moved(tensor), self._group()
            group.add(moved)
            self._make_room(group)
            return _Saved(moved, group, tensor)

    def _moved(self, tensor: torch.Tensor) -> _Moved:
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size
        reach = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        last = first + (reach + 1) * size
        if 2 * (last - first) >= storage.nbytes():
            start, stop = 0, storage.nbytes() // size * size
        else:
            start, stop = first - first % _ALIGNMENT, last
        known = self._known.get(id(storage))
        if known is not None and known.has(storage, tensor, first, last, size):
            known.stay_near(tensor)
            return known
        moved = _Moved(self, self._lane(tensor.device), tensor, start, stop)
        self._known[id(storage)] = moved
        return moved

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device, self._keeps)
        return self._lanes[device]

    def _group(self) -> _Group:
        """Return the group of the node that is being made on this thread."""
        last = self._last() if self._last is not None else None
        node = threading.get_ident(), number_now()
        if last is not None and last.node == node:
            return last
        self._groups += 1
        group = _Group(self, self._groups, node, last)
        self._last = weakref.ref(group)
        return group

    def _make_room(self, group: _Group) -> None:
        """Let go of the groups that came first, until the others fit."""
        group.hold()
        for other in self._near():
            if self.held <= group.room:
                break
            if other is not group:
                other.let_go()

    def _near(self) -> list[_Group]:
        return [group for group in (known() for known in list(self._window.values())) if group is not None]

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, saved: _Saved) -> torch.Tensor:
        """Return a saved tensor, for a node that the current stream is about to run."""
        with self._lock, torch.no_grad():
            task = backward_pass()
            if task is not None:
                self._go_to(saved.group, task)
            tensor = saved.tensor()
            saved.moved.leave()
        check_version(saved.counter, saved.version, tensor)
        return tensor

    def _go_to(self, group: _Group, task: int) -> None:
        """Have the values of a group and of those before it on the device or on their way."""
        if task != self._task:
            self._task = task
            at_end_of_backward(self._settle)
        elif group.number == self._now:
            return
        self._now = group.number
        for other in self._near():
            if other.number > group.number:
                other.let_go()  # it has been read: later nodes run first
        front = self._front() if self._front is not None else None
        if front is None or not front.near or not group.near or front.number > group.number:
            front = group
        group.hold()
        for other in self._near():
            if self.held > group.room and other is not group:
                other.let_go()
        ahead = front.before
        while ahead is not None and self.held + ahead.missing() <= group.room:
            ahead.hold()
            front, ahead = ahead, ahead.before
        self._front = weakref.ref(front)

    def _settle(self) -> None:
        """End a backward pass: nothing is kept for nodes that it has not run."""
        with self._lock:
            self._now = self._task = -1
            for group in self._near():
                group.let_go()


def offload_activations(
    *,
    min_bytes: int = MIN_BYTES,
    device: torch.device | str | None = None,
    accountant: Accountant | None = None,
    keep_buffers: bool | None = None,
    stay: Iterable[torch.Tensor] = (),
) -> ActivationOffload:
    """Keep on the host what autograd saves inside of the block, and bring it back ahead of the backward pass.

    Results are the same, bit for bit; the backward pass may lie outside of the block. Parameters stay, and so do
    tensors that require a gradient themselves. With activation checkpointing the inputs of checkpointed functions are
    what is saved. Any model, with or without an engine (whose configuration has `activation_offload`).

    Args:
        min_bytes: memory of at least this size is moved.
        device: whose tensors are moved; None: those of CUDA devices where there are any, else those of the CPU, which
            are copied to other memory of the host: for tests and plans.
        accountant: is told of the bytes on the host, such as `engine.accountant`.
        keep_buffers: keep memory of the host for the next block of the same object; None: where it is pinned, which
            takes time.
        stay: tensors that are alive anyway, so that moving them frees nothing: the batch, buffers of the model.

    Raises:
        UsageError: `min_bytes` is negative or no integer.

    Example:
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> offload = offload_activations(min_bytes=64)
        >>> for _ in range(2):
        ...     with offload:
        ...         loss = layers(torch.ones(2, 8)).tanh().sum()
        ...     loss.backward()
    """
    where = torch.device(device) if device is not None else None
    return ActivationOffload(
        min_bytes=min_bytes, device=where, accountant=accountant, keep_buffers=keep_buffers, stay=stay
    )


_Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]
"""Storages by their id()."""


def _storages_of(tensors: Iterable[torch.Tensor]) -> _Storages:
    found = [storage for storage in map(_storage_of, tensors) if storage is not None]
    return {id(storage): weakref.ref(storage) for storage in found}


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, None if it has none that can be seen (sparse tensors, some subclasses)."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


class _Pair:
    """The hooks of one block (see `shardwise.zero.passes.saved` for those that may be around it, or inside).

    Args:
        offload: moves.
        outer: the pair in force around the block, which keeps what is not moved.
        stay: memory that is not moved.
    """

    activations_only = True
    """Hooks inside of these need not ask for places in the memory of parameters."""

    def __init__(self, offload: ActivationOffload, outer: tuple[Pack, Unpack] | None, stay: _Storages) -> None:
        self.offload = offload
        self._outer = outer
        self._asked = getattr(outer[0], "__self__", None) if outer is not None else None
        self._stay = stay
        saved_tensors_hooks(self.pack, self.unpack).__enter__()

    @never_compiled
    def end(self) -> None:
        """Take the hooks off, and those inside of the block that an interruption has left in force."""
        while (innermost := saved_hooks_in_force(True)) is not None:
            saved_tensors_hooks(*innermost).__exit__()
            if getattr(innermost[0], "__self__", None) is self:
                break

    def lets_go(self, tensor: torch.Tensor) -> bool:
        """Whether a pair inside of this one may keep a tensor in its own way."""
        return self._asked is None or bool(self._asked.lets_go(tensor))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        if self.offload.moves(tensor, self._stay) and self.lets_go(tensor):
            return self.offload.move(tensor)
        if self._outer is not None:
            return _Handed(self._outer[0](tensor))
        # Detached, because a node that held its own output would never die.
        kept = tensor.detach() if tensor.requires_grad else tensor
        return kept, kept._version

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _Saved:
            return self.offload.read(packed)
        if type(packed) is _Handed:
            assert self._outer is not None
            return self._outer[1](packed.content)
        tensor: torch.Tensor = packed[0]
        check_version(tensor, packed[1], tensor)
        return tensor


class _Open(threading.local):
    """The blocks that a thread is in; None for those that do nothing."""

    def __init__(self) -> None:
        self.pairs: list[_Pair | None] = []


class _Handed:
    """What the pair around a block has made of a tensor."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class _Lane:
    """The streams of one device, and the memory of the host that goes with it."""

    def __init__(self, device: torch.device, keep_buffers: bool | None) -> None:
        self.device = device
        self.out = staging.copy_stream(device)
        self.back = staging.copy_stream(device)
        self.buffers = HostBuffers(device, keep_buffers)


class _Moved:
    """A range of bytes of one storage, on the host; on the device, too, while a group near the pass has it.

    Args:
        offload: whose.
        lane: of the device.
        tensor: lies in the range.
        start: first byte of the range in the storage.
        stop: behind its last byte.
    """

    def __init__(self, offload: ActivationOffload, lane: _Lane, tensor: torch.Tensor, start: int, stop: int) -> None:
        self._offload = offload
        self._lane = lane
        self._storage = weakref.ref(tensor.untyped_storage())
        self._counter = version_counter(tensor)
        self._version = tensor._version
        self.start = start
        self.size = stop - start
        self.holds = 0
        """Groups near the pass that have it."""
        self._arrived: Copied | None = None
        self._copied: Copied | None = None
        self._near: torch.Tensor | None = None
        with lane.out.use():
            self._buffer = lane.buffers.take(self.size, real=has_values(tensor))
        if not lane.buffers.pinned and lane.device.type == "cuda":
            warn_once(
                "memory of the host for activations cannot be pinned: copies are slower, and the host waits for them "
                "(is the limit of locked memory, ulimit -l, too low?)"
            )
        if offload.accountant is not None:
            offload.accountant.hold(Category.ACTIVATIONS, self._buffer, Tier.HOST)
        self._values = self._buffer[: self.size]
        near = self.stay_near(tensor)
        lane.out.follow()
        lane.out.copy(self._values, near)
        self._copied = lane.out.mark()

    def has(self, storage: torch.UntypedStorage, tensor: torch.Tensor, start: int, stop: int, alignment: int) -> bool:
        """Return True if the bytes `start` to `stop` of a storage are here as `tensor`, which lies in it, has them now.

        Because tensors of one storage may count changes separately, theirs must be one counter.
        """
        if self._storage() is not storage or self.start % alignment or self.size % alignment:
            return False
        inside = self.start <= start and stop <= self.start + self.size
        return inside and tensor._version == self._version and share_version_counter(self._counter, tensor)

    def stay_near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep the memory in which a tensor has just been saved on the device, until no group near the pass has it.

        Returns:
            The bytes there.
        """
        if self._near is not None:
            return self._near
        size = tensor.element_size()
        flat = tensor.detach().as_strided((self.size // size,), (1,), self.start // size)
        return self._set_near(flat.view(torch.uint8))

    def bring(self) -> torch.Tensor:
        """Begin to copy the bytes back, unless they are there; return where."""
        near = self._near
        if near is None:
            assert self._copied is not None
            lane = self._lane
            near = torch.empty(self.size, dtype=torch.uint8, device=lane.device)
            lane.back.follow()  # what has used this memory before
            lane.back.come_behind(self._copied)
            lane.back.copy(near, self._values)
            self._arrived = lane.back.mark()
            self._set_near(near)
        return near

    def _set_near(self, near: torch.Tensor) -> torch.Tensor:
        self._near, self._owner = near, self._lane.out.current()
        self._offload.held += self.size
        return near

    @property
    def missing(self) -> int:
        """Bytes that are not on the device."""
        return self.size if self._near is None else 0

    def use(self) -> torch.Tensor:
        """Return the bytes, which the current stream may read from now on."""
        near = self.bring()
        if self._arrived is not None:
            self._arrived.wait()
        self._lane.out.lend(near)
        return near

    def leave(self) -> None:
        """Let go of the memory on the device when it has been copied, unless a group near the pass has it."""
        if self._near is not None and not self.holds:
            # Memory goes back to the stream on which it was taken, which must come behind the copies from or to it.
            for copied in (self._copied, self._arrived):
                if copied is not None:
                    copied.hold_up(self._owner)
            self._near = None
            self._offload.held -= self.size

    def __del__(self) -> None:
        if self._copied is not None:
            with self._offload._lock:
                self.holds = 0
                self.leave()
                # Memory of the host is taken for copies out: these come behind the last copy back.
                if self._arrived is not None:
                    self._lane.out.come_behind(self._arrived)
                self._lane.buffers.give_back(self._buffer, self._arrived or self._copied)


class _Group:
    """What one node has saved, in as far as it has been moved. It lives as long as the node has it.

    Args:
        offload: whose.
        number: in the order of saving.
        node: thread, and number of the node that follows.
        before: the group before it.
    """

    def __init__(self, offload: ActivationOffload, number: int, node: tuple[int, int], before: _Group | None) -> None:
        self._offload = offload
        self.number = number
        self.node = node
        self.near = False
        self._members: list[weakref.ref[_Moved]] = []
        self._pair = self._size = 0
        self.room = 0
        """Most bytes that two groups have which follow one another, up to this one."""
        self._before = self._after = None
        if before is not None:
            self._before, before._after = weakref.ref(before), weakref.ref(self)
            self._pair, self.room = before._size, before.room

    _before: weakref.ref[_Group] | None
    _after: weakref.ref[_Group] | None

    @property
    def before(self) -> _Group | None:
        """The group before it among those that live."""
        return self._before() if self._before is not None else None

    def _moved(self) -> list[_Moved]:
        return [moved for moved in (member() for member in self._members) if moved is not None]

    def add(self, moved: _Moved) -> None:
        """Take in what the node has saved."""
        if moved in self._moved():
            return
        before = self.before
        self._members.append(weakref.ref(moved))
        self._size += moved.size
        if before is None or moved not in before._moved():
            self._pair += moved.size
        self.room = max(self.room, self._pair)
        if self.near:
            moved.holds += 1

    def missing(self) -> int:
        """Return the bytes of it that are not on the device."""
        return sum(moved.missing for moved in self._moved())

    def hold(self) -> None:
        """Have it on the device, or on the way there."""
        if not self.near:
            self.near = True
            self._offload._window[self.number] = weakref.ref(self)
            for moved in self._moved():
                moved.holds += 1
                moved.bring()

    def let_go(self) -> None:
        """Have it on the host only."""
        if self.near:
            self.near = False
            self._offload._window.pop(self.number, None)
            for moved in self._moved():
                moved.holds -= 1
                moved.leave()

    def __del__(self) -> None:
        with self._offload._lock:
            self.let_go()
            before, after = self.before, self._after() if self._after is not None else None
            if before is not None:
                before._after = self._after
            if after is not None:
                after._before = self._before
            last = self._offload._last() if self._offload._last is not None else None
            if last is None or last is self:
                self._offload._last = self._before


class _Saved:
    """What stands for a saved tensor in the graph."""

    __slots__ = ("_view", "counter", "group", "moved", "version")

    def __init__(self, moved: _Moved, group: _Group, tensor: torch.Tensor) -> None:
        self.moved = moved
        self.group = group
        self.counter = version_counter(tensor)
        self.version = tensor._version
        offset = int(tensor.storage_offset()) - moved.start // tensor.element_size()
        self._view = tensor.dtype, tensor.size(), tensor.stride(), offset

    def tensor(self) -> torch.Tensor:
        """Return the tensor, which the current stream may read."""
        dtype, size, stride, offset = self._view
        return self.moved.use().view(dtype).as_strided(size, stride, offset)
