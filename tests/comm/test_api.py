"""Collectives of scripts: what they take, and what the communication log learns of them."""

from __future__ import annotations

import _thread
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.comm import api
from shardwise.comm.desync import Position, compare_calls
from shardwise.comm.ledger import follow_devices
from shardwise.comm.logger import comms_logger
from shardwise.comm.rank_status import Here
from shardwise.compat import launched_of
from shardwise.device.streams import HostStreams, overrides
from shardwise.errors import UsageError
from tests.harness import on_ranks, run_ranks

BLOCKING = ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all_single", "gather", "send", "barrier")


def test_arguments_about_the_log_are_spelled_out() -> None:
    for name in BLOCKING:
        collective = getattr(api, name)
        parameters = inspect.signature(collective).parameters
        keywords = [(n, p.default) for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        assert keywords == [("prof", False), ("log_name", None), ("debug", None)], name
        assert get_type_hints(collective)["log_name"] == str | None and collective.__doc__, name


def test_the_second_access_to_a_collective_is_a_plain_lookup() -> None:
    assert shardwise.comm.barrier is vars(shardwise.comm)["barrier"]


def test_without_a_process_group() -> None:
    assert api.barrier() is None
    with pytest.raises(UsageError, match=r"shardwise\.comm\.all_reduce: .*init_distributed"):
        api.all_reduce(torch.ones(2))


@on_ranks(2)
def test_calls_are_recorded_with_their_bytes() -> None:
    value = torch.full((4,), float(api.get_rank() + 1))
    api.all_reduce(value, prof=True)
    api.all_reduce(torch.ones(1))  # not asked for
    work = api.all_reduce(tensor=torch.ones(8), async_op=True, prof=True, log_name="mine")
    assert not comms_logger.has_data() or "mine" not in comms_logger.comms_dict
    work.wait()
    work.wait()
    parts = [torch.zeros(2) for _ in range(2)]
    api.all_gather(parts, value[:2].contiguous(), prof=True)
    if api.get_rank() == 0:
        api.isend(torch.ones(3), 1, prof=True).wait()
    else:
        api.irecv(torch.ones(3), 0, prof=True).wait()
    api.barrier(prof=True)
    api.broadcast_object_list([1], 0)
    records = {
        name: {size: entry[0] for size, entry in sizes.items()} for name, sizes in comms_logger.comms_dict.items()
    }
    message = {"isend" if api.get_rank() == 0 else "irecv": {12: 1}}
    assert records == {"all_reduce": {16: 1}, "mine": {32: 1}, "all_gather": {16: 1}, "barrier": {0: 1}, **message}
    assert value.tolist() == [3.0] * 4


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_pool(work: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def as_on_device(work: Callable[[], Any]) -> None:
    """Run as a backward pass of a device does it: in a thread that Python has not started."""
    spaces: dict[str, Any] = {}
    exec(compile("def backward(ended):\n    ended.wait()\n", torch.autograd.graph.__file__, "exec"), spaces)
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    _thread.start_new_thread(run, ())
    spaces["backward"](ended)


def in_nothing(work: Callable[[], Any]) -> None:
    """Another thread waits, and this one does not wait for it."""
    threading.Thread(target=work, daemon=True).start()
    queue: Queue[None] = Queue()
    with contextlib.suppress(Empty):
        queue.get(timeout=0.4)


PLACES: dict[str, Callable[[Callable[[], Any]], None]] = {
    "thread": in_thread,
    "pool": in_pool,
    "device": as_on_device,
    "nothing": in_nothing,
}


def where_a_rank_waits(call: str) -> list[str]:
    """What rank 0 is said to be in while rank 1 comes late."""
    tensor, seen = torch.ones(3), list[Position]()
    here = Here(thread=threading.get_ident())
    compare_calls(False)  # an engine may have switched it on
    late = threading.Timer(0.2, lambda: seen.append(here()))
    if api.get_rank():
        time.sleep(0.6)
    else:
        late.start()
    if call == "forward":
        layer = torch.nn.Identity()
        layer.register_forward_hook(lambda *_: torch.distributed.broadcast(tensor, 1))
        layer(tensor)
    elif call == "work":
        api.all_reduce(tensor, api.ReduceOp.MAX, async_op=True).wait()
    elif call == "torch's work":
        works = [torch.distributed.all_reduce(tensor, async_op=True)]
        for work in works:
            work.wait()
    elif call in PLACES:
        PLACES[call](lambda: torch.distributed.all_reduce(tensor))
    elif api.get_rank():
        api.send(tensor, 0)
    else:
        api.recv(tensor, 1)
    if api.get_rank() == 0:
        late.join()
    api.barrier()
    return [f"{place.what}|{place.size}|{place.line.partition('tests')[2]}" for place in seen]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("forward", "torch.distributed.broadcast(src=1)|12|"),
        ("work", "torch.distributed.all_reduce(op=MAX)|12|"),
        ("torch's work", "torch.distributed.Work.wait()|0|"),
        ("recv", "torch.distributed.recv(src=1)|0|"),
        ("thread", "torch.distributed.all_reduce()|12|"),
        ("pool", "torch.distributed.all_reduce()|12|"),
        ("device", "torch.distributed.all_reduce()|12|"),
        ("nothing", "|0|"),
    ],
)
def test_a_collective_of_torch_is_a_position_wherever_it_is_called(call: str, said: str) -> None:
    found = run_ranks(where_a_rank_waits, 2, call)[0]
    assert len(found) == 1 and found[0].startswith(said) and (call == "nothing" or "test_api.py:" in found[0]), found


