"""Recording device: traces the streams, waits and memory uses that a GPU would have.

The engine runs as on a GPU, on CPU tensors of any size. Each kernel, collective, wait, allocation and release becomes
an event of a trace. Because each operation runs at once, results do not reveal missing waits; the trace does
(`tests.device.checking`). One process records one of several simulated ranks, in a process group of torch's "fake"
backend: collectives return the result for equal values on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from shardwise.comm import native
from shardwise.compat import launch_together
from shardwise.device.streams import Mark, Stream, Streams, overrides

WAITING = frozenset(
    {
        "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "multinomial", "nonzero",
        "nonzero_numpy", "unique_consecutive", "unique_dim",
    }
)  # fmt: skip
"""Operators that block the host for their result on a CUDA device; see also `waits`."""

_READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
"""Methods that copy values to the host unseen by a dispatch mode."""

STREAMS = 32
"""Number of streams in torch's pool of each priority, assigned round-robin."""

COMPUTE = "compute"
"""Default stream of a thread."""


@dataclass(frozen=True)
class Span:
    """A range of bytes of one allocation."""

    memory: int
    start: int
    stop: int


@dataclass(frozen=True)
class Event:
    """One action of the host; `name`: operation, or annotation with further `numbers`.

    `kind` is "kernel" or "collective" (launched on a stream); "mark" (a CUDA event recorded on a stream), "wait" (of a
    stream, for a mark), "arrive" (of a stream, for a collective), "block" (of the host, for a mark), "poll" (of a mark
    by the host) and "read" (of the host, for all of a stream); "take" and "give" (allocation and release of memory, on
    its owner stream); "say" (an annotation for the checker). `number` is of a mark, of a collective (in the order of
    its group), or of an allocation.
    """

    kind: str
    name: str = ""
    stream: str = ""
    number: int = -1
    group: str = ""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    numbers: tuple[int, ...] = ()


@dataclass
class Trace:
    """The recorded actions of one rank in host order, and the bytes of each allocation."""

    events: list[Event] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)


class _RecordedMark:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    @property
    def number(self) -> int:
        return self._number

    def wait(self) -> None:
        self._recorder.add(Event("wait", stream=self._recorder.stream, number=self._number))

    def reached(self) -> bool:
        self._recorder.add(Event("poll", number=self._number))
        return False  # because the simulated host is always ahead of the device


class _RecordedStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def use(self) -> AbstractContextManager[None]:
        return self._recorder.using(self._name)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _RecordedMark)
        self._recorder.add(Event("wait", stream=self._name, number=mark.number))


class _Launched:
    """A recorded collective, on a stream of its group as in NCCL. It keeps its outputs alive, as NCCL does."""

    def __init__(self, recorder: Recorder, event: Event, outputs: Sequence[torch.Tensor]) -> None:
        self._recorder, self._event, self._outputs = recorder, event, outputs

    def wait(self) -> None:
        self._recorder.add(
            Event("arrive", stream=self._recorder.stream, number=self._event.number, group=self._event.group)
        )


