"""Two ranks on one device, with collectives as NCCL's: the device waits for them, and the host goes on.

A collective is launched as an event of the current stream and a job for a thread of its group. When the event has
come, the thread copies what is sent to the host, exchanges it there over Gloo after a delay, copies back what has
arrived, and writes the job's number into a word of pinned memory. `wait()` has the current stream wait until the
word has that number (`cuStreamWaitValue32`). In a rehearsal the host waits, and the engine knows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardwise.comm import communicator, groups, native
from tests.gpu import standin
from tests.gpu.standin import rehearsing

LONGEST_S = 0.02
"""Delay of a collective at most."""

_GREATER_OR_EQUAL = 0
_LIMIT_S = 25.0


@functools.cache
def _stream_wait() -> Callable[[int, int, int], int]:
    """The driver's function; the one without a version needs an option of the kernel module."""
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return lambda stream, address, number: int(wait(stream, address, number, _GREATER_OR_EQUAL))


class Word:
    """A number of the host that only grows, for which streams can wait."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._changed = threading.Condition()

    @property
    def number(self) -> int:
        return int(self._memory[0])

    def set(self, number: int) -> None:
        with self._changed:
            self._memory[0] = number
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Let the host go on only when the word has got to a number."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.number >= number, _LIMIT_S), "a collective has not ended"

    def hold_up(self, number: int) -> None:
        """Let the current stream go on only then."""
        result = _stream_wait()(torch.cuda.current_stream().cuda_stream, self._memory.data_ptr(), number)
        assert result == 0, f"cuStreamWaitValue32: CUDA error {result}"


class _Job:
    def __init__(self, queue: _Queue, number: int) -> None:
        self._queue, self._number = queue, number

    def wait(self) -> None:
        if rehearsing():
            self._queue.word.wait(self._number)
        else:
            self._queue.word.hold_up(self._number)

    def is_completed(self) -> bool:
        return self._queue.word.number >= self._number


class _Queue:
    """The collectives of a group, one after the other."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self.word = Word()
        self.error: BaseException | None = None
        self._group, self._random = group, random.Random(seed)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._count, self._lock = 0, threading.Lock()
        self._stream = torch.cuda.Stream()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def launch(self, op: Callable[..., Any], pairs: Sequence[native.Pair]) -> _Job:
        event = torch.cuda.current_stream().record_event()
        with self._lock:
            self._count += 1
            self._jobs.put((op, list(pairs), event, self._count))
            return _Job(self, self._count)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(_LIMIT_S)

    def _work(self) -> None:
        torch.cuda.set_device(0)
        while (job := self._jobs.get()) is not None:
            op, pairs, event, number = job
            try:
                event.synchronize()
                time.sleep(self._random.uniform(0.0, LONGEST_S))
                with torch.cuda.stream(self._stream):
                    for out, own in pairs:
                        self._exchange(op, out, own)
                self._stream.synchronize()
            except BaseException as error:
                self.error = error
            self.word.set(number)  # also if it has failed: nobody must wait for ever

    def _exchange(self, op: Callable[..., Any], out: torch.Tensor, own: torch.Tensor) -> None:
        sent = own.detach().cpu()
        arrived = sent if out is own else torch.empty(out.shape, dtype=out.dtype, device="cpu")
        op(arrived, sent, group=self._group, async_op=True).wait()
        out.copy_(arrived)


@contextlib.contextmanager
def staged(*, rehearse: bool) -> Iterator[None]:
    """Have engines of this process, one of two on the same device, communicate so.

    Args:
        rehearse: whether there is no device.
    """
    if rehearse:
        standin.install()
    queues: dict[str, _Queue] = {}
    new_group = groups.new_group

    def on_gloo(ranks: Any, timeout: Any, backend: str, device: Any, purpose: str) -> dist.ProcessGroup:
        return new_group(ranks, timeout, "gloo", device, purpose)

    def launch(
        op: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup, *, async_op: bool
    ) -> list[Any]:
        if not pairs:
            return []
        if group.group_name not in queues:
            queues[group.group_name] = _Queue(group, dist.get_rank() + 2 * len(queues))
        return [queues[group.group_name].launch(op, pairs)]

    with (
        mock.patch.object(communicator, "_backend", lambda *_: "staged"),
        mock.patch.object(groups, "new_group", on_gloo),
        mock.patch.object(native, "launch_together", launch),
        mock.patch.object(communicator.Communicator, "waits_on_host", rehearse),
    ):
        yield
        for made in queues.values():
            made.close()
    for made in queues.values():
        if made.error is not None:
            raise made.error
