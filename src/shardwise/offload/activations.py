"""Activation offload: tensors saved for the backward pass are copied to the host and prefetched before their use.

A copy stream copies each large saved tensor to the host after its computation, and its device memory is freed. The
backward pass runs nodes in reverse creation order. While it is at one node, the tensors of earlier nodes are
prefetched.

The saved tensors of one node are a *group*. The device keeps the groups near the current node, at most as many bytes as
the largest two consecutive groups: with less, a node could not run during the next node's copy. The forward pass
continues during the copies of the last groups, and waits if it is faster. The last groups stay on the device, because
the backward pass needs them first.

A copy takes a whole storage if a tensor covers over half of it, else the bytes from the tensor's first to its last
element. Views of one storage share one copy and keep their strides.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from shardwise.device.hostmemory import HostPool
from shardwise.device.staging import Copied
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category, Tier

MIN_BYTES = 1 << 20
"""Default minimum bytes of offloaded memory. A smaller copy takes longer to launch than to run."""

_ALIGNMENT = 512
"""Alignment of partial copies in bytes, which preserves the alignment that kernels expect."""

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class ActivationOffload:
    """Offloads tensors that autograd saves inside of `with` blocks; arguments as for `offload_activations`.

    One object serves any number of consecutive or nested blocks. Memory that `accountant` claims stays on the device.
    Raises UsageError for wrong `min_bytes`.
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
        self._last: _Weak = _none
        self._window: weakref.WeakValueDictionary[int, _Group] = weakref.WeakValueDictionary()  # by number
        self._front: _Weak = _none  # the earliest prefetched group
        self._now = self._task = -1
        self.held = 0
        """Bytes that are also on the device."""

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
        """Offload tensors that autograd saves inside the block, except `stay` (such as the inputs of a model)."""
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
        # Other hook pairs (a checkpoint around this block) keep tensors themselves, or keep none.
        foreign = outer is not None and not hasattr(owner, "lets_go")
        if foreign or transforming() or reason_against_saved_hooks() is not None:
            return None
        if isinstance(owner, _Pair) and owner.offload is self:
            return None
        return _Pair(self, outer, {**self._stay, **_storages_of(stay)})

    def keep_buffers(self) -> None:
        """Keep host buffers from pass to pass from now on."""
        self._keeps = True
        for lane in self._lanes.values():
            lane.pool.keep = True

    def close(self) -> None:
        """Free the host buffers kept for further passes. Buffers of live graphs are freed with the graphs."""
        with self._lock:
            for lane in self._lanes.values():
                lane.pool.close()

    # -- saving --------------------------------------------------------------------------------------------------------

    def moves(self, tensor: torch.Tensor, stay: _Storages) -> bool:
        """Return True if a tensor that autograd saves is an activation to offload; `stay` is memory to keep."""
        # Parameters and other subclasses have other types.
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
        """Start the copy of a tensor to the host, unless done, and return its placeholder."""
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
        last, node = self._last(), (threading.get_ident(), number_now())
        if last is not None and last.node == node:
            return last
        self._groups += 1
        group = _Group(self, self._groups, node, last)
        self._last = weakref.ref(group)
        return group

    def _make_room(self, group: _Group) -> None:
        """Keep a group near, and let go of others from the earliest on until the window fits."""
        group.hold()
        for other in list(self._window.values()):
            if self.held > group.room and other is not group:
                other.let_go()

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
        if task != self._task:
            self._task = task
            at_end_of_backward(self._settle)
        elif group.number == self._now:
            return
        self._now = group.number
        for other in list(self._window.values()):
            if other.number > group.number:
                other.let_go()  # already used: later nodes run first
        front = self._front()
        if front is None or not front.near or not group.near or front.number > group.number:
            front = group
        self._make_room(group)
        ahead = front.before()
        while ahead is not None and self.held + ahead.missing() <= group.room:
            ahead.hold()
            front, ahead = ahead, ahead.before()
        self._front = weakref.ref(front)

    def _settle(self) -> None:
        """End a backward pass: free the device memory of nodes that it has not run."""
        with self._lock:
            self._now = self._task = -1
            for group in list(self._window.values()):
                group.let_go()


