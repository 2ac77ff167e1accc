"""Forms of a model: stages that the client has built, an nn.Sequential, and a mesh with pipeline ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.errors import PipelineError, ShardwiseError
from shardwise.pipe import PipelineModule
from tests.harness import run_ranks, thorough
from tests.pipeline.training import ROWS, WIDTH, WORDS, Block, Logits, batch, loss_of

STEPS, MICRO_BATCHES = 3, 2


def parts() -> list[nn.Module]:
    """Return six modules with equal values in each call."""
    torch.manual_seed(0)
    return [nn.Embedding(WORDS, WIDTH), *(Block(WIDTH) for _ in range(4)), Logits()]


def alone(model: nn.Module, places: int, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICRO_BATCHES):
            for place in range(places):
                ids, labels = batch(step, number, place)
                loss = loss_of(model(ids), labels) / (MICRO_BATCHES * places)
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def config(schedule: str = "1f1b", stages: Any = "auto", zero: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": zero},
        "pipeline": {"stages": stages, "schedule": schedule},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }


def trained(
    engine: Any, place: int, first: int = 0, directory: Path | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for step in range(first, STEPS):
        pairs = iter([batch(step, number, place) for number in range(MICRO_BATCHES)])
        losses.append(float(engine.train_batch(pairs)))
        if directory is not None and step == 0:
            engine.save_checkpoint(directory)
    engine.destroy()
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def check(found: list[Any], losses: list[float], values: dict[str, torch.Tensor]) -> None:
    """Compare ranks with one process."""
    for own, parameters in found:
        torch.testing.assert_close(own, losses[len(losses) - len(own) :], rtol=1e-6, atol=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, values[name], rtol=0, atol=1e-6, msg=name)
    assert {name for _, parameters in found for name in parameters} == set(values)


# -- stages that the client has built ----------------------------------------------------------------------------------


class Stage(nn.Module):
    """A stage of any form: here some modules under names of its own."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            x = module(x)
        return x


def own_stages(stages: int, per_rank: int) -> list[list[nn.Module]]:
    """Return the modules of each stage."""
    size = 6 // (stages * per_rank)
    made = parts()
    return [made[i : i + size] for i in range(0, 6, size)]


