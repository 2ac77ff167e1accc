"""Memory of the host that stays: its size, what locks it, and when it is let go; without a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.async_save import Snapshot
from shardwise.device import hostmemory
from shardwise.device.hostmemory import HostMemory, HostPool
from shardwise.device.staging import Copied, CopyStream
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.moved import MovedTensors
from shardwise.memory.places import TieredTensors, in_turn
from shardwise.offload import DiskPlace, Disks
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


def test_offloaded_states_take_their_own_bytes_and_the_same_memory_again(log: list[Any]) -> None:
    with mock.patch("shardwise.memory.moved.copy_stream", lambda device: Device(log)):
        moved = MovedTensors(torch.device("cuda", 0), Accountant())
    tensors = [torch.arange(3000.0), torch.ones(700)]
    for _ in range(2):
        for tensor in tensors:
            moved.put(tensor)
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        moved.bring()
        assert torch.equal(tensors[0], torch.arange(3000.0)) and torch.equal(tensors[1], torch.ones(700))
    assert log == [("pin", 12000), ("pin", 2800)]  # torch's own would be 16384 and 4096 bytes
    moved.pinned = False
    moved.put(tensors[0])
    moved.bring()
    del moved
    assert log[2:] == ["unpin", "unpin"]


class Gated(Device):
    """Copies that end when `gate` is set."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(log)
        self.gate = threading.Event()
        self.gate.set()

    def mark_current(self) -> Copied:
        return self.place("a copy", there=self.gate.is_set())

    def block(self, mark: Mark, limit: Any) -> bool:
        return mark.there or self.gate.wait(30)


@contextlib.contextmanager
def on_disk(device: Device, directory: Path, accountant: Accountant) -> Iterator[DiskPlace]:
    """A disk tier of tensors that are used on a device."""
    with (
        mock.patch("shardwise.offload.disk.copy_stream", lambda _: device),
        mock.patch("shardwise.offload.disk.is_far", lambda _: True),
    ):
        home = Disks(accountant=accountant).place(directory, torch.device("cpu"), None)
    yield home
    home.close()


def test_tensors_between_a_device_and_a_disk_pass_through_what_is_counted(log: list[Any], tmp_path: Path) -> None:
    """torch's own memory would be 16384 bytes each time, and would stay with torch."""
    accountant, device = Accountant(), Device(log)
    with on_disk(device, tmp_path, accountant) as home:
        parts = [(TieredTensors(home, accountant), torch.full((3000,), float(number))) for number in range(5)]
        for tiered, tensor in parts:
            tiered.keep(Category.OPTIMIZER, tensor)
        for _ in range(3):
            in_turn([(part, [(part[0], True)]) for part in parts], lambda part: part[1].add_(1))
            pinned = 12000 * (log.count(("pin", 12000)) - log.count("unpin"))
            assert accountant.live_in(Tier.HOST)[Category.BUFFERS] == pinned
        assert set(log) == {("pin", 12000)} and len(log) <= 4  # the next is read while two are written
        assert [float(tiered.read(tensor)[-1]) for tiered, tensor in parts] == [3, 4, 5, 6, 7]
        for tiered, _ in parts:
            tiered.clear()
    assert accountant.live_in(Tier.HOST)[Category.BUFFERS] == 0


def test_a_disk_is_not_read_into_memory_that_a_device_still_copies(log: list[Any], tmp_path: Path) -> None:
    device, out = Gated(log), torch.zeros(3000)
    with on_disk(device, tmp_path, Accountant()) as home:
        tensors = [torch.full((3000,), float(number)) for number in (1, 2)]
        first, second = (home.keep(tensor) for tensor in tensors)
        for kept in (first, second):
            kept.give_back(written=True)
            kept.settle()
        device.gate.clear()
        first.look_ahead()
        first.copy_to(out)
        second.look_ahead()  # into the same memory
        assert second._read is not None
        assert log.count(("pin", 12000)) == 1 and not second._read.transfer._ended.wait(0.2)
        device.gate.set()
        second.copy_to(out)
        assert out.tolist() == [2.0] * 3000


def test_a_snapshot_that_is_dropped_is_not_pinned_any_more(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.async_save.copy_stream", lambda device: Device(log))
    snapshot = Snapshot(torch.device("cuda", 0))
    copies = snapshot.take({"a": torch.ones(3)})
    (pinned,) = log
    assert pinned[0] == "pin" and pinned[1] >= 12
    del snapshot
    assert log[-1] == "unpin"
    assert torch.equal(copies["a"], torch.ones(3))  # a thread may still read them


def test_a_pool_s_memory_can_be_written_after_inference_mode() -> None:
    pool = HostPool(CopyStream(torch.device("cpu")), keep=True)
    with torch.inference_mode():
        memory = pool.take(3)
    assert memory.bytes.fill_(1).tolist() == [1] * 3
