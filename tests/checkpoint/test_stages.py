"""Checkpoints of models of stages: parameter groups, ranks' own state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.places import Counterparts, counterparts
from shardwise.errors import CheckpointError
from tests.checkpoint import stages
from tests.checkpoint.job import Layout, rank
from tests.checkpoint.stages import start, train
from tests.harness import on_ranks, run_ranks, thorough

TWO = Layout(1, 2, stages=2)


# -- parameter groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@on_ranks(2)
def test_groups_of_other_ranks_need_names(named: bool, tmp_path: Path) -> None:
    """Without, the settings of the first rank's group would replace those of another one."""

    def made(parameters: list[Any]) -> torch.optim.Optimizer:
        tied = [p for p in parameters if p.shape == (stages.WORDS, stages.WIDTH)]
        others = [p for p in parameters if p.shape != (stages.WORDS, stages.WIDTH)]
        first: dict[str, Any] = {"params": others, "weight_decay": float(rank())}
        last: dict[str, Any] = {"params": tied}
        if named:
            first["name"], last["name"] = f"of stage {rank()}", "tied"
        return torch.optim.AdamW([first, last], lr=0.01)

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    engine = shardwise.initialize(model=stages.model_of(TWO, 1), optimizer=made, config=config)[0]
    train(engine, 0, 1)
    if named:
        engine.save_checkpoint(tmp_path, tag="a")
        engine.optimizer.param_groups[0]["weight_decay"] = 7.0
        engine.load_checkpoint(tmp_path, tag="a")
        assert engine.optimizer.param_groups[0]["weight_decay"] == float(rank())
    else:
        with pytest.raises(CheckpointError, match=r"parameter group 0 has the settings .*give each group a name"):
            engine.save_checkpoint(tmp_path, tag="a")


# -- the state of ranks ------------------------------------------------------------------------------------------------


def numbers(root: str, layout: Layout, *, saves: bool) -> list[float]:
    """Return random numbers after saving, or after loading."""
    engine = start(layout, 1)
    random.seed(1000 * (1 + rank()) + saves)
    if saves:
        engine.save_checkpoint(root, tag="a")
    else:
        engine.load_checkpoint(root, tag="a")
    found = [random.random() for _ in range(2)]
    return found


@pytest.mark.parametrize(
    ("loaded", "sources"),
    [
        thorough(Layout(0, 4, stages=2), [0, 1, 2, 3]),
        thorough(Layout(0, 4, stages=4), [0, 2, 0, 0]),  # stages that the checkpoint lacks draw as the first one
        thorough(Layout(0, 4), [0, 1, None, None]),
        (Layout(0, 2, stages=2), [0, 2]),
    ],
)
def test_random_numbers_go_on_at_the_same_coordinates(
    loaded: Layout, sources: list[int | None], tmp_path: Path
) -> None:
    """Of two stages and two ranks with samples of their own."""
    saved = run_ranks(numbers, 4, str(tmp_path), Layout(0, 4, stages=2), saves=True)
    found = run_ranks(numbers, loaded.world, str(tmp_path), loaded, saves=False)
    for number, source in enumerate(sources):
        assert (found[number] in saved) is (source is not None)
        assert source is None or found[number] == saved[source]


# -- the ranks whose own state a rank of another mesh takes ------------------------------------------------------------


def saved_on(data: int, tensor: int, layers: int) -> Manifest:
    places = [
        {"layers": [stage, layers], "data": [share, data], "sequence": [0, 1], "tensor": [part, tensor]}
        for stage in range(layers)
        for share in range(data)
        for part in range(tensor)
    ]
    layout = {"world": len(places)}
    return Manifest("a", 0.0, {}, layout, {}, {}, [], ranks=[{"place": place} for place in places])


def test_a_rank_takes_what_the_ranks_with_its_samples_had() -> None:
    manifest = saved_on(data=2, tensor=2, layers=2)  # ranks 0 to 3 in the first stage, 4 to 7 in the second

    def found(rank: int, world: int, **place: tuple[int, int]) -> Counterparts:
        return counterparts(manifest, {"layers": (0, 1), "sequence": (0, 1), **place}, rank, world)

    here = found(3, 8, layers=(0, 2), data=(1, 2), tensor=(1, 2))
    assert (here.same, here.own, here.line) == (True, 3, {3, 7})
    assert found(1, 2, data=(1, 2), tensor=(0, 1)).line == {2, 6}  # tensors were divided, and are not here
    assert found(3, 4, data=(1, 2), tensor=(1, 2)).line == {3, 7}
    assert found(0, 4, data=(0, 2), tensor=(0, 1), sequence=(1, 2)).line == {0, 4}
    assert found(1, 4, data=(1, 4), tensor=(0, 1)).line == frozenset()
    assert found(1, 4, data=(0, 1), tensor=(1, 4)).line == frozenset()
    drawn = [found(0, 8, data=(1, 2), **{name: (1, 2)}) for name in ("tensor", "layers", "sequence")]
    assert [(one.own, one.random, one.with_torch) for one in drawn] == [(3, 3, True), (6, 6, True), (None, 2, False)]
    beyond = found(5, 8, data=(1, 2), tensor=(2, 4))
    assert (beyond.own, beyond.random, beyond.with_torch) == (None, 2, True)
    assert found(7, 8, data=(3, 4), tensor=(1, 2)).random is None
