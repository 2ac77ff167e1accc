"""Processes are killed without warning: the last complete checkpoint is there, and training goes on from it exactly."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint, verify
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.safetensors_writer import FileWriter
from tests.checkpoint.job import Run, config, on_ranks
from tests.harness import thorough


def kill_at(number: int) -> None:
    """Kill this process at the n-th event: before or after a change of a file, or inside a write."""
    events = itertools.count(1)

    def event() -> None:
        if next(events) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            event()
            result = function(*args, **kwargs)
            event()
            return result

        return changed

    for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, around(getattr(os, name)))
    shutil.rmtree = around(shutil.rmtree)  # type: ignore[assignment]
    put = FileWriter.write

    def in_two(self: FileWriter, data: memoryview) -> None:
        half = len(data) // 2
        put(self, data[:half])
        event()
        put(self, data[half:])

    FileWriter.write = in_two  # type: ignore[method-assign]


def killed_anywhere(path: str, overwrite: bool, asynchronous: bool, every: int) -> list[str]:
    """Save in child processes that are killed at one event after the other, until one lives; tell what was there."""
    run = Run(config(2, "bf16"), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a", client_state={"n": "old"})
    run.step()
    tag, found = "a" if overwrite else "b", []
    for number in range(1, 1000, every):
        copy = f"{path}-{number}"
        shutil.copytree(path, copy)
        child = os.fork()
        if child == 0:
            code = 1  # an error must not go on in this process, which is not the rank
            try:
                kill_at(number)
                run.engine.save_checkpoint(copy, tag=tag, client_state={"n": "new"}, asynchronous=asynchronous)
                run.engine.wait_for_checkpoint()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        found.append(what_is_left(copy))
        if number % 4 == 1:
            # The next save of the same name works, and cleans up.
            run.engine.save_checkpoint(copy, tag=tag, client_state={"n": "next"})
            assert what_is_left(copy) == "next"
            assert sorted(os.listdir(copy)) == sorted({"a", tag, "latest"})
            assert all(len(os.listdir(f"{copy}/{name}")) == 2 for name in {"a", tag})
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError("the save never ended")


def what_is_left(path: str) -> str:
    tag = CheckpointDirectory(path).latest()
    assert tag is not None
    manifest = verify(os.path.join(path, tag))
    with Checkpoint(os.path.join(path, tag)) as saved:
        weight = saved.read(saved.find("embedding.weight"))
        assert torch.isfinite(weight).all()
    return str(manifest.client["n"])


@pytest.mark.parametrize(
    ("overwrite", "asynchronous", "every"),
    [
        (True, False, 3),
        (False, True, 5),
        thorough(True, False, 2),
        *itertools.starmap(thorough, [(False, False, 1), (False, True, 1), (True, True, 1)]),
    ],
)
def test_killed_at_any_moment_of_a_save_there_is_the_old_or_the_new_checkpoint(
    overwrite: bool, asynchronous: bool, every: int, tmp_path: Path
) -> None:
    (found,) = on_ranks(killed_anywhere, 1, str(tmp_path / "runs"), overwrite, asynchronous, every)
    assert len(found) > 30 // every
    change = found.index("new")
    assert change > 5 // every
    assert found == ["old"] * change + ["new"] * (len(found) - change)
