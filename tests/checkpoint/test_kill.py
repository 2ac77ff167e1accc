"""Processes are killed without warning: the last complete checkpoint is there, and training goes on from it exactly."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint, directory, verify
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.safetensors_writer import TensorWriter
from tests.checkpoint.job import Run, config, on_ranks
from tests.harness import thorough

ROOT = Path(__file__).parents[2]


def events(kill_at: int) -> Callable[[], None]:
    """Return a function that kills this process when it is called for the n-th time."""
    count = 0

    def event() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return event


def instrument(event: Callable[[], None]) -> None:
    """Call `event` before and after everything that changes a file, and inside writes."""

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
    put = TensorWriter._put

    def in_two(self: TensorWriter, data: memoryview) -> None:
        half = len(data) // 2
        put(self, data[:half])
        event()
        put(self, data[half:])

    TensorWriter._put = in_two  # type: ignore[method-assign]


def kill_at_every_step(path: str, overwrite: bool) -> list[str]:
    """Save in child processes that are killed at the first, second, ... event, until one lives; tell what was there."""
    run = Run(config(2, "bf16"), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a", client_state={"n": "old"})
    run.step()
    found = []
    for number in range(1, 1000):
        copy = f"{path}-{number}"
        shutil.copytree(path, copy)
        child = os.fork()
        if child == 0:
            code = 1  # an error must not go on in this process, which is not the rank
            try:
                instrument(events(number))
                run.engine.save_checkpoint(copy, tag="a" if overwrite else "b", client_state={"n": "new"})
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        found.append(what_is_left(copy))
        if number % 4 == 1:
            # The next save of the same name works, and cleans up.
            run.engine.save_checkpoint(copy, tag="a" if overwrite else "b", client_state={"n": "next"})
            assert what_is_left(copy) == "next"
            assert sorted(os.listdir(copy)) == (["a", "latest"] if overwrite else ["a", "b", "latest"])
            assert all(len(os.listdir(os.path.join(copy, tag))) == 2 for tag in os.listdir(copy) if tag != "latest")
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


def listed_later(runs: Path) -> list[str]:
    """List a directory as it is when a save begins a minute from now.

    A writer that is killed between making (or emptying) its draft and locking (or removing) it leaves an empty one,
    which for a minute may be that of a writer who has just begun.
    """
    for draft in runs.glob(".*.partial"):
        assert os.listdir(draft) == []
        os.utime(draft, (0, 0))
    directory.remove_leftovers(str(runs))
    return sorted(os.listdir(runs))


@pytest.mark.parametrize("overwrite", [thorough(False), True])
def test_killed_at_any_moment_of_a_save_there_is_the_old_or_the_new_checkpoint(overwrite: bool, tmp_path: Path) -> None:
    (found,) = on_ranks(kill_at_every_step, 1, str(tmp_path / "runs"), overwrite)
    assert len(found) > 30
    change = found.index("new")
    assert change > 5
    assert found == ["old"] * change + ["new"] * (len(found) - change)


SCRIPT = """
import sys
import torch
from tests.checkpoint.job import Run, config

path, steps, seed, saving = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
run = Run(config(3, "bf16"), seed=seed)
run.load(path)


def save():
    run.engine.save_checkpoint(path, tag="last", client_state={"step": run.engine.global_steps})


while run.engine.global_steps < steps:
    run.step()
    save()
    if torch.distributed.get_rank() == 0:
        print("step", run.engine.global_steps, flush=True)
    while run.engine.global_steps == saving:
        save()
values = run.fingerprint()
values = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
torch.save(values, f"{path}.end{torch.distributed.get_rank()}")
run.engine.destroy()
torch.distributed.destroy_process_group()
"""

# So many that none is done before it is killed.
STEPS = 40


class Job:
    """Two ranks of `SCRIPT` in processes of their own; at step `saving` they save, again and again, until killed."""

    def __init__(self, directory_: Path, steps: int, seed: int, saving: int = 0) -> None:
        script = directory_ / "train.py"
        script.write_text(SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(2):
            env = {
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            arguments = [sys.executable, str(script), str(directory_ / "runs"), str(steps), str(seed), str(saving)]
            self.processes.append(
                subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )

    def wait_for(self, line: str) -> None:
        stream = self.processes[0].stdout
        assert stream is not None
        output = ""
        for text in stream:
            output += text
            if text.strip() == line:
                return
        raise AssertionError(f"rank 0 ended without printing {line!r}:\n{output}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        # The second rank may have noticed that the first is gone before it was killed itself.
        codes = [process.wait() for process in self.processes]
        assert codes[0] == -signal.SIGKILL and codes[1] != 0

    def finish(self) -> None:
        for process in self.processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output


def end(path: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(f"{path}.end{rank}", weights_only=True) for rank in range(2)]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The end of a run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole")
    Job(path, STEPS, seed=1).finish()
    return end(path / "runs")


@pytest.mark.thorough
def test_a_run_that_is_killed_while_training_ends_with_the_same_bits(
    uninterrupted: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    job = Job(tmp_path, STEPS, seed=1)
    job.wait_for("step 5")
    job.kill()
    Job(tmp_path, STEPS, seed=2).finish()
    assert same(end(tmp_path / "runs"), uninterrupted)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_killed_while_saving_ends_with_the_same_bits(
    uninterrupted: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    reached = 2
    job = Job(tmp_path, STEPS, seed=1, saving=reached)
    job.wait_for(f"step {reached}")
    time.sleep(random.Random(0).uniform(0.02, 0.4))
    job.kill()
    assert CheckpointDirectory(str(tmp_path / "runs")).latest() == "last"
    assert verify(str(tmp_path / "runs" / "last")).counters["global_steps"] == reached
    Job(tmp_path, STEPS, seed=9).finish()
    assert same(end(tmp_path / "runs"), uninterrupted)
    assert listed_later(tmp_path / "runs") == ["last", "latest"]
