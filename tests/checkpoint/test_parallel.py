from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import Checkpoint, reader
from shardwise.errors import CheckpointError
from tests.checkpoint.weights import save_by_hand


def test_threads_are_this_ranks_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    found = []
    for ranks in ("1", "2", "4", "8", "x", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(reader.workers())
    assert found == [4, 3, 1, 1, 4, 4]


def test_threads_read_and_verify_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "workers", lambda: 4)
    tensors = {str(n): torch.randn((1 << 20) + n) for n in range(5)}
    path = tmp_path / "c"
    save_by_hand(str(path), tensors, cuts=3)
    with Checkpoint(str(path)) as saved:
        saved.verify(saved.blocks())
        stored = saved.manifest.tensors
        runs = [
            (tensor, start, torch.zeros(1000, dtype=torch.float64)) for tensor in stored for start in (0, 777, 9999)
        ]
        saved.read_all(runs)
    for tensor, start, out in runs:
        assert torch.equal(out, tensors[tensor.name][start : start + 1000].double())
    (file,) = path.glob("rank00001*")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with Checkpoint(str(path)) as saved, pytest.raises(CheckpointError, match="they hold"):
        saved.verify(saved.blocks())
