"""Checkpoints of models of stages: parameter groups, ranks' own state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import CheckpointError
from tests.checkpoint import stages
from tests.checkpoint.stages import Stages, start, train
from tests.harness import on_ranks, run_ranks, thorough

TWO = Stages(1, 2, stages=2)


# -- parameter groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@on_ranks(2)
def test_groups_of_other_ranks_need_names(named: bool, tmp_path: Path) -> None:
    """Without, the settings of the first rank's group would replace those of another one."""
    shardwise.init_distributed(verbose=False)
    rank = dist.get_rank()

    def made(parameters: list[Any]) -> torch.optim.Optimizer:
        tied = [p for p in parameters if p.shape == (stages.WORDS, stages.WIDTH)]
        others = [p for p in parameters if p.shape != (stages.WORDS, stages.WIDTH)]
        first: dict[str, Any] = {"params": others, "weight_decay": float(rank)}
        last: dict[str, Any] = {"params": tied}
        if named:
            first["name"], last["name"] = f"of stage {rank}", "tied"
        return torch.optim.AdamW([first, last], lr=0.01)

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    engine = shardwise.initialize(model=stages.model_of(TWO, 1), optimizer=made, config=config)[0]
    train(engine, 0, 1)
    if named:
        engine.save_checkpoint(tmp_path, tag="a")
        engine.optimizer.param_groups[0]["weight_decay"] = 7.0
        engine.load_checkpoint(tmp_path, tag="a")
        assert engine.optimizer.param_groups[0]["weight_decay"] == float(rank)
    else:
        with pytest.raises(CheckpointError, match=r"parameter group 0 has the settings .*give each group a name"):
            engine.save_checkpoint(tmp_path, tag="a")
    engine.destroy()


# -- the state of ranks ------------------------------------------------------------------------------------------------


def numbers(root: str, layout: Stages, *, saves: bool) -> list[float]:
    """Return random numbers after saving, or after loading."""
    shardwise.init_distributed(verbose=False)
    engine = start(layout, 1)
    random.seed(1000 * (1 + dist.get_rank() if dist.is_initialized() else 0) + saves)
    if saves:
        engine.save_checkpoint(root, tag="a")
    else:
        engine.load_checkpoint(root, tag="a")
    found = [random.random() for _ in range(2)]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("loaded", "sources"),
    [
        thorough(Stages(0, 4, stages=2), [0, 1, 2, 3]),
        thorough(Stages(0, 4, stages=4), [0, 2, 0, 0]),  # stages that the checkpoint lacks draw as the first one
        thorough(Stages(0, 4), [0, 1, None, None]),
        (Stages(0, 2, stages=2), [0, 2]),
    ],
)
def test_random_numbers_go_on_at_the_same_coordinates(
    loaded: Stages, sources: list[int | None], tmp_path: Path
) -> None:
    """Of two stages and two ranks with samples of their own."""
    saved = run_ranks(numbers, 4, str(tmp_path), Stages(0, 4, stages=2), saves=True)
    found = run_ranks(numbers, loaded.world, str(tmp_path), loaded, saves=False)
    for rank, source in enumerate(sources):
        assert (found[rank] in saved) is (source is not None)
        assert source is None or found[rank] == saved[source]
