from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import Checkpoint, Manifest, Slice, StoredTensor, manifestfile, parallel
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError


def test_threads_are_this_ranks_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    found = []
    for ranks in ("1", "2", "4", "8", "x", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(parallel.workers())
    assert found == [4, 3, 1, 1, 4, 4]


def test_several_threads_do_everything_once_and_pass_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "workers", lambda: 3)
    done, threads = [], set()
    together = threading.Barrier(3, timeout=20)

    def work(item: int) -> None:
        if item < 3:
            together.wait()  # nobody waits for another to be finished
        threads.add(threading.get_ident())
        done.append(item)
        if item == 5:
            raise CheckpointError("five")

    with pytest.raises(CheckpointError, match="five"):
        parallel.for_each(work, list(range(9)))
    assert {0, 1, 2, 5} <= set(done) and len(done) == len(set(done)) and len(threads) == 3
    assert parallel.divided(range(8)) == [range(2), range(2, 5), range(5, 8)]
    assert parallel.divided([]) == [[]]


def test_threads_read_and_verify_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "workers", lambda: 4)
    tensors = {str(n): torch.randn((1 << 20) + n) for n in range(5)}
    facts = write_tensors(str(tmp_path / "f"), tensors)
    stored = [
        StoredTensor(name, "parameter", (value.numel(),), "float32", (Slice("f", name, 0, value.numel()),))
        for name, value in tensors.items()
    ]
    (tmp_path / "manifest.json").write_bytes(
        manifestfile.to_bytes(Manifest("a", 0.0, {}, {}, {}, {"f": facts}, stored))
    )
    runs = [(tensor, start, torch.zeros(1000, dtype=torch.float64)) for tensor in stored for start in (0, 777, 9999)]
    with Checkpoint(str(tmp_path)) as saved:
        saved.verify(saved.blocks())
        saved.read_all(runs)
    for tensor, start, out in runs:
        assert torch.equal(out, tensors[tensor.name][start : start + 1000].double())
    data = bytearray((tmp_path / "f").read_bytes())
    data[-5] ^= 1
    (tmp_path / "f").write_bytes(data)
    with Checkpoint(str(tmp_path)) as saved, pytest.raises(CheckpointError, match=r"they hold 4"):
        saved.verify(saved.blocks())