def of_stages(stages: int, schedule: str, first: int, directory: Path) -> Any:
    per_rank = 2 if schedule in ("interleaved", "zbv") else 1
    position, size = divmod(dist.get_rank(), dist.get_world_size() // stages)
    own = own_stages(stages, per_rank)
    placed = [position] if per_rank == 1 else [position, position + stages]
    if schedule == "zbv":
        placed = [position, 2 * stages - 1 - position]
    model = PipelineModule.from_stages([Stage(own[number]) for number in placed], stages, loss_of)
    engine = shardwise.initialize(model=model, config=config(schedule))[0]
    if first:
        engine.load_checkpoint(directory)
    return trained(engine, size, first, None if first else directory)


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule"),
    [
        thorough(2, 4, "zb-h1"),
        (3, 3, "zbv"),
        thorough(3, 3, "interleaved"),
        thorough(2, 2, "1f1b"),
        thorough(1, 2, "1f1b"),
    ],
)
def test_stages_that_the_client_has_built(stages: int, ranks: int, schedule: str, tmp_path: Path) -> None:
    count = stages * (2 if schedule in ("interleaved", "zbv") else 1)
    whole = nn.Sequential(*map(Stage, own_stages(stages, count // stages)))
    losses, values = alone(whole, ranks // stages)
    values = {f"stages.{name}": value for name, value in values.items()}
    check(run_ranks(of_stages, ranks, stages, schedule, 0, tmp_path), losses, values)
    check(run_ranks(of_stages, ranks, stages, schedule, 1, tmp_path), losses, values)


def of_wrong_stages(count: int, schedule: str) -> str:
    model = PipelineModule.from_stages([Stage([Block(WIDTH)]) for _ in range(count)], 2, loss_of)
    with pytest.raises(ShardwiseError) as error:
        shardwise.initialize(model=model, config=config(schedule))
    return str(error.value)


def test_a_wrong_number_of_stages_is_refused() -> None:
    for text in run_ranks(of_wrong_stages, 2, 1, "zbv"):
        assert "1 modules were passed, and this rank has the stages" in text and "(pipeline.chunks), in order" in text
    for text in run_ranks(of_wrong_stages, 2, 2, "1f1b"):
        assert "2 modules were passed, and this rank has the stages" in text


# -- an nn.Sequential --------------------------------------------------------------------------------------------------


def of_sequential(stages: int, schedule: str) -> Any:
    model = nn.Sequential()
    for name, module in named().items():
        model.add_module(name, module)
    engine = shardwise.initialize(model=model, config=config(schedule, stages), loss_fn=loss_of)[0]
    return trained(engine, dist.get_rank() % (dist.get_world_size() // stages))


def named() -> dict[str, nn.Module]:
    """Return the modules of a Sequential with names; the first and the last share a weight."""
    words, *blocks, head = parts()
    head.weight = words.weight
    return {"words": words, "0": blocks[0], "1": blocks[1], "more": nn.Sequential(*blocks[2:]), "head": head}


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule"),
    [(2, 4, "1f1b"), thorough(1, 2, "1f1b"), thorough(2, 2, "zbv"), thorough(3, 3, "zb-h1")],
)
def test_a_sequential_is_divided_by_the_configuration_and_keeps_its_names(
    stages: int, ranks: int, schedule: str
) -> None:
    model = nn.Sequential()
    for name, module in named().items():
        model.add_module(name, module)
    check(run_ranks(of_sequential, ranks, stages, schedule), *alone(model, ranks // stages))


# -- a mesh with pipeline ranks ----------------------------------------------------------------------------------------


def of_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = nn.Sequential(*parts())
    engine = shardwise.initialize(model=model, config=config(), loss_fn=loss_of, mesh=mesh)[0]
    place = dist.get_rank() % (dist.get_world_size() // engine.num_stages)
    assert engine.num_stages == sizes[names.index("pp")] and engine.data.rank == place
    return trained(engine, place)


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
    ranks = torch.Size(sizes).numel()
    check(run_ranks(of_mesh, ranks, sizes, names), *alone(nn.Sequential(*parts()), ranks // 2))


def of_wrong_mesh(names: tuple[str, ...], stages: Any) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    with pytest.raises(ShardwiseError) as error:
        shardwise.initialize(model=nn.Sequential(*parts()), config=config(stages=stages), loss_fn=loss_of, mesh=mesh)
    return str(error.value)


def test_a_mesh_that_contradicts_is_refused_with_one_that_would_do() -> None:
    for text in run_ranks(of_wrong_mesh, 4, ("dp", "pp"), "auto"):
        assert "This would do: init_device_mesh('cpu', (2, 2), mesh_dim_names=('pp', 'dp'))" in text
    for text in run_ranks(of_wrong_mesh, 4, ("pp", "dp"), 4):
        assert "pipeline.stages" in text and "4" in text


class Net(nn.Module):
    """A model that is no sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def of_a_model() -> str:
    with pytest.raises(PipelineError) as error:
        shardwise.initialize(model=Net(), config=config(stages=2))
    return str(error.value)


def test_other_models_are_refused_with_all_forms() -> None:
    for text in run_ranks(of_a_model, 2):
        assert "PipelineModule([LayerSpec(...), ...]" in text and "PipelineModule.from_stages(module" in text


# -- DeepSpeed's names -------------------------------------------------------------------------------------------------


def of_names() -> Any:
    engine = shardwise.initialize(model=nn.Sequential(*parts()), config=config(stages=2), loss_fn=loss_of)[0]
    grid = engine.grid
    found = [grid.get_stage_id(), grid.get_data_parallel_id(), grid.pipe_parallel_size, grid.data_parallel_size]
    groups = [dist.get_process_group_ranks(grid.get_pipe_parallel_group())]
    groups.append(dist.get_process_group_ranks(grid.get_data_parallel_group()))
    state = engine.module_state_dict()
    engine.destroy()
    return found, groups, {name: tuple(value.shape) for name, value in (state or {}).items()}


def test_the_grid_has_ranks_and_groups() -> None:
    found = run_ranks(of_names, 4)
    assert [one[0] for one in found] == [[0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2], [1, 1, 2, 2]]
    assert [one[1] for one in found] == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert {name for one in found for name in one[2]} == {
        name for name, _ in nn.Sequential(*parts()).named_parameters()
    }
