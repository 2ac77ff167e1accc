"""A save that fails anywhere fails everywhere, and leaves what was there before."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint, verify
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.safetensors_writer import FileWriter
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import warn_once
from tests.checkpoint.job import Run, barrier, config, differences, rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged


def names(path: Path) -> list[str]:
    """List a directory once rank 0 has cleaned up."""
    barrier()
    found = sorted(os.listdir(path))
    barrier()
    return found


@pytest.mark.parametrize(("victim", "tag"), [(0, "b"), (1, "a")])
@on_ranks(2)
def test_a_rank_that_cannot_write_fails_the_save_on_all(victim: int, tag: str, tmp_path: Path) -> None:
    run = Run(config(2), seed=1)
    run.step()
    run.engine.save_checkpoint(tmp_path, tag="a", client_state={"n": 1})
    run.step()
    saved = run.fingerprint()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            run.engine.save_checkpoint(tmp_path, tag=tag, client_state={"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (f"failed on rank {victim}" in str(caught.value)) == (rank() != victim)
    assert names(tmp_path) == ["a", "latest"]
    assert differences(saved, run.fingerprint()) == []
    verify(f"{tmp_path}/a")
    assert run.load(tmp_path)[1] == {"n": 1}
    run.engine.save_checkpoint(tmp_path, tag=tag, client_state={"n": 3})
    assert run.load(tmp_path)[1] == {"n": 3}


@pytest.mark.parametrize(("where", "left"), [("rename", ["a", "latest"]), ("replace", ["a", "b", "latest"])])
@on_ranks(2)
def test_a_failed_rename_is_an_error_on_all_ranks(where: str, left: list[str], tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.step()
    run.engine.save_checkpoint(tmp_path, tag="a")
    original = getattr(os, where)

    def fail(source: str, target: str) -> None:
        if ".partial" in str(source):
            raise OSError(30, "Read-only file system", target)
        original(source, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="Read-only file sys") as caught:
        patch.setattr(os, where, fail)
        run.engine.save_checkpoint(tmp_path, tag="b")
    # The replaced file is `latest`: the checkpoint itself had been renamed before.
    assert ("/b: this checkpoint is complete, but a later step failed" in str(caught.value)) is (where == "replace")
    assert names(tmp_path) == left
    assert (tmp_path / "latest").read_text() == "a"
    verify(f"{tmp_path}/a")


@pytest.mark.parametrize("validation", ["ignore", "warn", "fail", "Fail"])
@on_ranks(2)
def test_different_tags_on_different_ranks(validation: str, tmp_path: Path) -> None:
    run = Run(config(1, checkpoint={"tag_validation": validation}), seed=1)
    if validation.lower() == "fail":
        with pytest.raises(CheckpointError, match="'t0' on rank 0, 't1' on rank 1"):
            run.engine.save_checkpoint(tmp_path, tag=f"t{rank()}")
        assert names(tmp_path) == []
    else:
        assert run.engine.save_checkpoint(tmp_path, tag=f"t{rank()}")
        assert names(tmp_path) == ["latest", "t0"]
        verify(f"{tmp_path}/t0")


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_inside_an_accumulation_window_saving_tells_what_is_not_saved(stage: int, tmp_path: Path) -> None:
    """The window goes on, and another run begins it anew."""
    warn_once.cache_clear()
    run, undisturbed = Run(config(stage), seed=1, noise=False), Run(config(stage), seed=1, noise=False)
    with logged() as told:
        for one in (run, undisturbed):
            one.step()
            one.micro_batch()
            if one is run:
                run.engine.save_checkpoint(tmp_path)
            one.micro_batch()
        assert differences(run.fingerprint(), undisturbed.fingerprint()) == []
        again = Run(config(stage), seed=2, noise=False)
        again.load(tmp_path)
    for counted in ((2, 1), (3, 1), (4, 2)):
        assert (again.engine.micro_steps, again.engine.global_steps) == counted
        again.micro_batch()
    assert sum("in the middle of an accumulation window" in line for line in told.lines) == (rank() == 0)


@on_ranks(2)
def test_paths_that_cannot_be_used_are_value_errors(tmp_path: Path) -> None:
    engine = Run(config(1), seed=1).engine
    for call in (
        lambda: engine.save_checkpoint(""),
        lambda: engine.save_checkpoint(tmp_path, tag="a/b"),
        lambda: engine.load_checkpoint(""),
        lambda: engine.load_checkpoint(tmp_path, tag=".."),
        lambda: engine.save_16bit_model(""),
        lambda: engine.save_16bit_model(tmp_path, "pytorch_model.npz"),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        assert isinstance(caught.value, CheckpointPathError)
    assert names(tmp_path) == []
    engine.save_checkpoint(tmp_path, tag="there")
    with pytest.raises(CheckpointError, match=r"no such checkpoint directory.*Checkpoints in .*: there$"):
        engine.load_checkpoint(tmp_path, tag="never")


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_ranks_that_name_different_directories_save_to_that_of_rank_0(asynchronous: bool, tmp_path: Path) -> None:
    engine, client = Run(config(1), seed=1).engine, {"step": 1}
    with logged() as told:
        engine.save_checkpoint(f"{tmp_path}/12.00.0{rank()}", client_state=client, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    assert engine.load_checkpoint(f"{tmp_path}/12.00.00") == (f"{tmp_path}/12.00.00/global_step0", client)
    assert names(tmp_path) == ["12.00.00"]
    assert sum("12.00.01' on rank 1" in line for line in told.lines if "save_dir" in line) == (rank() == 0)


@on_ranks(2)
def test_directories_that_ranks_do_not_share_are_an_error(tmp_path: Path) -> None:
    """As node-local directories look: the same call, another place."""
    run, original = Run(config(1), seed=1), saving.write_part

    def write(where: str, *args: Any, **more: Any) -> Any:
        return original(where if rank() == 0 else f"{tmp_path}/{rank()}", *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_part", write)
        with pytest.raises(CheckpointError, match="must be on a file system that all ranks share"):
            run.engine.save_checkpoint(tmp_path)
    assert names(tmp_path) == []


# -- values that are infinite or NaN -----------------------------------------------------------------------------------


def spoil(run: Run, state: bool = False) -> None:
    """Make one value of rank 1's part NaN: a weight, or a moment."""
    sharded = run.engine.sharded
    if rank() == 1:
        index, runs = next((i, r) for i, r in sharded.state.value_runs().items() if r and sharded.registry[i].trainable)
        view = sharded.update.state_pieces(index, "exp_avg")[0][2] if state else runs[0][2]
        view[0] = float("nan")


