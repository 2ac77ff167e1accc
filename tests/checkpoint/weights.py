"""Checkpoints made by hand, of any size, for tests of what reads and writes weights."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Manifest, StoredTensor, WeightsReader, manifest, manifestfile
from shardwise.checkpoint.collect import RankSavePlan
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.launch.cli import main


def save_by_hand(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    frozen: Sequence[str] = (),
    cuts: int = 1,
    sequence: int = 1,
) -> None:
    """Write a checkpoint whose parameters are cut into several runs, in two files."""
    os.makedirs(path)
    plans = [RankSavePlan(f"rank0000{n}of00002-0123456{n}.safetensors") for n in range(2)]
    for number, (name, tensor) in enumerate(tensors.items()):
        shape, also, flat = tuple(tensor.shape), tuple((aliases or {}).get(name, ())), tensor.reshape(-1)
        dtype, trainable = manifest.name_of(tensor.dtype), name not in frozen
        stored = StoredTensor(name, "parameter", shape, dtype, (), also, trainable=trainable, group=0)
        edges = [flat.numel() * cut // cuts for cut in range(cuts + 1)]
        for cut, (start, stop) in enumerate(itertools.pairwise(edges)):
            plans[(number + cut) % 2].add_runs(stored, [(start, stop, flat[start:stop])] if start < stop else [])
    made = Manifest(
        tag=os.path.basename(path),
        created=1.0,
        versions={"shardwise": "0"},
        layout={"sequence": sequence, "world": 2},
        config={},
        files={plan.file: write_tensors(os.path.join(path, plan.file), plan.tensors) for plan in plans},
        tensors=manifest.in_order(manifest.combine(t for plan in plans for t in plan.stored), [list(tensors)]),
        counters={"global_steps": 3},
    )
    with open(os.path.join(path, manifest.NAME), "wb") as file:
        file.write(manifestfile.to_bytes(made))


def read_range(source: WeightsReader, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return elements `[start, stop)` of a flattened tensor."""
    tensor = source.tensors()[name]
    out = torch.empty((tensor.numel if stop is None else stop) - start, dtype=tensor.torch_dtype)
    source.read_into(tensor, start, out)
    return out


def command(*arguments: str) -> int:
    """Run the command line in this process; return its exit code."""
    try:
        main([*arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def taken(action: Callable[[], Any]) -> int:
    """Return how much memory of this process something takes at most."""

    def status(name: str) -> int:
        (found,) = re.findall(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found) << 10

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


measures_memory = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not tell the peak"
)
