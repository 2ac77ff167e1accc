"""Forms of a model: stages that the client has built, an nn.Sequential, and a mesh with pipeline ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import ShardwiseError
from shardwise.pipe import PipelineModule
from tests.harness import on_ranks, run_ranks, thorough
from tests.pipeline.gradients import compare
from tests.pipeline.training import (
    WIDTH,
    WORDS,
    Block,
    Logits,
    Setting,
    alone,
    check,
    engine_of,
    loss_of,
    train,
)


def parts() -> list[nn.Module]:
    """Return six modules with equal values in each call."""
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, WIDTH), *(Block(WIDTH) for _ in range(4)), Logits()]


# -- stages that the client has built ----------------------------------------------------------------------------------


class Stage(nn.Sequential):
    """A stage of any form: here some modules."""


def own_stages(count: int) -> list[Stage]:
    made, size = parts(), 6 // count
    return [Stage(*made[i : i + size]) for i in range(0, 6, size)]


def stages_of(setting: Setting) -> int:
    """Return the number of all stages."""
    return setting.stages * (2 if setting.schedule in ("interleaved", "zbv") else 1)


def built(setting: Setting, tied: bool = False) -> dict[str, Any]:
    position = dist.get_rank() // (dist.get_world_size() // setting.stages)
    placed = [position]
    if stages_of(setting) > setting.stages:
        last = 2 * setting.stages - 1
        placed.append(last - position if setting.schedule == "zbv" else position + setting.stages)
    own = own_stages(stages_of(setting))
    tied = [tie_of(setting)] if tied else []
    given = [own[number] for number in placed]
    return {"model": PipelineModule.from_stages(given, setting.stages, loss_of, tied_weights=tied)}


def tie_of(setting: Setting) -> list[str]:
    count = stages_of(setting)
    return ["stages.0.0.weight", f"stages.{count - 1}.{6 // count - 1}.weight"]


def whole_stages(setting: Setting, tied: bool = False) -> nn.Module:
    model = nn.Sequential()
    model.add_module("stages", nn.Sequential(*own_stages(stages_of(setting))))
    if tied:
        first, last = tie_of(setting)
        model.get_submodule(last.rpartition(".")[0]).weight = model.get_parameter(first)
    return model


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule"),
    [
        (3, 3, "zbv"),
        thorough(2, 4, "zb-h1"),
        thorough(3, 3, "interleaved"),
        thorough(2, 2, "1f1b"),
        thorough(1, 2, "1f1b"),
    ],
)
def test_stages_that_the_client_has_built(stages: int, ranks: int, schedule: str, tmp_path: Path) -> None:
    setting = Setting(stages, schedule, 1, given=built, whole=whole_stages, steps=1)
    expected = alone(Setting(stages, schedule, given=built, whole=whole_stages, steps=2), ranks // stages)
    run_ranks(train, ranks, setting, 0, None, str(tmp_path))
    runs = run_ranks(train, ranks, setting, 1, str(tmp_path))
    for run in runs:
        run.losses, run.norms = [*expected.losses[:1], *run.losses], [*expected.norms[:1], *run.norms]
    check(runs, expected)


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule"), [(2, 4, "1f1b"), thorough(3, 3, "zbv"), thorough(3, 3, "interleaved")]
)
def test_stages_that_the_client_has_built_share_a_weight(stages: int, ranks: int, schedule: str) -> None:
    compare(
        [Setting(stages, schedule, 1, given=partial(built, tied=True), whole=partial(whole_stages, tied=True))], ranks
    )


@pytest.mark.parametrize(
    ("tied", "words"),
    [
        (["stages.0.0.weight"], "expected names of one parameter in two stages"),
        (["0.weight", "stages.1.0.weight"], "expected names of one parameter in two stages"),
        (["stages.0.9.weight", "stages.1.0.weight"], "names stages.0.9.weight, and the module of that stage has no"),
        (["stages.0.0.weight", "stages.1.1.linear.bias"], "the tied parameter stages.0.0.weight"),
    ],
)
@on_ranks(2)
def test_wrong_shared_weights_are_refused(tied: list[str], words: str) -> None:
    def given(setting: Setting) -> dict[str, Any]:
        own = own_stages(2)[dist.get_rank()]
        return {"model": PipelineModule.from_stages(own, 2, loss_of, tied_weights=[tied])}

    # A rank that has no such name says so, and the other that a rank has failed.
    with pytest.raises(ShardwiseError) as caught:
        engine_of(Setting(2, "1f1b", given=given))
    assert words in str(caught.value) or dist.get_rank() == 1


@pytest.mark.parametrize(("count", "schedule"), [(1, "zbv"), (2, "1f1b")])
@on_ranks(2)
def test_a_wrong_number_of_stages_is_refused(count: int, schedule: str) -> None:
    model = PipelineModule.from_stages([Stage(Block(WIDTH)) for _ in range(count)], 2, loss_of)
    with pytest.raises(ShardwiseError, match=f"{count} modules were passed, and this rank has the stages"):
        engine_of(Setting(2, schedule, given=lambda _: {"model": model}))


# -- an nn.Sequential, and a mesh with pipeline ranks ------------------------------------------------------------------


def named(setting: Setting) -> nn.Module:
    """Return a Sequential with names; the first and the last module share a weight."""
    words, *blocks, head = parts()
    head.weight = words.weight
    model = nn.Sequential()
    for name, module in {
        "words": words,
        "0": blocks[0],
        "1": blocks[1],
        "more": Stage(*blocks[2:]),
        "head": head,
    }.items():
        model.add_module(name, module)
    return model


def sequential(setting: Setting) -> dict[str, Any]:
    return {"model": named(setting), "loss_fn": loss_of}


def in_stages(stages: int | str) -> dict[str, Any]:
    return {"pipeline": {"stages": stages}}


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule"),
    [(2, 4, "1f1b"), thorough(1, 2, "1f1b"), thorough(2, 2, "zbv"), thorough(3, 3, "zb-h1")],
)
def test_a_sequential_is_divided_by_the_configuration_and_keeps_its_names(
    stages: int, ranks: int, schedule: str
) -> None:
    compare([Setting(stages, schedule, 1, given=sequential, whole=named, config=in_stages(stages))], ranks)


def with_mesh(setting: Setting, sizes: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    return {**sequential(setting), "mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((2, 2), ("pp", "dp")),
        thorough((2,), ("pp",)),
        thorough((2, 2, 2), ("pp", "dp_replicate", "dp_shard")),
        thorough((2, 4, 1), ("pp", "dp", "tp")),
    ],
)
def test_a_mesh_may_have_a_pipeline_dimension(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    given = partial(with_mesh, sizes=sizes, names=names)
    compare([Setting(2, zero=1, given=given, whole=named)], torch.Size(sizes).numel())


class Net(nn.Module):
    """A model that is no sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("names", "stages", "words"),
    [
        (("dp", "pp"), "auto", ["init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp'))"]),
        (("pp", "dp"), 4, ["pipeline.stages", "4"]),
        ((), 2, ["PipelineModule([LayerSpec(...), ...]", "PipelineModule.from_stages(module"]),
    ],
)
@on_ranks(4)
def test_meshes_that_contradict_and_other_models_are_refused_with_what_would_do(
    names: tuple[str, ...], stages: Any, words: list[str]
) -> None:
    given = partial(with_mesh, sizes=(2, 2), names=names) if names else lambda _: {"model": Net()}
    with pytest.raises(ShardwiseError) as error:
        engine_of(Setting(2, given=given, config=in_stages(stages)))
    assert all(word in str(error.value) for word in words)


# -- DeepSpeed's names -------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_grid_has_ranks_and_groups() -> None:
    engine = engine_of(Setting(2, given=sequential, config=in_stages(2)))
    grid, (stage, place) = engine.grid, divmod(dist.get_rank(), 2)
    assert (grid.get_stage_id(), grid.get_data_parallel_id()) == (stage, place)
    assert (grid.pipe_parallel_size, grid.data_parallel_size) == (2, 2)
    assert dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == [place, place + 2]
    assert dist.get_process_group_ranks(grid.get_data_parallel_group()) == [2 * stage, 2 * stage + 1]