@pytest.mark.parametrize(
    ("settings", "state"),
    [thorough({}, False), ({"non_finite": "skip"}, True), ({"checkpoint": {"async_save": True}}, False)],
)
@on_ranks(2)
def test_such_checkpoints_are_marked_and_the_last_finite_one_is_gone_on_from(
    settings: dict[str, Any], state: bool, tmp_path: Path
) -> None:
    root, skips = str(tmp_path), "non_finite" in settings
    settings = config(1, **{**settings, "checkpoint": {**settings.get("checkpoint", {}), "keep_last": 1}})
    with logged() as told:
        run = Run(settings, seed=1)
        for number in range(4):
            run.step()
            if number == 1:
                spoil(run, state)
            if number != 2:
                run.engine.save_checkpoint(root, client_state={"step": number + 1})
                run.engine.wait_for_checkpoint()
        torch.distributed.barrier()
        # Of three checkpoints with keep_last 1 the newest stays, and the last good one.
        assert sorted(os.listdir(root)) == ["global_step1", "global_step4", "latest"]
        assert CheckpointDirectory(root).latest() == ("global_step1" if skips else "global_step4")
        again = Run(settings, seed=2)
        assert again.engine.resume(root) == {"step": 1}
        again.load(root, "global_step4")
    with Checkpoint(f"{root}/global_step4") as saved:
        assert not saved.manifest.finite and saved.manifest.layout["not_finite"]
    lines = [line for line in told.lines if "NaN" in line]
    if rank() == 1:
        assert lines == []
    else:
        saves = [line for line in lines if line.startswith("saving checkpoint")]
        assert len(saves) == 2 and all(("'latest' is left as it is" in line) is skips for line in saves)
        assert sum("global_step1 is the newest checkpoint without" in line for line in lines) == (not skips)


@on_ranks(2)
def test_nobody_looks_if_that_is_asked_for(tmp_path: Path) -> None:
    run = Run(config(3, non_finite="ignore"), seed=1)
    spoil(run)
    run.engine.save_checkpoint(tmp_path, tag="a")
    with Checkpoint(f"{tmp_path}/a") as saved:
        assert CheckpointDirectory(str(tmp_path)).latest() == "a" and saved.manifest.finite


@on_ranks(2)
def test_no_copy_of_them_is_made_in_memory(tmp_path: Path) -> None:
    with logged() as told:
        run = Run(config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{tmp_path}/memory"}}), seed=1)
        run.step()
        spoil(run)
        for _ in range(2):
            run.step()
    assert run.engine.last_memory_copy.steps == 1
    assert sum("no copy is made in memory" in line for line in told.lines) == (rank() == 0)


@on_ranks(2)
def test_each_rank_sends_few_names_of_a_diverged_model(tmp_path: Path) -> None:
    run = Run(config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{tmp_path}/memory"}}), seed=1)
    run.step()
    for runs in run.engine.sharded.state.value_runs().values():
        for part in runs:
            part[2].fill_(float("nan"))
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "MOST_NAMES", 1)
        run.step()
        run.engine.save_checkpoint(tmp_path)
    lines = [line for line in told.lines if "infinite or NaN: " in line]
    assert len(lines) == (2 if rank() == 0 else 0)
    for line in lines:  # one name of each rank
        assert len(line.partition("NaN: ")[2].partition(". The")[0].split(", ")) <= 2


# -- processes that are killed -----------------------------------------------------------------------------------------


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
    (found,) = run_ranks(killed_anywhere, 1, str(tmp_path / "runs"), overwrite, asynchronous, every)
    assert len(found) > 30 // every
    change = found.index("new")
    assert change > 5 // every
    assert found == ["old"] * change + ["new"] * (len(found) - change)