def offload_activations(
    *,
    min_bytes: int = MIN_BYTES,
    device: torch.device | str | None = None,
    accountant: Accountant | None = None,
    keep_buffers: bool | None = None,
    stay: Iterable[torch.Tensor] = (),
) -> ActivationOffload:
    """Offload tensors that autograd saves inside the block to the host, and prefetch them in the backward pass.

    Results are bitwise equal; the backward pass may be outside of the block. Parameters and other leaves that require a
    gradient stay. With activation checkpointing the saved inputs of checkpointed functions are offloaded. Any model
    works, with or without an engine (whose configuration has `activation_offload`).

    Args:
        min_bytes: minimum bytes of offloaded memory.
        device: device of offloaded tensors; None: CUDA if available, else the CPU (for tests and plans).
        accountant: counts the bytes on the host, such as `engine.accountant`.
        keep_buffers: keep host buffers for the object's next block; None: if pinned, because pinning takes time.
        stay: tensors that stay alive anyway, and free nothing: the batch, buffers of the model.

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
"""Storages by id()."""


def _storages_of(tensors: Iterable[torch.Tensor]) -> _Storages:
    found = [storage for storage in map(_storage_of, tensors) if storage is not None]
    return {id(storage): weakref.ref(storage) for storage in found}


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


class _Pair:
    """Saved-tensor hooks of one block; `outer`, the enclosing pair, keeps tensors that are not offloaded."""

    activations_only = True
    """Inner hooks need not check for locations in parameter memory."""

    def __init__(self, offload: ActivationOffload, outer: tuple[Pack, Unpack] | None, stay: _Storages) -> None:
        self.offload = offload
        self._outer = outer
        self._owner = getattr(outer[0], "__self__", None) if outer is not None else None
        self._stay = stay
        saved_tensors_hooks(self.pack, self.unpack).__enter__()

    @never_compiled
    def end(self) -> None:
        """Remove the hooks, and inner hooks that an interruption has left active."""
        while (innermost := saved_hooks_in_force(True)) is not None:
            saved_tensors_hooks(*innermost).__exit__()
            if getattr(innermost[0], "__self__", None) is self:
                break

    def lets_go(self, tensor: torch.Tensor) -> bool:
        return self._owner is None or bool(self._owner.lets_go(tensor))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        if self.offload.moves(tensor, self._stay) and self.lets_go(tensor):
            return self.offload.move(tensor)
        if self._outer is not None:
            return _Handed(self._outer[0](tensor))
        # Detached, because a node holding its own output would never be freed.
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
    """Active blocks of a thread; None for blocks without effect."""

    def __init__(self) -> None:
        self.pairs: list[_Pair | None] = []


class _Handed(NamedTuple):
    content: Any


class _Lane:
    def __init__(self, device: torch.device, keep_buffers: bool | None) -> None:
        self.device = device
        self.out = staging.copy_stream(device)
        self.back = staging.copy_stream(device)
        self.pool = HostPool(self.out, keep_buffers)


class _Moved:
    """Bytes `[start, stop)` of one storage on the host, and on the device while a group near the pass holds them."""

    def __init__(self, offload: ActivationOffload, lane: _Lane, tensor: torch.Tensor, start: int, stop: int) -> None:
        self._offload = offload
        self._lane = lane
        self._storage = weakref.ref(tensor.untyped_storage())
        self._counter = version_counter(tensor)
        self._version = tensor._version
        self.start = start
        self.size = stop - start
        self.holds = 0
        """Number of groups near the pass that hold the range."""
        self._arrived: Copied | None = None
        self._copied: Copied | None = None
        self._near: torch.Tensor | None = None
        self._memory = lane.pool.take(self.size, real=has_values(tensor))
        if offload.accountant is not None:
            offload.accountant.hold(Category.ACTIVATIONS, self._memory.bytes, Tier.HOST)
        self._values = self._memory.bytes[: self.size]
        near = self.stay_near(tensor)
        lane.out.follow()
        lane.out.copy(self._values, near)
        self._copied = lane.out.mark()

    def has(self, storage: torch.UntypedStorage, tensor: torch.Tensor, start: int, stop: int, alignment: int) -> bool:
        """Return True if the bytes are here with the current values of `tensor`, by its version counter.

        Because tensors of one storage may have separate version counters, the counter must be the same.
        """
        if self._storage() is not storage or self.start % alignment or self.size % alignment:
            return False
        inside = self.start <= start and stop <= self.start + self.size
        return inside and tensor._version == self._version and share_version_counter(self._counter, tensor)

    def stay_near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep the device memory of a tensor just saved until no group holds it; return its bytes."""
        if self._near is not None:
            return self._near
        size = tensor.element_size()
        flat = tensor.detach().as_strided((self.size // size,), (1,), self.start // size)
        return self._set_near(flat.view(torch.uint8))

    def bring(self) -> torch.Tensor:
        """Start the copy back to the device, unless done; return its target."""
        near = self._near
        if near is None:
            assert self._copied is not None
            lane = self._lane
            near = torch.empty(self.size, dtype=torch.uint8, device=lane.device)
            lane.back.follow()  # after earlier uses of this memory
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
        return self.size if self._near is None else 0

    def use(self) -> torch.Tensor:
        """Return the bytes, which the current stream may read from now on."""
        near = self.bring()
        if self._arrived is not None:
            self._arrived.wait()
        self._lane.out.show(near)
        return near

    def leave(self) -> None:
        """Free the device memory after its copies, unless a group holds it."""
        if self._near is not None and not self.holds:
            # Memory returns to its owner stream, which must wait for the copies from and to it.
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
                # Host buffers are reused by copies out, which must wait for the last copy back.
                if self._arrived is not None:
                    self._lane.out.come_behind(self._arrived)
                self._memory.used(self._arrived or self._copied)
                self._lane.pool.give_back(self._memory)


class _Group:
    """The offloaded tensors of one graph node (thread and number of the next node); it lives as long as the node."""

    def __init__(self, offload: ActivationOffload, number: int, node: tuple[int, int], before: _Group | None) -> None:
        self._offload = offload
        self.number = number
        self.node = node
        self.near = False
        self._members: list[weakref.ref[_Moved]] = []
        self._pair = self._size = 0
        self.room = 0
        """Maximum bytes of two consecutive groups, up to this one."""
        self.before: _Weak = _none
        self._after: _Weak = _none
        if before is not None:
            self.before, before._after = weakref.ref(before), weakref.ref(self)
            self._pair, self.room = before._size, before.room

    def _moved(self) -> list[_Moved]:
        return [moved for moved in (member() for member in self._members) if moved is not None]

    def add(self, moved: _Moved) -> None:
        if moved in self._moved():
            return
        before = self.before()
        self._members.append(weakref.ref(moved))
        self._size += moved.size
        if before is None or moved not in before._moved():
            self._pair += moved.size
        self.room = max(self.room, self._pair)
        if self.near:
            moved.holds += 1

    def missing(self) -> int:
        return sum(moved.missing for moved in self._moved())

    def hold(self) -> None:
        if not self.near:
            self.near = True
            self._offload._window[self.number] = self
            for moved in self._moved():
                moved.holds += 1
                moved.bring()

    def let_go(self) -> None:
        if self.near:
            self.near = False
            self._offload._window.pop(self.number, None)
            for moved in self._moved():
                moved.holds -= 1
                moved.leave()

    def __del__(self) -> None:
        with self._offload._lock:
            self.let_go()
            before, after = self.before(), self._after()
            if before is not None:
                before._after = self._after
            if after is not None:
                after.before = self.before
            if self._offload._last() in (None, self):
                self._offload._last = self.before


_Weak = Callable[[], "_Group | None"]
"""A weak reference to a group."""


def _none() -> None:
    """Reference to no group."""


class _Saved:
    __slots__ = ("_view", "counter", "group", "moved", "version")

    def __init__(self, moved: _Moved, group: _Group, tensor: torch.Tensor) -> None:
        self.moved = moved
        self.group = group
        self.counter = version_counter(tensor)
        self.version = tensor._version
        offset = int(tensor.storage_offset()) - moved.start // tensor.element_size()
        self._view = tensor.dtype, tensor.size(), tensor.stride(), offset

    def tensor(self) -> torch.Tensor:
        dtype, size, stride, offset = self._view
        return self.moved.use().view(dtype).as_strided(size, stride, offset)
