"""Disks that fail in a step or in a pass: what the error says, and what the engine refuses afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import OffloadError, UsageError
from shardwise.memory import OutOfMemoryError, Tier
from shardwise.offload import disk
from tests.harness import on_ranks, run_ranks
from tests.harness.training import bits
from tests.offload.settings import offload
from tests.offload.test_faults import CASE, made, steps, undisturbed

RESTART = "Restart the job from the last checkpoint"


@contextlib.contextmanager
def failing(engine: Any, call: str, code: int, after: int) -> Iterator[None]:
    """Let one call of the system on the engine's swap files fail."""
    homes = vars(engine.sharded.homes).values()
    files = {home._file.threads.file.descriptor for home in homes if home.tier is Tier.DISK}
    real, count = getattr(os, call), 0

    def called(descriptor: int, *args: Any) -> int | None:
        nonlocal count
        if descriptor in files:
            count += 1
            if count == after + 1:
                raise OSError(code, os.strerror(code))
        moved: int | None = real(descriptor, *args)
        return moved

    with mock.patch(f"os.{call}", called):
        yield


def backward(engine: Any, step: int) -> None:
    batch = CASE.data(step, 0, torch.distributed.get_rank(), torch.bfloat16)
    engine.backward(CASE.loss(engine, batch))


def refused(engine: Any) -> list[str]:
    """Return what everything that trains or saves says."""
    batch = CASE.data(2, 0, 0, torch.bfloat16)
    found = []
    for use in (
        lambda: CASE.loss(engine, batch),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        lambda: engine.save_checkpoint("never"),
    ):
        with pytest.raises(UsageError) as error:
            use()
        found.append(str(error.value))
    return found


def disturbed(place: str, directory: str, call: str, code: int, after: int, where: str) -> tuple[str, list[str], str]:
    """Train with a disk that fails in the third step; return the error, refusals, and masters after a restart."""
    engine = made(offload(place, directory))
    steps(engine, 0, 2)
    engine.save_checkpoint(f"{directory}/saved")
    batch = CASE.data(2, 0, 0, torch.bfloat16)
    loss = None
    if where != "forward":
        loss = CASE.loss(engine, batch)
    if where == "step":
        engine.backward(loss)
    with failing(engine, call, code, after), pytest.raises(OffloadError) as error:
        if where == "step":
            engine.step()
        else:
            engine.backward(loss if loss is not None else CASE.loss(engine, batch))
    assert engine.global_steps == 2
    refusals = refused(engine)
    del loss
    engine.destroy()
    again = made(offload(place, directory))
    again.load_checkpoint(f"{directory}/saved")
    steps(again, 2, 4)
    found = bits(again)
    again.destroy()
    return str(error.value), refusals, found


FAULTS = [
    pytest.param("optimizer on disk", "preadv", errno.EIO, 7, "step", id="later-read"),
    pytest.param("gradients on disk", "preadv", errno.EIO, 0, "step", id="norm"),
    pytest.param("all on disk", "preadv", errno.EIO, 1, "backward", id="backward"),
]


@pytest.mark.parametrize(("place", "call", "code", "after", "where"), FAULTS)
def test_after_an_error_of_a_disk_the_engine_refuses_to_go_on(
    tmp_path: Path, place: str, call: str, code: int, after: int, where: str
) -> None:
    (whole,) = run_ranks(undisturbed, 1, place, str(tmp_path))
    ((said, refusals, restarted),) = run_ranks(disturbed, 1, place, str(tmp_path), call, code, after, where)
    assert said.startswith(f"rank 0's swap file in {tmp_path}: ") and os.strerror(code) in said
    assert said.endswith(RESTART) and ".." not in said
    for refusal in refusals:
        assert "a disk has failed before" in refusal and refusal.endswith(said)
    assert refusals[2].startswith("engine.step():") and refusals[3].startswith("engine.save_checkpoint():")
    assert restarted == whole


@contextlib.contextmanager
def without_memory(after: int) -> Iterator[None]:
    """Have memory run out when state is fetched once more than `after` times."""
    left, real = after, disk._Kept.start

    def start(stored: Any, *, read: bool) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        real(stored, read=read)

    with mock.patch.object(disk._Kept, "start", start), pytest.raises(OutOfMemoryError):
        yield


def short_of_memory(place: str, directory: str, after: int) -> str:
    """Train, with a step in which memory runs out while state is fetched, and which is taken again."""
    engine = made(offload(place, directory))
    steps(engine, 0, 2)
    backward(engine, 2)
    with without_memory(after):
        engine.step()
    engine.step()
    steps(engine, 3, 4)
    found = bits(engine)
    engine.destroy()
    return found


@on_ranks(1)
def test_after_a_step_of_some_units_the_engine_refuses_to_go_on(tmp_path: Path) -> None:
    directory = str(tmp_path)
    engine = made(offload("optimizer on disk", directory))
    steps(engine, 0, 2)
    backward(engine, 2)
    with without_memory(9):
        engine.step()
    refusals = refused(engine)
    engine.destroy()
    for refusal in refusals:
        assert "a step was cut short before" in refusal and refusal.endswith(RESTART)
        assert "optimizer state were stepped, then MemoryError was raised" in refusal


def test_a_step_without_memory_for_its_state_can_be_taken_again(tmp_path: Path) -> None:
    place, path = "gradients on disk", str(tmp_path)
    assert run_ranks(short_of_memory, 1, place, path, 1) == run_ranks(undisturbed, 1, place, path)
