"""State on a disk: what is read is what was written, and everything that can go wrong is told."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import OffloadError
from shardwise.offload import tmpfile
from shardwise.offload.files import DiskOptions, Extent, SwapFile
from shardwise.offload.tmpfile import ALIGNMENT, paged

BLOCK = 3 * ALIGNMENT
SMALL = DiskOptions(block_size=BLOCK, queue_depth=2, threads=2)
SIZES = [0, 1, 7, 8, 4095, 4096, 4097, BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 4099]


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmpfile, "_pass_by", lambda descriptor, wanted: False)


@pytest.fixture(params=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwapFile]:
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    opened = SwapFile(tmp_path, SMALL, label="rank 3's swap file")
    if request.param == "direct" and not opened.direct:
        opened.close()
        pytest.skip("the disk of temporary files cannot be read past the page cache")
    assert opened.direct is (request.param == "direct")
    yield opened
    opened.close()


def random(size: int, offset: int = 0) -> torch.Tensor:
    """Return random bytes that begin so many bytes behind a boundary."""
    return torch.randint(256, (size + offset,), dtype=torch.uint8)[offset:]


def back(file: SwapFile, extent: Extent, size: int) -> torch.Tensor:
    memory = torch.full((size,), 99, dtype=torch.uint8)
    file.read(extent, memory).wait()
    return memory


def descriptor(file: SwapFile) -> int:
    return file.threads.file.descriptor


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-disk")]


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (1, 1), (4097, 0), (5 * BLOCK + 4099, 1)])
def test_what_is_read_is_what_was_written(file: SwapFile, size: int, offset: int) -> None:
    beside = file.reserve(10)
    file.write(beside, torch.arange(10, dtype=torch.uint8)).wait()
    extent = file.reserve(size)
    assert extent.offset % ALIGNMENT == 0 and extent.size == size
    for _ in range(2):
        values = random(size, offset)
        transfer = file.write(extent, values)
        transfer.wait()
        assert transfer.done
        memory = torch.empty(size + offset, dtype=torch.uint8)[offset:]
        file.read(extent, memory).wait()
        assert torch.equal(memory, values)
    assert back(file, beside, 10).tolist() == list(range(10))
    assert (file.threads.bytes_written, file.threads.bytes_read) == (2 * size + 10, 2 * size + 10)


def test_much(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, DiskOptions(), label="it")
    values = torch.randint(2**62, ((64 << 20) // 8 + 1,)).view(torch.uint8)[:-3]
    extent = file.reserve(values.numel())
    file.write(extent, values)
    assert torch.equal(back(file, extent, values.numel()), values)
    file.close()


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["write", "read", "free"]), st.sampled_from(SIZES))))
def test_any_order_of_uses(steps: list[tuple[int, str, int]]) -> None:
    file = shared()
    extents: dict[int, tuple[Extent, torch.Tensor]] = {}
    reads = []
    for key, step, size in steps:
        if step == "write":
            if key not in extents or extents[key][0].size < size:
                if key in extents:
                    extents[key][0].free()
                extents[key] = file.reserve(size), random(0)
            extents[key] = extents[key][0], random(size, size % 3)
            file.write(*extents[key])
        elif key in extents and step == "read":
            memory = torch.empty_like(extents[key][1])
            reads.append((file.read(extents[key][0], memory), memory, extents[key][1]))
        elif key in extents:
            extents.pop(key)[0].free()
    places = sorted((extent.offset, extent.offset + extent.size) for extent, _ in extents.values() if extent.size)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    for transfer, memory, values in reads:
        transfer.wait()
        assert torch.equal(memory, values)
    for extent, values in extents.values():
        assert torch.equal(back(file, extent, values.numel()), values)
        extent.free()
    assert file.size == 0


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    SHARED.append(SwapFile(tmp_path_factory.mktemp("disk"), SMALL, label="it"))
    yield
    SHARED.pop().close()


SHARED: list[SwapFile] = []


def shared() -> SwapFile:
    return SHARED[0]


def test_space_is_used_again(file: SwapFile) -> None:
    first, second, third, last = (file.reserve(size * ALIGNMENT) for size in (3, 1, 2, 1))
    assert file.size == 7 * ALIGNMENT == os.fstat(descriptor(file)).st_size
    for extent in (first, third):
        extent.free()
        extent.free()
    assert file.size == 7 * ALIGNMENT
    assert file.reserve(2 * ALIGNMENT - 1).offset == third.offset  # it fits exactly
    assert file.reserve(1).offset == first.offset
    assert file.reserve(2 * ALIGNMENT).offset == ALIGNMENT
    last.free()
    assert file.size == 6 * ALIGNMENT == os.fstat(descriptor(file)).st_size
    with pytest.raises(ValueError, match="freed"):
        file.write(last, random(1))
    assert file.reserve(0).offset == 0
    second.free()
    assert file.reserve(2 * ALIGNMENT).offset == 6 * ALIGNMENT


def test_space_is_not_used_again_before_what_is_on_its_way_has_ended(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *arguments: time.sleep(0.05) or write(*arguments))
    extent = file.reserve(BLOCK)
    transfer = file.write(extent, random(BLOCK))
    extent.free()
    assert transfer.done


def failing(number: int) -> Callable[..., int]:
    def fail(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_is_found_when_space_is_taken(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file.reserve(1)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(OffloadError) as raised:
        file.reserve(10 * ALIGNMENT - 1)
    text = str(raised.value)
    assert text.startswith(f"rank 3's swap file in {tmp_path}: no space") and "nvme_path" in text
    assert f"{10 * ALIGNMENT} bytes more are needed" in text and "bytes are free" in text
    assert file.size == ALIGNMENT
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO))
    with pytest.raises(OffloadError, match=r"Input/output error$"):
        file.reserve(10)


def test_space_that_cannot_be_taken_beforehand(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    values = random(BLOCK + 1)
    extent = file.reserve(values.numel())
    file.write(extent, values)
    assert torch.equal(back(file, extent, values.numel()), values)
    monkeypatch.setattr(tmpfile, "disk_usage", lambda directory: SimpleNamespace(free=5))
    with pytest.raises(OffloadError, match=r"12288 bytes more are needed, 5 bytes are free"):
        file.reserve(BLOCK)


@pytest.mark.parametrize(("call", "number"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO)])
def test_a_disk_that_fails(
    file: SwapFile, call: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = random(6 * BLOCK)
    file.reserve(1)
    extent = file.reserve(values.numel())
    file.write(extent, values).wait()
    there = extent.offset + 2 * BLOCK
    moving, under_way = getattr(os, call), []

    def fail(where: int, memory: list[Any], place: int) -> int:
        if place == there:
            raise OSError(number, os.strerror(number))
        under_way.append(place)
        time.sleep(0.02)
        moved = moving(where, memory, place)
        under_way.pop()
        return moved

    monkeypatch.setattr(os, call, fail)
    transfer = (file.write if call == "pwritev" else file.read)(extent, values.clone())
    what = "writing" if call == "pwritev" else "reading"
    expected = f"rank 3's swap file in {tmp_path}: {what} {BLOCK} bytes at offset {there}: {os.strerror(number)}. Check"
    for _ in range(2):
        with pytest.raises(OffloadError) as raised:
            transfer.wait()
        assert str(raised.value).startswith(expected) and isinstance(raised.value.__cause__, OSError)
        assert not under_way  # nobody touches the memory any more
    monkeypatch.setattr(os, call, moving)
    if call == "pwritev":
        with pytest.raises(OffloadError, match="nothing has been written"):
            back(file, extent, values.numel())
        file.write(extent, values)
    assert torch.equal(back(file, extent, values.numel()), values)


def test_calls_that_move_only_a_part(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        moving = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda where, memory, place, moving=moving: moving(where, [memory[0][:512]], place)
        )
    values = random(2 * BLOCK + 513)
    extent = file.reserve(values.numel())
    file.write(extent, values)
    assert torch.equal(back(file, extent, values.numel()), values)
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with pytest.raises(OffloadError, match="only 0 were written"):
        file.write(extent, values).wait()


def test_a_file_that_was_cut_short(file: SwapFile) -> None:
    values = random(4 * BLOCK)
    extent = file.reserve(values.numel())
    file.write(extent, values).wait()
    os.ftruncate(descriptor(file), 2 * BLOCK + ALIGNMENT)
    with pytest.raises(OffloadError) as raised:
        back(file, extent, values.numel())
    assert "cut short" in str(raised.value) and f"of {BLOCK} bytes at offset" in str(raised.value)


@pytest.mark.parametrize("place", [BLOCK + 5000, 3 * BLOCK + 6])
def test_damage_is_found(file: SwapFile, place: int, tmp_path: Path) -> None:
    values = random(3 * BLOCK + 7)
    file.reserve(1)
    extent = file.reserve(values.numel())
    file.write(extent, values).wait()
    flip(file, extent.offset + place)
    start = place - place % BLOCK
    with pytest.raises(OffloadError) as raised:
        back(file, extent, values.numel())
    size = min(BLOCK, values.numel() - start)
    expected = f"rank 3's swap file in {tmp_path}: {size} bytes at offset {extent.offset + start} are damaged"
    assert str(raised.value).startswith(expected)
    flip(file, extent.offset + place)
    assert torch.equal(back(file, extent, values.numel()), values)


def flip(file: SwapFile, place: int) -> None:
    """Change one bit of a file, as nobody should."""
    start = place - place % ALIGNMENT
    page = paged(ALIGNMENT)
    os.preadv(descriptor(file), [page], start)
    page[place - start] ^= 16
    os.pwritev(descriptor(file), [page], start)


def test_the_file_has_no_name_and_is_nobody_elses(file: SwapFile, tmp_path: Path) -> None:
    file.write(file.reserve(100), random(100)).wait()
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(descriptor(file))
    assert found.st_mode & 0o777 == 0o600 and found.st_nlink == 0


def test_without_files_that_never_had_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, flag = os.open, os.O_TMPFILE

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & flag == flag:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    file = SwapFile(tmp_path / "a" / "b", SMALL, label="it")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert os.fstat(descriptor(file)).st_mode & 0o777 == 0o600
    values = random(50)
    extent = file.reserve(50)
    file.write(extent, values)
    assert torch.equal(back(file, extent, 50), values)
    file.close()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OffloadError, match=rf"^{directory}: no file for state.*nvme_path"):
            SwapFile(directory, SMALL, label="it")


def test_no_threads_before_the_first_and_none_after_the_last(tmp_path: Path) -> None:
    others = set(threads())
    file = SwapFile(tmp_path, SMALL, label="it")
    assert set(threads()) == others
    extent = file.reserve(10)
    file.write(extent, random(10)).wait()
    mine = set(threads()) - others
    assert len(mine) == SMALL.in_flight == 4 and all(thread.daemon for thread in mine)
    file.close()
    file.close()
    assert set(threads()) == others
    with pytest.raises(OSError):
        os.fstat(descriptor(file))
    for use in (lambda: file.read(extent, random(10)), lambda: file.reserve(1)):
        with pytest.raises(OffloadError, match=r"it in .*: it is closed"):
            use()
    extent.free()


def test_closing_ends_what_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *arguments: time.sleep(0.02) or write(*arguments))
    file = SwapFile(tmp_path, DiskOptions(BLOCK, 4), label="it")
    extent = file.reserve(100 * BLOCK)
    transfers = [file.write(extent, random(100 * BLOCK)) for _ in range(3)]
    transfers.append(file.write(extent, random(0)))
    file.close()
    for transfer in transfers:
        assert transfer.done
        with pytest.raises(OffloadError, match="closed before"):
            transfer.wait()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, torch; from pathlib import Path\n"
        "from shardwise.offload.files import DiskOptions, SwapFile\n"
        "file = SwapFile(Path(sys.argv[1]), DiskOptions(), label='it')\n"
        "extent = file.reserve(64 << 20)\n"
        "file.write(extent, torch.ones(64 << 20, dtype=torch.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_values_that_a_device_copies_first_are_written_after_that(file: SwapFile) -> None:
    """A thread waits for them, and a read waits for the write."""
    extent, memory, copied = file.reserve(3 * BLOCK), torch.zeros(3 * BLOCK, dtype=torch.uint8), threading.Event()

    def come() -> None:
        assert copied.wait(60)

    writing = file.write(extent, memory, come)
    read = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    reading = file.read(extent, read)
    other = file.reserve(100)
    file.write(other, memory[:100]).wait()  # others are not held up
    assert not writing.done and not reading.done
    memory.fill_(7)
    copied.set()
    reading.wait()
    assert writing.done and torch.equal(read, memory)

    def fails() -> None:
        raise RuntimeError("no device")

    with pytest.raises(OffloadError, match=r"writing values at offset 0, which a device copies first: .*no device"):
        file.write(extent, memory, fails).wait()
    with pytest.raises(OffloadError, match="nothing has been written"):
        file.read(extent, read).wait()
