"""What goes wrong with disks while training, and going on afterwards, in the same place or in another one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.errors import ConfigError, OffloadError
from shardwise.offload.files import SwapFile
from tests.harness import RankFailure, on_ranks, run_ranks, thorough
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
    [
        ("all on disk", None, 1),
        thorough(None, "all on disk", 1),
        ("half of the optimizer on host", "some parameters near", 2),
    ],
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


def step_by_step(swap: str, directory: str, kill: bool = False) -> str:
    """Train, from the checkpoint if there is one, and save after each step; `kill` in the third, at the sixth write."""
    engine, write, writes = made(offload("all on disk", swap)), SwapFile.write, 0

    def counting(*given: Any) -> Any:
        nonlocal writes
        writes += engine.global_steps == 2
        transfer = write(*given)
        if writes > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer

    if os.path.exists(directory):
        engine.load_checkpoint(directory)
    with mock.patch.object(SwapFile, "write", counting if kill else write):
        while engine.global_steps < 4:
            steps(engine, engine.global_steps, engine.global_steps + 1)
            engine.save_checkpoint(directory)
    return bits(engine)


def undisturbed(place: str, directory: str) -> str:
    engine = made(offload(place, directory))
    steps(engine, 0, 4)
    found = bits(engine)
    engine.destroy()
    return found


def test_killed_in_the_middle_of_a_swap_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    swap, saved = str(tmp_path / "swap"), str(tmp_path / "saved")
    with pytest.raises(RankFailure, match=f"exit code -{signal.SIGKILL.value}"):
        run_ranks(step_by_step, 1, swap, saved, kill=True)
    assert not os.listdir(swap) and len(os.listdir(saved)) == 3  # of two steps, and `latest`
    assert run_ranks(step_by_step, 1, swap, saved) == run_ranks(undisturbed, 1, "all on disk", swap)
