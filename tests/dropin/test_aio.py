"""The handle with which scripts read and write files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import OffloadError
from shardwise_deepspeed.operators import AsyncIOBuilder


def handle(**options: Any) -> Any:
    return AsyncIOBuilder().load().aio_handle(**options)


@pytest.mark.parametrize("size", [0, 1, 4096, 10_001, 3_000_000])
def test_what_is_written_is_read(tmp_path: Path, size: int) -> None:
    used = handle(block_size=4096 if size < 100_000 else 1 << 20, queue_depth=3, intra_op_parallelism=2)
    values, path = torch.randint(0, 255, (size,), dtype=torch.uint8), str(tmp_path / "values")
    assert used.sync_pwrite(values, path) == 1 and Path(path).read_bytes() == bytes(values.tolist())
    back = torch.zeros_like(values)
    assert used.sync_pread(back, path) == 1 and torch.equal(back, values)


def test_several_at_the_same_time_and_parts_of_files(tmp_path: Path) -> None:
    used, tensors = handle(), [torch.randn(1000 + number, dtype=torch.bfloat16) for number in range(8)]
    for number, tensor in enumerate(tensors):
        assert used.async_pwrite(tensor, str(tmp_path / str(number))) == 0
    assert used.wait() == 8 and used.wait() == 0
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    for number, back in enumerate(backs):
        assert used.async_pread(back, str(tmp_path / str(number))) == 0
    assert used.wait() == 8
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))
    part = torch.zeros(10, dtype=torch.bfloat16)
    assert used.read(part, str(tmp_path / "0"), offset=200) == 1 and torch.equal(part, tensors[0][100:110])
    assert used.write(part, str(tmp_path / "0"), offset=0) == 1
    assert used.read(backs[0], str(tmp_path / "0")) == 1
    assert torch.equal(backs[0][:10], part) and torch.equal(backs[0][10:], tensors[0][10:])


def test_failures_name_the_file(tmp_path: Path) -> None:
    used, short = handle(), tmp_path / "short"
    short.write_bytes(b"abc")
    with pytest.raises(OffloadError, match=r"reading 8 bytes at offset 0 of .*short: the file ends after 3 bytes"):
        used.sync_pread(torch.zeros(8, dtype=torch.uint8), str(short))
    with pytest.raises(OffloadError, match=r"reading 8 bytes .*missing: No such file"):
        used.sync_pread(torch.zeros(8, dtype=torch.uint8), str(tmp_path / "missing"))
    used.async_pread(torch.zeros(8, dtype=torch.uint8), str(short))
    used.async_pwrite(torch.ones(4, dtype=torch.uint8), str(tmp_path / "good"))
    with pytest.raises(OffloadError, match="the file ends after 3 bytes"):
        used.wait()
    assert (tmp_path / "good").read_bytes() == b"\1\1\1\1" and used.wait() == 0
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        used.sync_pwrite(torch.zeros(4, 4).T, str(short))


def test_settings_and_locked_memory() -> None:
    used = handle(block_size=8192, queue_depth=4, single_submit=True, intra_op_parallelism=2)
    assert (used.get_block_size(), used.get_queue_depth(), used.get_intra_op_parallelism()) == (8192, 4, 2)
    assert used.get_single_submit() and not used.get_overlap_events() and 4096 % used.get_alignment() == 0
    locked = used.new_cpu_locked_tensor(10, torch.empty(0, dtype=torch.float32))
    assert locked.shape == (10,) and locked.dtype is torch.float32
    assert used.is_pinned(locked) and not used.is_pinned(torch.zeros(10))
    assert used.free_cpu_locked_tensor(locked) and not used.free_cpu_locked_tensor(locked)
