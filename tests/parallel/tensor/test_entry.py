"""Other ways to tensor parallelism than the configuration: meshes, models divided before, an mpu, DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.parallel import current_tensors, end_tensors
from shardwise_deepspeed import groups
from tests.harness import run_ranks, thorough
from tests.parallel.tensor import models
from tests.parallel.tensor.clients import Unit, megatron, parallelized
from tests.parallel.tensor.models import ROWS, RULES, alone, data, decoder, trained

STEPS = 4
SECTION = {"partition_config": RULES}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1e9,
        **more,
    }


def train(engine: Any, steps: int = STEPS) -> tuple[list[float], float, dict[str, Any]]:
    return trained(engine, steps)


def check(found: Any, copies: int, steps: int = STEPS) -> None:
    expected = alone(steps, copies)
    assert {tensor.name for tensor, _ in found[2].values()} == expected[2].keys()
    models.check(found, expected)


# -- meshes ------------------------------------------------------------------------------------------------------------


def meshed(how: Any) -> Any:
    mesh: Any = how
    if isinstance(how, dict):
        mesh = init_device_mesh("cpu", tuple(how.values()), mesh_dim_names=tuple(how))
    if how == "slice":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    engine, *_ = shardwise.initialize(model=decoder(), config=config(1, tensor_parallel=SECTION), mesh=mesh)
    found = (
        dist.get_process_group_ranks(engine.tensor_parallel_group),
        engine.get_tensor_parallel_world_size(),
        engine.dp_world_size,
        engine.sequence_parallel_size,
        engine.sharded.domain.sizes,
        train(engine, 1),
    )
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("how", "tensor", "grid"),
    [
        thorough({"model": 4}, 4, (4,)),
        thorough({"dp_replicate": 2, "tensor": 2}, 2, (2, 2)),
        thorough("slice", 2, (4,)),
        ((2, 1, 2), 2, (4,)),
    ],
)
def test_meshes(how: Any, tensor: int, grid: tuple[int, ...]) -> None:
    for rank, found in enumerate(run_ranks(meshed, 4, how)):
        first = rank // tensor * tensor
        assert found[:5] == (list(range(first, first + tensor)), tensor, 4 // tensor, 1, grid)
        check(found[5], 4 // tensor, 1)


# -- models that are divided before there is an engine -----------------------------------------------------------------


def divided() -> Any:
    model = decoder(seed=dist.get_rank())
    before = sum(p.numel() for p in model.parameters())
    assert shardwise.tp_model_init(model, 2, torch.float32, {"tensor_parallel": SECTION}) is model
    group = current_tensors()
    assert group is not None and group.size == 2
    here = sum(p.numel() for p in model.parameters())
    ids = data(0, ROWS)
    first = model(ids).item()
    engine, *_ = shardwise.initialize(model=model, config=config(3))
    assert groups.get_tensor_parallel_rank() == engine.get_tensor_parallel_rank() == dist.get_rank() % 2
    assert groups.get_model_parallel_world_size() == 2 and groups.get_data_parallel_rank() == dist.get_rank() // 2
    found = train(engine)
    engine.destroy()
    again = model(ids).item()  # the group that has been there before connects the ranks again
    end_tensors()
    assert groups.get_model_parallel_group() is None
    return before, here, first, again, found


def test_a_model_is_divided_at_once() -> None:
    expected = decoder()(data(0, ROWS)).item()
    results = run_ranks(divided, 4)
    for before, here, first, again, found in results:
        assert here < 0.7 * before
        assert first == pytest.approx(expected, rel=1e-5)
        assert again == pytest.approx(results[0][3], rel=1e-6)
        check(found, 2)


# -- a client's own layers ---------------------------------------------------------------------------------------------


def with_unit(stage: int, size: int, apart: bool) -> Any:
    unit = Unit(size, apart)
    engine, *_ = shardwise.initialize(model=megatron(unit), config=config(stage), mpu=unit)
    found = train(engine)
    norm = engine.get_model_parallel_rank(), engine.mp_world_size
    engine.destroy()
    return found, norm


@pytest.mark.parametrize(
    ("stage", "world", "size", "apart"), [(3, 4, 2, True), thorough(1, 2, 2, False), thorough(2, 4, 2, True)]
)
def test_layers_of_an_mpu(stage: int, world: int, size: int, apart: bool) -> None:
    for rank, (found, (place, ranks)) in enumerate(run_ranks(with_unit, world, stage, size, apart)):
        assert (place, ranks) == (rank // 2 if apart else rank % size, size)
        check(found, world // size)


# -- DTensors ----------------------------------------------------------------------------------------------------------


def with_dtensors(stage: int, size: int, own: bool) -> Any:
    from torch.distributed.tensor import DTensor

    model = parallelized(decoder(), size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if own else None
    settings = config(stage)
    if own:
        del settings["optimizer"]
    engine, stepped, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=settings)
    assert own is (stepped is optimizer)
    found = train(engine)
    kinds = {isinstance(p, DTensor) for p in engine.module.blocks[0].q.parameters()}
    engine.destroy()
    kinds_after = {isinstance(p, DTensor) for p in model.blocks[0].q.parameters()}
    with torch.no_grad():
        after = model(data(0, ROWS))
    return found, kinds, kinds_after, float(after)


@pytest.mark.parametrize(
    ("stage", "world", "size", "own"), [(3, 4, 2, True), thorough(1, 2, 2, False), thorough(2, 4, 2, False)]
)
def test_dtensors(stage: int, world: int, size: int, own: bool) -> None:
    results = run_ranks(with_dtensors, world, stage, size, own)
    for found, kinds, kinds_after, after in results:
        assert (kinds, kinds_after) == ({False}, {True})
        assert after == pytest.approx(results[0][3], rel=1e-6)
        check(found, world // size)


def stored(directory: str) -> Any:
    """Train a step, save, train another, load into an engine of plain layers on all ranks, and give whole weights."""
    engine, *_ = shardwise.initialize(model=parallelized(decoder(), 2), config=config(1))
    first = train(engine, 1)[0]
    engine.save_checkpoint(directory)
    engine.export(f"{directory}/whole")
    after = train(engine, 1)[0]
    engine.load_checkpoint(directory)
    again = train(engine, 1)[0]
    engine.destroy()
    engine, *_ = shardwise.initialize(model=decoder(seed=3), config=config(1))
    engine.load_checkpoint(directory)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return first, after, again, weights


def test_checkpoints_and_exports_of_dtensors(tmp_path: Path) -> None:
    _, _, exact = alone(1, 1)
    whole = None
    for first, after, again, weights in run_ranks(stored, 2, str(tmp_path)):
        assert again == after != first
        whole = whole or load_file(tmp_path / "whole" / "model.safetensors")
        for name, value in weights.items():
            assert torch.equal(value, whole[name])
            torch.testing.assert_close(value, exact[name].float(), rtol=1e-5, atol=1e-6)