@on_ranks(2)
def test_an_asynchronous_collective_that_a_rank_has_launched_may_end() -> None:
    """Rank 1 has launched a collective that rank 0 waits for, and has gone on."""
    compare_calls(False)
    work = api.all_reduce(torch.ones(3), async_op=True)
    here, default = Here(), torch.distributed.group.WORLD
    assert default is not None
    waits = Position("torch.distributed.all_reduce()", kind=f"torch/{default.group_name}")
    turn = launched_of(default)
    found = [here.launched_in_torch(waits.kind, turn + later, Position()) for later in (0, 1)]
    found += [here.launched_in_torch(waits.kind, turn, waits), here.launched_in_torch(waits.kind, -1, Position())]
    found += [here.launched_in_torch("torch/unknown", turn, Position()), here.launched_in_torch("x", turn, Position())]
    work.wait()
    assert found == [True, False, False, False, False, False]


class _Event:
    there = False

    def wait(self) -> None: ...

    def reached(self) -> bool:
        return self.there


class _Streams(HostStreams):
    def __init__(self) -> None:
        self.marks: list[_Event] = []

    def mark(self) -> _Event:
        self.marks.append(_Event())
        return self.marks[-1]


class _Work:
    def wait(self) -> None: ...


def _launch(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    return _Work() if async_op else None


@on_ranks(2)
def test_collectives_of_a_device_are_followed() -> None:
    """Where a rank is whose device, which the host does not wait for, has not ended a collective."""
    compare_calls(False)
    streams, given = _Streams(), torch.ones(3, device="meta")
    found, launched = [], torch.distributed.all_reduce
    torch.distributed.all_reduce = _launch
    follow_devices(True)
    try:
        with mock.patch.dict(overrides, {"meta": streams}):
            api.all_reduce(given)
            api.all_reduce(given, api.ReduceOp.MAX, async_op=True).wait()
        for mark in streams.marks:
            found.append(str(Here()()))
            mark.there = True
        found.append(str(Here()()))
    finally:
        torch.distributed.all_reduce = launched
        follow_devices(False)
    first, second, none = found
    assert first.startswith("waits in torch.distributed.all_reduce() for") and "test_api.py:" in first
    assert second.startswith("waits in torch.distributed.all_reduce(op=MAX) for")
    assert "waits in" not in none


def test_a_name_is_imported_at_its_first_use_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise import comm

    monkeypatch.delitem(vars(comm), "all_reduce", raising=False)
    found = comm.all_reduce
    assert vars(comm)["all_reduce"] is found
