"""A save that fails anywhere fails everywhere, and leaves what was there before."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import save as saving
from shardwise.checkpoint import verify
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import warn_once
from tests.checkpoint.job import Run, as_ranks, config, differences
from tests.harness import thorough
from tests.harness.logs import logged


def rank() -> int:
    return torch.distributed.get_rank()


def names(path: Path) -> list[str]:
    """List a directory once rank 0 has cleaned up."""
    torch.distributed.barrier()
    found = sorted(os.listdir(path))
    torch.distributed.barrier()
    return found


@pytest.mark.parametrize(("victim", "tag"), [(0, "b"), (1, "a")])
@as_ranks(2)
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
@as_ranks(2)
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
@as_ranks(2)
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
@as_ranks(2)
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


@as_ranks(2)
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
@as_ranks(2)
def test_ranks_that_name_different_directories_save_to_that_of_rank_0(asynchronous: bool, tmp_path: Path) -> None:
    engine, client = Run(config(1), seed=1).engine, {"step": 1}
    with logged() as told:
        engine.save_checkpoint(f"{tmp_path}/12.00.0{rank()}", client_state=client, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    assert engine.load_checkpoint(f"{tmp_path}/12.00.00") == (f"{tmp_path}/12.00.00/global_step0", client)
    assert names(tmp_path) == ["12.00.00"]
    assert sum("12.00.01' on rank 1" in line for line in told.lines if "save_dir" in line) == (rank() == 0)


@as_ranks(2)
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
