"""Checkpoints of values that are infinite or NaN: said, marked, and never the only ones that stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.listing import CheckpointDirectory
from tests.checkpoint.job import Run, as_ranks, config
from tests.checkpoint.test_retention import left, make
from tests.harness import thorough
from tests.harness.logs import logged


def spoil(run: Run, state: bool = False) -> None:
    """Make one value of rank 1's part NaN: a weight, or a moment."""
    sharded = run.engine.sharded
    if torch.distributed.get_rank() == 1:
        index, runs = next((i, r) for i, r in sharded.state.value_runs().items() if r and sharded.registry[i].trainable)
        view = sharded.update.state_pieces(index, "exp_avg")[0][2] if state else runs[0][2]
        view[0] = float("nan")


@pytest.mark.parametrize(
    ("settings", "state"),
    [thorough({}, False), ({"non_finite": "skip"}, True), ({"checkpoint": {"async_save": True}}, False)],
)
@as_ranks(2)
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
    if torch.distributed.get_rank() == 1:
        assert lines == []
    else:
        saves = [line for line in lines if line.startswith("saving checkpoint")]
        assert len(saves) == 2 and all(("'latest' is left as it is" in line) is skips for line in saves)
        assert sum("global_step1 is the newest checkpoint without" in line for line in lines) == (not skips)


@as_ranks(2)
def test_nobody_looks_if_that_is_asked_for(tmp_path: Path) -> None:
    run = Run(config(3, non_finite="ignore"), seed=1)
    spoil(run)
    run.engine.save_checkpoint(tmp_path, tag="a")
    with Checkpoint(f"{tmp_path}/a") as saved:
        assert CheckpointDirectory(str(tmp_path)).latest() == "a" and saved.manifest.finite


@as_ranks(2)
def test_no_copy_of_them_is_made_in_memory(tmp_path: Path) -> None:
    with logged() as told:
        run = Run(config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{tmp_path}/memory"}}), seed=1)
        run.step()
        spoil(run)
        for _ in range(2):
            run.step()
    assert run.engine.last_memory_copy.steps == 1
    assert sum("no copy is made in memory" in line for line in told.lines) == (torch.distributed.get_rank() == 0)


@as_ranks(2)
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
    assert len(lines) == (2 if torch.distributed.get_rank() == 0 else 0)
    for line in lines:  # one name of each rank
        assert len(line.partition("NaN: ")[2].partition(". The")[0].split(", ")) <= 2


def test_retention_counts_every_kind_of_checkpoint(tmp_path: Path) -> None:
    for steps, finite in enumerate([True, True, False, False, False], 1):
        make(tmp_path, f"s{steps}", steps, 100 + steps, finite=finite)
    assert CheckpointDirectory(str(tmp_path)).prune("s5", {"global_steps": 5}, 2, None, finite=False) != []
    assert left(tmp_path) == ["s2", "s4", "s5"]
    make(tmp_path, "s6", 6, 106)
    CheckpointDirectory(str(tmp_path)).prune("s6", {"global_steps": 6}, 2, None)
    assert left(tmp_path) == ["s5", "s6"]
