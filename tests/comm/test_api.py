"""Collectives of scripts: what they take, and what the communication log learns of them."""

from __future__ import annotations

import inspect
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

from shardwise.comm import api
from shardwise.comm.desync import Position
from shardwise.comm.logger import CommsLogger, comms_logger
from shardwise.comm.rank_status import Here
from shardwise.comm.stragglers import Part
from shardwise.errors import ConfigError, UsageError
from tests.harness import on_ranks, thorough

BLOCKING = ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all_single", "gather", "send", "barrier")


def test_arguments_about_the_log_are_spelled_out() -> None:
    for name in BLOCKING:
        collective = getattr(api, name)
        parameters = inspect.signature(collective).parameters
        keywords = [(n, p.default) for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        assert keywords == [("prof", False), ("log_name", None), ("debug", None)], name
        assert get_type_hints(collective)["log_name"] == str | None and collective.__doc__, name


def test_without_a_process_group() -> None:
    assert api.barrier() is None
    with pytest.raises(UsageError, match=r"shardwise\.comm\.all_reduce: .*init_distributed"):
        api.all_reduce(torch.ones(2))


@on_ranks(2)
def test_calls_are_recorded_with_their_bytes() -> None:
    comms_logger.reset_data()
    value = torch.full((4,), float(api.get_rank() + 1))
    api.all_reduce(value, prof=True)
    api.all_reduce(torch.ones(1))  # not asked for
    work = api.all_reduce(tensor=torch.ones(8), async_op=True, prof=True, log_name="mine")
    assert not comms_logger.has_data() or "mine" not in comms_logger.comms_dict
    work.wait(timeout=timedelta(seconds=60))
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


def test_a_configuration_of_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommsLogger()
    monkeypatch.setattr(api, "comms_logger", log)
    api.configure({"train_batch_size": 1, "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["reduce"]}})
    assert (log.enabled, log.prof_all, log.prof_ops) == (True, False, ["reduce"])
    api.configure({"train_batch_size": 1}, verbose=True)
    assert log.enabled and log.verbose
    with pytest.raises(ConfigError):
        api.configure("missing.json")


def test_all_times_of_a_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommsLogger()
    monkeypatch.setattr(api, "comms_logger", log)
    for _ in range(3 * 4096):
        log.append("reduce", 8, 1.0, 2, requested=True)
    assert api.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"] == [3 * 4096 * 1e3]


def test_the_parts_that_ranks_compare_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part(str(turn), "reduce", turn, 0.0, turn) for turn in range(5)]
    monkeypatch.setattr(api, "comms_logger", SimpleNamespace(parts=lambda: parts))
    monkeypatch.setattr(api, "MOST_PARTS", 3)
    monkeypatch.setattr(api, "blame", lambda found, _: found)
    assert [part.key for part in api.straggler_summary()[0]] == ["2", "3", "4"]  # type: ignore[index]


@on_ranks(2)
def test_a_name_in_the_log_leaves_time_and_bandwidth() -> None:
    comms_logger.reset_data()
    called: list[str] = []
    reduce = torch.distributed.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_available", "is_initialized"):
            patch.setattr(torch.cuda, name, lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: called.append("wait"))
        stream = SimpleNamespace(synchronize=lambda: called.append("wait for the stream"))
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.distributed, "all_reduce", lambda *given: called.append("launch") or reduce(*given))
        for logged in (None, "mine"):
            api.all_reduce(torch.ones(4), prof=True, log_name=logged)
        api.all_reduce(torch.ones(4), async_op=True, prof=True, log_name="later").wait()
    # Work before a collective is no part of its time, and a collective that does not block waits for nothing.
    assert called == ["wait for the stream", "launch", "wait"] * 2 + ["launch"]
    for name in ("all_reduce", "mine"):
        _, (milliseconds,), (algorithm,), (bus,) = comms_logger.comms_dict[name][16]
        assert (algorithm, bus) == pytest.approx((2 * 16 * 8 / milliseconds / 1e6, 16 * 8 / milliseconds / 1e6))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("forward", "torch.distributed.broadcast(src=1)|12|"),
        thorough("work", "torch.distributed.all_reduce(op=MAX)|12|"),
        ("torch's work", "torch.distributed.Work.wait()|0|"),
        ("recv", "torch.distributed.recv(src=1)|12|"),
        ("thread", "torch.distributed.all_reduce()|12|"),
    ],
)
@on_ranks(2)
def test_a_collective_of_torch_is_a_position_wherever_it_is_called(call: str, said: str) -> None:
    """What rank 0 is said to be in while rank 1 comes late."""
    tensor, seen = torch.ones(3), list[Position]()
    here = Here(thread=threading.get_ident())
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
    elif call == "thread":
        thread = threading.Thread(target=lambda: torch.distributed.all_reduce(tensor))
        thread.start()
        thread.join()
    elif api.get_rank():
        api.send(tensor, 0)
    else:
        api.recv(tensor, 1)
    if api.get_rank() == 0:
        late.join()
        (place,) = seen
        assert f"{place.what}|{place.size}|" == said and "test_api.py:" in place.line
    api.barrier()