class Recorder(Streams):
    """The streams of a recorded device, and its trace; `kept`: `id` of storages with a release outside of the trace."""

    beside = True

    def __init__(self) -> None:
        self.trace = Trace()
        self._numbers = itertools.count()
        self._names: dict[str, int] = {}
        self._made: dict[bool, list[Stream]] = {True: [], False: []}
        self._hosts = itertools.count()
        self._counts: dict[str, int] = {}
        self._memory: dict[int, tuple[int, int, int, str]] = {}  # number, address, bytes and stream, by storage
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._local = threading.local()
        self._lock = threading.RLock()
        self._silent = False
        self._host = threading.get_ident()
        self.kept: set[int] = set()

    # -- streams -----------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> str:
        """The current stream of this thread."""
        return getattr(self._local, "stream", COMPUTE)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Launch and allocate on a stream inside the block."""
        before, self._local.stream = self.stream, name
        try:
            yield
        finally:
            self._local.stream = before

    @override
    def make(self, name: str, *, urgent: bool = True) -> Stream:
        made = self._made[urgent]
        if len(made) >= STREAMS:
            made.append(made[len(made) - STREAMS])
            return made[-1]
        self._names[name] = self._names.get(name, 0) + 1
        made.append(_RecordedStream(self, name if self._names[name] == 1 else f"{name}.{self._names[name]}"))
        return made[-1]

    def on_host(self) -> AbstractContextManager[None]:
        """Allocate host memory inside the block; each block counts as a stream of its own."""
        return self.using(f"host.{next(self._hosts)}")

    @override
    def current(self) -> Stream:
        return _RecordedStream(self, self.stream)

    @override
    def mark(self) -> Mark:
        number = next(self._numbers)
        self.add(Event("mark", stream=self.stream, number=number))
        return _RecordedMark(self, number)

    @override
    def block(self, mark: Mark, limit: timedelta) -> bool:
        del limit
        assert isinstance(mark, _RecordedMark)
        if threading.get_ident() == self._host:  # a thread of a disk orders nothing that the host does
            self.add(Event("block", number=mark.number))
        return True

    def keep(self, tensor: torch.Tensor) -> None:
        """Exclude the release of a tensor's memory from the trace."""
        self.kept.add(id(tensor.untyped_storage()))

    # -- events ------------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """Append an event to the trace."""
        if not self._silent:
            with self._lock:
                self.trace.events.append(event)

    def say(self, what: str, *numbers: int, stream: str = "") -> None:
        """Append an annotation to the trace."""
        self.add(Event("say", what, stream, numbers=numbers))

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Suspend recording inside the block."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def kernel(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Record a kernel launch on the current stream."""
        spans = tuple(self.span(t) for t in reads), tuple(self.span(t) for t in writes)
        self.add(Event("kernel", name, self.stream, reads=spans[0], writes=spans[1]))

    def collective(
        self, name: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: str, run: Callable[[], Any]
    ) -> _Launched:
        """Record the launch of a collective on (output, input) pairs; `run` computes its results.

        The n-th collective of a process group matches the n-th of the other ranks.
        """
        self._counts[group] = self._counts.get(group, -1) + 1
        writes, reads = tuple(self.span(o) for o, _ in pairs), tuple(self.span(i) for _, i in pairs)
        event = Event("collective", name, self.stream, self._counts[group], group, reads, writes)
        self.add(event)
        with self.silent():
            run()
        return _Launched(self, event, [out for out, _ in pairs])

    # -- memory ------------------------------------------------------------------------------------------------------

    def span(self, tensor: torch.Tensor) -> Span:
        """Return the bytes from a tensor's first element to its last."""
        number = self._number_of(tensor.untyped_storage())
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(number, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor counts as device memory, that is, if it was not allocated in `on_host`."""
        if tensor.layout is not torch.strided:
            return True
        known = self._memory.get(id(tensor.untyped_storage()))
        return known is None or not known[3].startswith("host.")

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        key, place = id(storage), (storage.data_ptr(), storage.nbytes())
        known = self._memory.get(key)
        if known is not None and known[1:3] == place:
            return known[0]
        if known is not None:
            self._gone(key)  # a resize releases the memory and allocates anew
        number = next(self._numbers)
        self._memory[key] = (number, *place, self.stream)
        self.trace.sizes[number] = storage.nbytes()
        self._deaths[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.add(Event("take", stream=self.stream, number=number))
        return number

    def _gone(self, key: int) -> None:
        known = self._memory.pop(key, None)
        self._deaths.pop(key, None)
        if key in self.kept:
            self.kept.discard(key)
        elif known is not None:
            with self._lock:
                self.trace.events.append(Event("give", stream=known[3], number=known[0]))


class _Kernels(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        recorder = self._recorder
        if recorder._silent or func.is_view:
            return result
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        known: set[int] = set()
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given):
                known.add(id(tensor.untyped_storage()))
                (writes if written else reads).append(tensor)
        made = [t for t in _tensors(result) if id(t.untyped_storage()) not in known]
        name = func._schema.name.removeprefix("aten::")
        if waits(func, args, kwargs) and any(recorder.on_device(tensor) for tensor in _tensors(list(args))):
            recorder.add(Event("read", name, recorder.stream))
        if name == "_local_scalar_dense":
            return result
        if name.removeprefix("new_").startswith("empty"):
            for tensor in made:
                recorder.span(tensor)  # allocated, not used
        elif writes or made:
            recorder.kernel(name, reads, [*writes, *made])
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING and self._recorder.on_device(args[0]):
            self._recorder.add(Event("read", func.__name__, self._recorder.stream))
        return func(*args, **(kwargs or {}))


def waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if the host waits for an operator on a CUDA device, because the result's shape depends on values."""
    name = func._schema.name.removeprefix("aten::")
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    indices = [t for t in _tensors(list(args[1:2])) if t.dtype in (torch.bool, torch.uint8)]
    return name in WAITING or (name in ("index", "index_put", "index_put_", "_index_put_impl_") and bool(indices))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def name_of(group: str, ranks: Sequence[int]) -> str:
    """Return the recorded name of a process group."""
    return f"{group}@{','.join(map(str, ranks))}"


_current: Recorder | None = None


def current() -> Recorder | None:
    """Return the active recorder, or None."""
    return _current


def _launched(
    op: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup, *, async_op: bool
) -> list[Any]:
    """Record the launch of `op(output, input)` for each pair, in place of `shardwise.compat.launch_together`."""
    recorder = current()
    if recorder is None or not pairs:
        return launch_together(op, pairs, group, async_op=async_op)
    name = f"{getattr(op, '__name__', 'exchange')} {[own.nbytes for _, own in pairs]}"

    def run() -> None:
        for out, own in pairs:
            # As if all ranks had the same values; sums are not formed, because they would grow without end.
            if own.numel():
                parts = max(1, -(-out.numel() // own.numel()))
                out.copy_(own.repeat(parts)[: out.numel()].view_as(out))
            else:
                out.zero_()

    members = name_of(group.group_name, dist.get_process_group_ranks(group))
    return [recorder.collective(name, pairs, members, run)]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record the operations inside the block; CPU tensors count as device tensors."""
    global _current
    recorder = Recorder()
    launches = mock.patch.object(native, "launch_together", _launched)
    with launches, mock.patch.dict(overrides, {"cpu": recorder}), _Kernels(recorder), _Reads(recorder):
        _current = recorder
        try:
            yield recorder
        finally:
            _current = None
