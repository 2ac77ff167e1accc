"""Checkpoints of values that are infinite or NaN: said, marked, and never the only ones that stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.utils.logging import logger
from tests.checkpoint.job import Run, config, on_ranks
from tests.checkpoint.test_retention import left, make
from tests.harness import thorough
from tests.harness.logs import Lines


def spoil(run: Run, state: bool = False) -> None:
    """Make one value of rank 1's part NaN: a weight, or a moment."""
    sharded = run.engine.sharded
    if torch.distributed.get_rank() == 1:
        index, runs = next((i, r) for i, r in sharded.state.value_runs().items() if r and sharded.registry[i].trainable)
        view = sharded.update.state_pieces(index, "exp_avg")[0][2] if state else runs[0][2]
        view[0] = float("nan")


def goes_wrong(root: str, settings: dict[str, Any], state: bool) -> tuple[list[str], list[Any]]:
    handler = Lines()
    logger.addHandler(handler)
    run = Run(config(1, **settings), seed=1)
    for number in range(4):
        run.step()
        if number == 1:
            spoil(run, state)
        if number < 2:
            run.engine.save_checkpoint(root, client_state={"step": number + 1})
            run.engine.wait_for_checkpoint()
        elif number == 3:
            run.engine.save_checkpoint(root)
            run.engine.wait_for_checkpoint()
    seen: list[Any] = [CheckpointDirectory(root).latest(), sorted(os.listdir(root))]
    again = Run(config(1, **settings), seed=2)
    seen.append(again.engine.resume(root))
    again.load(root, "global_step4")
    logger.removeHandler(handler)
    return [line for line in handler.lines if "NaN" in line], seen


@pytest.mark.parametrize(
    ("settings", "state"),
    [thorough({}, False), ({"non_finite": "skip"}, True), ({"checkpoint": {"async_save": True}}, False)],
)
def test_such_checkpoints_are_marked_and_the_last_finite_one_is_gone_on_from(
    settings: dict[str, Any], state: bool, tmp_path: Path
) -> None:
    keep = {"checkpoint": {**settings.get("checkpoint", {}), "keep_last": 1}}
    (told, seen), (others, _) = on_ranks(goes_wrong, 2, str(tmp_path), {**settings, **keep}, state)
    skips = "non_finite" in settings
    # Of three checkpoints with keep_last 1 the newest stays, and the last good one.
    assert seen == [
        "global_step1" if skips else "global_step4",
        ["global_step1", "global_step4", "latest"],
        {"step": 1},
    ]
    with Checkpoint(str(tmp_path / "global_step4")) as saved:
        assert not saved.manifest.finite and saved.manifest.layout["not_finite"]
    saves = [line for line in told if line.startswith("saving checkpoint")]
    assert len(saves) == 2 and all("values are infinite or NaN:" in line for line in saves)
    assert all(("'latest' is left as it is" in line) is skips for line in saves)
    assert sum("global_step1 is the newest checkpoint without" in line for line in told) == (not skips)
    assert sum("it was saved with values that are infinite or NaN" in line for line in told) == 1
    assert others == []


def nobody_looks(root: str) -> list[Any]:
    run = Run(config(3, non_finite="ignore"), seed=1)
    spoil(run)
    run.engine.save_checkpoint(root, tag="a")
    with Checkpoint(f"{root}/a") as saved:
        return [CheckpointDirectory(root).latest(), saved.manifest.finite]


def test_nobody_looks_if_that_is_asked_for(tmp_path: Path) -> None:
    assert on_ranks(nobody_looks, 2, str(tmp_path))[0] == ["a", True]


def copies(root: str) -> list[Any]:
    handler = Lines()
    logger.addHandler(handler)
    settings = config(1, checkpoint={"memory_copies": {"every": 1, "directory": f"{root}/memory"}})
    run = Run(settings, seed=1)
    run.step()
    spoil(run)
    for _ in range(2):
        run.step()
    last = run.engine.last_memory_copy
    assert last is not None
    logger.removeHandler(handler)
    return [last.steps, [line for line in handler.lines if "no copy is made in memory" in line]]


def test_no_copy_of_them_is_made_in_memory(tmp_path: Path) -> None:
    (first, told), (second, others) = on_ranks(copies, 2, str(tmp_path))
    assert first == second == 1 and len(told) == 1 and others == []


def test_retention_counts_every_kind_of_checkpoint(tmp_path: Path) -> None:
    for steps, finite in enumerate([True, True, False, False, False], 1):
        make(tmp_path, f"s{steps}", steps, 100 + steps, finite=finite)
    assert CheckpointDirectory(str(tmp_path)).prune("s5", {"global_steps": 5}, 2, None, finite=False) != []
    assert left(tmp_path) == ["s2", "s4", "s5"]
    make(tmp_path, "s6", 6, 106)
    CheckpointDirectory(str(tmp_path)).prune("s6", {"global_steps": 6}, 2, None)
    assert left(tmp_path) == ["s5", "s6"]
