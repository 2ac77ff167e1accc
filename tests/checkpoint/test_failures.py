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
from shardwise.utils.logging import logger, warn_once
from tests.checkpoint.job import Run, config, differences, on_ranks
from tests.harness.logs import Lines


def rank() -> int:
    return torch.distributed.get_rank()


def names(path: str) -> list[str]:
    """List a directory once rank 0 has cleaned up."""
    torch.distributed.barrier()
    found = sorted(os.listdir(path))
    torch.distributed.barrier()
    return found


def failing(path: str, how: str, victim: int) -> tuple[str, list[str], bool]:
    run = Run(config(2), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a", client_state={"n": 1})
    run.step()
    saved = run.fingerprint()
    tag = "a" if how == "overwrite" else "b"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            run.engine.save_checkpoint(path, tag=tag, client_state={"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    left = names(path)
    untouched = differences(saved, run.fingerprint()) == []
    _, client = run.load(path)
    assert client == {"n": 1}
    run.engine.save_checkpoint(path, tag=tag, client_state={"n": 3})
    assert run.load(path)[1] == {"n": 3}
    return str(caught.value), left, untouched


@pytest.mark.parametrize(("victim", "how"), [(0, "new"), (1, "overwrite")])
def test_a_rank_that_cannot_write_fails_the_save_on_all(how: str, victim: int, tmp_path: Path) -> None:
    results = on_ranks(failing, 2, str(tmp_path), how, victim)
    for number, (message, left, untouched) in enumerate(results):
        assert "File too large (errno 27)" in message
        assert "iB are free" in message
        assert (f"failed on rank {victim}" in message) == (number != victim)
        assert left == ["a", "latest"]
        assert untouched
    verify(str(tmp_path / "a"))


def unwritable(path: str) -> str:
    run = Run(config(3), seed=1)
    with pytest.raises(CheckpointError) as caught:
        run.engine.save_checkpoint(path)
    run.step()
    return str(caught.value)


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "runs")
    first, second = on_ranks(unwritable, 2, target)
    assert "Not a directory" in first and target in first
    assert "failed on rank 0" in second


def publish_fails(path: str, where: str) -> tuple[str, list[str]]:
    run = Run(config(1), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a")
    original = getattr(os, where)

    def fail(source: str, target: str) -> None:
        if str(source).endswith(".partial"):
            raise OSError(30, "Read-only file system", target)
        original(source, target)

    setattr(os, where, fail)
    try:
        with pytest.raises(CheckpointError) as caught:
            run.engine.save_checkpoint(path, tag="b")
    finally:
        setattr(os, where, original)
    return str(caught.value), names(path)


@pytest.mark.parametrize(("where", "left"), [("rename", ["a", "latest"]), ("replace", ["a", "b", "latest"])])
def test_a_failed_rename_is_an_error_on_all_ranks(where: str, left: list[str], tmp_path: Path) -> None:
    for message, found in on_ranks(publish_fails, 2, str(tmp_path), where):
        assert "Read-only file system" in message
        # The replaced file is `latest`: the checkpoint itself had been renamed before.
        assert ("/b: this checkpoint is complete, but a later step failed" in message) is (where == "replace")
        assert found == left
    assert (tmp_path / "latest").read_text() == "a"
    verify(str(tmp_path / "a"))


def different_tags(path: str, validation: str) -> Any:
    run = Run(config(1, checkpoint={"tag_validation": validation}), seed=1)
    run.step()
    try:
        return run.engine.save_checkpoint(path, tag=f"t{rank()}")
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("validation", ["ignore", "warn", "fail", "Fail"])
def test_different_tags_on_different_ranks(validation: str, tmp_path: Path) -> None:
    results = on_ranks(different_tags, 2, str(tmp_path), validation)
    if validation.lower() == "fail":
        assert all("'t0' on rank 0, 't1' on rank 1" in result for result in results)
        assert os.listdir(tmp_path) == []
    else:
        assert results == [True, True]
        assert sorted(os.listdir(tmp_path)) == ["latest", "t0"]
        verify(str(tmp_path / "t0"))


def unfinished_window(path: str, stage: int) -> tuple[list[str], bool, tuple[int, ...]]:
    """Save in the middle of a window; the window goes on, and another run begins it anew."""
    warn_once.cache_clear()
    handler = Lines()
    logger.addHandler(handler)
    run, undisturbed = Run(config(stage), seed=1, noise=False), Run(config(stage), seed=1, noise=False)
    for one in (run, undisturbed):
        one.step()
        one.micro_batch()
        if one is run:
            run.engine.save_checkpoint(path)
        one.micro_batch()
    same = differences(run.fingerprint(), undisturbed.fingerprint()) == []
    again = Run(config(stage), seed=2, noise=False)
    again.load(path)
    counted = [(again.engine.micro_steps, again.engine.global_steps)]
    for _ in range(2):
        again.micro_batch()
        counted.append((again.engine.micro_steps, again.engine.global_steps))
    logger.removeHandler(handler)
    return [line for line in handler.lines if "in the middle of an accumulation window" in line], same, tuple(counted)


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_an_accumulation_window_saving_tells_what_is_not_saved(stage: int, tmp_path: Path) -> None:
    results = on_ranks(unfinished_window, 2, str(tmp_path), stage)
    assert [len(lines) for lines, _, _ in results] == [1, 0] and "every 2 micro-batches" in results[0][0][0]
    for _, same, counted in results:
        assert same and counted == ((2, 1), (3, 1), (4, 2))


def wrong_paths(path: str) -> list[str]:
    run = Run(config(1), seed=1)
    messages = []
    for call in (
        lambda: run.engine.save_checkpoint(""),
        lambda: run.engine.save_checkpoint(path, tag="a/b"),
        lambda: run.engine.load_checkpoint(""),
        lambda: run.engine.load_checkpoint(path, tag=".."),
        lambda: run.engine.save_16bit_model(""),
        lambda: run.engine.save_16bit_model(path, "pytorch_model.npz"),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        assert isinstance(caught.value, CheckpointPathError)
        messages.append(str(caught.value))
    assert names(path) == []
    run.engine.save_checkpoint(path, tag="there")
    with pytest.raises(CheckpointError, match=r"no such checkpoint directory.*Checkpoints in .*: there$"):
        run.engine.load_checkpoint(path, tag="never")
    return messages


def test_paths_that_cannot_be_used_are_value_errors(tmp_path: Path) -> None:
    messages, _ = on_ranks(wrong_paths, 2, str(tmp_path))
    assert "save_dir: expected the path of a directory, found ''" in messages[0]
    assert "ends in .safetensors" in messages[5]
    assert sorted(os.listdir(tmp_path)) == ["latest", "there"]


def directories_with_the_time_of_day(path: str, asynchronous: bool) -> tuple[Any, list[str]]:
    run = Run(config(1), seed=1)
    run.step()
    said: list[str] = []

    def note(record: Any) -> bool:
        said.append(record.getMessage())
        return True

    logger.addFilter(note)
    try:
        run.engine.save_checkpoint(f"{path}/12.00.0{rank()}", client_state={"step": 1}, asynchronous=asynchronous)
        run.engine.wait_for_checkpoint()
    finally:
        logger.removeFilter(note)
    return run.engine.load_checkpoint(f"{path}/12.00.00"), [message for message in said if "save_dir" in message]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_name_different_directories_save_to_that_of_rank_0(asynchronous: bool, tmp_path: Path) -> None:
    found = on_ranks(directories_with_the_time_of_day, 2, str(tmp_path), asynchronous)
    assert [loaded for loaded, _ in found] == [(f"{tmp_path}/12.00.00/global_step1", {"step": 1})] * 2
    assert os.listdir(tmp_path) == ["12.00.00"]
    (said,), nothing = (messages for _, messages in found)
    assert "12.00.00' on rank 0" in said and "12.00.01' on rank 1" in said and not nothing


def local_directories(path: str) -> str:
    run = Run(config(1), seed=1)
    own = f"{path}/{rank()}"
    with pytest.raises(CheckpointError) as caught:
        # What a node-local directory looks like: the same call, another place.
        original = saving.write_part
        saving.write_part = lambda where, *args, **more: original(where if rank() == 0 else own, *args, **more)
        try:
            run.engine.save_checkpoint(path)
        finally:
            saving.write_part = original
    return str(caught.value)


def test_directories_that_ranks_do_not_share_are_an_error(tmp_path: Path) -> None:
    for message in on_ranks(local_directories, 2, str(tmp_path)):
        assert "must be on a file system that all ranks share" in message
    assert os.listdir(tmp_path) == []
