"""Memory of the host that stays: its size, what locks it, and when it is let go; without a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.snapshot import Snapshot
from shardwise.device import hostmemory
from shardwise.device.hostmemory import HostMemory, HostPool
from shardwise.device.staging import Copied, CopyStream
from shardwise.offload.host import HostPlace


class Mark:
    """A place that a device gets to when somebody waits for it."""

    def __init__(self, log: list[Any], name: str, there: bool = False) -> None:
        self.log, self.name, self.there = log, name, there

    def wait(self) -> None:
        self.log.append(f"stream waits for {self.name}")

    def reached(self) -> bool:
        return self.there


class Device(CopyStream):
    """Copies of a CUDA device that is not there."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(torch.device("cpu"))
        self.device = torch.device("cuda", 0)
        self.log = log

    def host_bytes(self, size: int) -> torch.Tensor:
        self.log.append(f"torch {size}")
        return torch.empty(size, dtype=torch.uint8)

    def place(self, name: str, there: bool = False) -> Copied:
        return Copied(self, Mark(self.log, name, there))  # type: ignore[arg-type]

    def block(self, mark: Mark, limit: Any) -> bool:
        self.log.append(f"host waits for {mark.name}")
        return True


def test_a_plan_takes_none(log: list[Any]) -> None:
    with mock.patch("shardwise.offload.host.copy_stream", lambda device: Device(log)):
        home = HostPlace(torch.device("cuda", 0))
    with FakeTensorMode():
        kept = home.keep(torch.zeros(1 << 40, dtype=torch.uint8))
        assert kept.in_place().numel() == 1 << 40
    assert log == []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made: list[Any] = []
    monkeypatch.setattr(hostmemory, "pin", lambda device, address, size: made.append(("pin", size)) or True)
    monkeypatch.setattr(hostmemory, "unpin", lambda device, address: made.append("unpin"))
    yield made


@pytest.mark.parametrize("size", [1, 5000, (2 << 20) + 1])
def test_it_is_as_large_as_was_asked_for(log: list[Any], size: int) -> None:
    # torch's own would be 8192 bytes and 4 MiB.
    memory = HostMemory(Device(log), size)
    assert memory.bytes.numel() == memory.bytes.untyped_storage().nbytes() == size
    memory.bytes.fill_(7)
    assert log == [("pin", size)]


def test_it_is_let_go_when_copies_are_made(log: list[Any]) -> None:
    device = Device(log)
    memory = HostMemory(device, 10)
    memory.used(device.place("first", there=True))
    memory.used(device.place("second"))
    memory.used(device.place("third"))
    view = memory.bytes[3:]
    del memory
    assert log == [("pin", 10), "host waits for second", "host waits for third", "unpin"]
    view.fill_(1)  # it is ordinary memory now, as long as somebody has it


def test_where_it_cannot_be_locked_it_is_torchs(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "pin", lambda device, address, size: False)
    device = Device(log)
    memory = HostMemory(device, 10)
    memory.used(device.place("first"))
    del memory
    assert log == ["torch 10"]


def test_a_place_on_the_host_keeps_no_more_than_the_values(log: list[Any]) -> None:
    with mock.patch("shardwise.offload.host.copy_stream", lambda device: Device(log)):
        home = HostPlace(torch.device("cuda", 0))
    tensor = torch.arange(3000.0)
    kept = home.keep(tensor)
    kept.give_back(written=True)
    assert tensor.untyped_storage().nbytes() == 0
    assert kept.in_place().untyped_storage().nbytes() == 12000
    kept.start(read=True)
    kept.finish()
    assert torch.equal(tensor, torch.arange(3000.0))
    out = torch.zeros(3000)
    kept.copy_to(out)
    assert torch.equal(out, torch.arange(3000.0))
    del kept
    assert log[-1] == "unpin"


def test_a_pool_has_no_more_than_was_in_use_at_one_time(log: list[Any]) -> None:
    pool = HostPool(Device(log))

    def used(*sizes: int) -> list[Any]:
        """What pinning there is in a pass that takes blocks of these sizes."""
        log.clear()
        for memory in [pool.take(size) for size in sizes]:
            pool.give_back(memory)
        del memory
        return list(log)

    assert used(100, 100) == [("pin", 100), ("pin", 100)]
    assert used(100, 100) == used(60, 60) == used(10, 10) == []  # larger blocks serve, as a new one would be too much
    assert used(400) == ["unpin", "unpin", ("pin", 400)]
    assert used(100, 100) == [("pin", 100)]  # one of the blocks is the large one
    assert used(400, 100) == []
    pool.close()
    assert log == ["unpin", "unpin"]


def test_a_snapshot_that_is_dropped_is_not_pinned_any_more(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.snapshot.copy_stream", lambda device: Device(log))
    snapshot = Snapshot(torch.device("cuda", 0))
    copies = snapshot.take({"a": torch.ones(3)})
    (pinned,) = log
    assert pinned[0] == "pin" and pinned[1] >= 12
    del snapshot
    assert log[-1] == "unpin"
    assert torch.equal(copies["a"], torch.ones(3))  # a thread may still read them
