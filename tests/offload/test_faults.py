"""What goes wrong with disks while training, and going on afterwards, in the same place or in another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.errors import ConfigError, OffloadError
from tests.harness import on_ranks, run_ranks
from tests.harness.training import Setting, bits, start, take_steps
from tests.models import CASES
from tests.offload.settings import offload

CASE = CASES["gpt"]


def made(zero: dict[str, Any], accumulation: int = 1) -> Any:
    setting = Setting(
        3, precision="bf16", accumulation=accumulation, clip=0.5, optimizer="AdamW", lr=1e-2, zero=tuple(zero.items())
    )
    return start(CASE, setting)


def steps(engine: Any, first: int, last: int) -> None:
    take_steps(engine, CASE, range(first, last))


@pytest.mark.parametrize("how", ["damaged", "truncated"])
@on_ranks(1)
def test_a_swap_file_that_is_not_what_was_written_is_named(tmp_path: Path, how: str) -> None:
    engine = made(offload("optimizer on disk", str(tmp_path)))
    steps(engine, 0, 1)
    descriptor = engine.sharded.homes.optimizer._file.threads.file.descriptor
    if how == "damaged":
        # Not past the page cache, which asks for more.
        with open(f"/proc/self/fd/{descriptor}", "r+b") as other:
            other.seek(8192)
            other.write(b"\x55" * 4096)
    else:
        os.ftruncate(descriptor, 4096)
    with pytest.raises(OffloadError, match=rf"rank 0's swap file in {tmp_path}: .*Restart the job from the last"):
        steps(engine, 1, 2)
    engine.destroy()


@on_ranks(1)
def test_disks_that_cannot_be_used_are_told_before_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in ("optimizer on disk", "parameters on disk"):
        with pytest.raises(OffloadError, match=str(file)):
            made(offload(place, str(file / "swap")))
    with pytest.raises(ConfigError, match=r"offload_optimizer\.nvme_path"):
        made({"offload_optimizer": {"device": "nvme"}})
    full = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OffloadError, match=rf"{tmp_path}.*No space left.*nvme_path"):
        made(offload("optimizer on disk", str(tmp_path)))


# -- going on ----------------------------------------------------------------------------------------------------------


def trained(zero: dict[str, Any], directory: str, first: int, last: int) -> str:
    """Train from a checkpoint, or from the beginning, and save."""
    engine = made(zero, accumulation=2)
    if first:
        engine.load_checkpoint(directory)
    steps(engine, first, last)
    engine.save_checkpoint(directory)
    found = bits(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [("all on disk", None, 2), (None, "all on disk", 1), ("half of the optimizer on host", "some parameters near", 2)],
)
def test_checkpoints_go_from_any_place_into_any_other(
    tmp_path: Path, before: str | None, after: str | None, world: int
) -> None:
    def keys(place: str | None) -> dict[str, Any]:
        return {} if place is None else offload(place, str(tmp_path / "swap"))

    whole = run_ranks(trained, world, {}, str(tmp_path / "resident"), 0, 4)[0]
    run_ranks(trained, world, keys(before), str(tmp_path / "saved"), 0, 2)
    moved = run_ranks(trained, world, keys(after), str(tmp_path / "saved"), 2, 4)[0]
    assert moved == whole


KILLED = """
import os, signal, sys
import torch
from tests.offload import test_faults as faults
from shardwise.offload.files import SwapFile

directory, swap, kill = sys.argv[1:]
engine = faults.made(faults.offload("all on disk", swap))
if os.path.exists(directory):
    engine.load_checkpoint(directory)
write, count = SwapFile.write, 0

def counting(self, extent, memory):
    global count
    count += 1
    transfer = write(self, extent, memory)
    if engine.global_steps == 2 and count > 5 and kill == "yes":
        os.kill(os.getpid(), signal.SIGKILL)
    return transfer

SwapFile.write = counting
while engine.global_steps < 4:
    count = 0
    faults.steps(engine, engine.global_steps, engine.global_steps + 1)
    engine.save_checkpoint(directory)
print("digest", faults.bits(engine))
engine.destroy()
"""


def undisturbed(place: str, directory: str) -> str:
    engine = made(offload(place, directory))
    steps(engine, 0, 4)
    found = bits(engine)
    engine.destroy()
    return found


def run_until(directory: Path, swap: Path, kill: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", KILLED, str(directory), str(swap), kill]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


def test_killed_in_the_middle_of_a_swap_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    killed = run_until(tmp_path / "killed", swap, "yes")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list(swap.iterdir())
    resumed = run_until(tmp_path / "killed", swap, "no")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split("digest ")[1].strip() == run_ranks(undisturbed, 1, "all on disk", str(swap))[0]
