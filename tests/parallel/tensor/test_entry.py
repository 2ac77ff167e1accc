"""Other ways to tensor parallelism than the configuration: meshes, models divided before, an mpu, DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import UsageError
from shardwise.parallel import current_tensors, end_tensors
from shardwise.parallel.tensor.entry import copy_first
from shardwise_deepspeed import groups
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import config_of
from tests.parallel.tensor import models
from tests.parallel.tensor.clients import Unit, megatron, parallelized
from tests.parallel.tensor.models import MOMENTUM, ROWS, Decoder, alone, data, decoder, trained
from tests.parallel.tensor.together import RULES

STEPS = 4
SECTION = {"partition_config": RULES}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return config_of(stage, MOMENTUM, gradient_clipping=1e9, **more)


def train(engine: Any, steps: int = STEPS) -> tuple[list[float], float, dict[str, Any]]:
    return trained(engine, steps)


def check(found: Any, copies: int, steps: int = STEPS) -> None:
    expected = alone(steps, copies)
    assert {tensor.name for tensor, _ in found[2].values()} == expected[2].keys()
    models.check(found, expected)


# -- meshes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "tensor", "grid"),
    [
        ((2, 1, 2), 2, (4,)),
        thorough({"model": 4}, 4, (4,)),
        thorough({"dp_replicate": 2, "tensor": 2}, 2, (2, 2)),
        thorough("slice", 2, (4,)),
    ],
)
@on_ranks(4)
def test_meshes(how: Any, tensor: int, grid: tuple[int, ...]) -> None:
    mesh: Any = how
    if isinstance(how, dict):
        mesh = init_device_mesh("cpu", tuple(how.values()), mesh_dim_names=tuple(how))
    if how == "slice":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    engine, *_ = shardwise.initialize(model=decoder(), config=config(1, tensor_parallel=SECTION), mesh=mesh)
    first = dist.get_rank() // tensor * tensor
    assert dist.get_process_group_ranks(engine.tensor_parallel_group) == list(range(first, first + tensor))
    sizes = engine.get_tensor_parallel_world_size(), engine.dp_world_size, engine.sequence_parallel_size
    assert (*sizes, engine.sharded.domain.sizes) == (tensor, 4 // tensor, 1, grid)
    check(train(engine, 1), 4 // tensor, 1)


# -- models that are divided before there is an engine -----------------------------------------------------------------


@on_ranks(4)
def test_a_model_is_divided_at_once() -> None:
    model = decoder(seed=dist.get_rank())
    before = sum(p.numel() for p in model.parameters())
    assert shardwise.tp_model_init(model, 2, torch.float32, {"tensor_parallel": SECTION}) is model
    group = current_tensors()
    assert group is not None and group.size == 2
    assert sum(p.numel() for p in model.parameters()) < 0.7 * before
    ids = data(0, ROWS)
    assert model(ids).item() == pytest.approx(decoder()(ids).item(), rel=1e-5)
    engine, *_ = shardwise.initialize(model=model, config=config(3))
    assert groups.get_tensor_parallel_rank() == engine.get_tensor_parallel_rank() == dist.get_rank() % 2
    assert groups.get_model_parallel_world_size() == 2 and groups.get_data_parallel_rank() == dist.get_rank() // 2
    check(train(engine), 2)
    engine.destroy()
    again = of_all_ranks(model(ids).item())  # the group that has been there before connects the ranks again
    assert again == pytest.approx(again[:1] * 4, rel=1e-6)
    end_tensors()
    assert groups.get_model_parallel_group() is None


@on_ranks(2)
def test_layers_outlive_several_engines() -> None:
    model = shardwise.tp_model_init(decoder(), 2, torch.float32, {"tensor_parallel": SECTION})
    ids = data(0, ROWS)
    expected = model(ids).item()
    first, second = (shardwise.initialize(model=model, config=config(1)).engine for _ in range(2))
    first.destroy()
    assert second(ids).item() == pytest.approx(expected, rel=1e-6)
    second.destroy()
    assert model(ids).item() == pytest.approx(expected, rel=1e-6)
    engine = shardwise.init_inference(model, dtype="fp32", tensor_parallel={"tp_size": 2})
    engine.destroy()
    assert model(ids).item() == pytest.approx(expected, rel=1e-6)
    end_tensors()


@on_ranks(2)
def test_values_of_the_first_rank_are_copied_whatever_their_strides_and_dtypes() -> None:
    def of(rank: int) -> list[torch.Tensor]:
        own = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(rank))
        return [own[:, :2].permute(2, 0, 1), own[0, 0, 0] > 0, torch.view_as_complex(own).clone(), own.half()[:0]]

    own = of(dist.get_rank())
    job = Communicator(None, Ledger(), torch.device("cpu"))
    copy_first([(str(number), one) for number, one in enumerate(own)], job)
    job.destroy()
    assert all(torch.equal(one, first) for one, first in zip(own, of(0), strict=True))


# -- models that are not built plainly: no rank makes more of a divided tensor than its part ---------------------------


def losses_of(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of two steps, and the weights before them."""
    section = {"autotp_size": 2, "partition_config": RULES}
    engine, *_ = shardwise.initialize(model=model, config=config(3, tensor_parallel=section))
    whole = {name: value.clone() for name, value in (engine.module_state_dict() or {}).items()}
    losses = train(engine, 2)[0]
    assert sum(tensor.numel for tensor in engine.sharded.registry) < 0.7 * sum(v.numel() for v in whole.values())
    engine.destroy()
    return losses, whole


@on_ranks(2)
def test_zero_init_gives_the_same_model() -> None:
    torch.manual_seed(0)
    with shardwise.zero.Init():
        model = Decoder(True)
    (losses, whole), (expected, plain) = losses_of(model), losses_of(decoder(True))
    assert losses == expected
    assert all(torch.equal(whole[name], value) for name, value in plain.items())


@on_ranks(2)
def test_models_on_the_meta_device_are_initialised_whole_and_divided() -> None:
    with torch.device("meta"):
        model = Decoder(True)
    torch.manual_seed(0)
    losses, whole = losses_of(model)
    assert of_all_ranks(losses) == [losses] * 2
    weight = whole["blocks.0.up.weight"]
    assert weight.abs().max() <= 0.25 and weight[12:].std() > 0.1  # both halves are drawn, as those of 16 inputs are


# -- a client's own layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "size", "apart"), [(3, 2, True), thorough(1, 4, False), thorough(2, 2, True)])
@on_ranks(4)
def test_layers_of_an_mpu(stage: int, size: int, apart: bool) -> None:
    unit = Unit(size, apart)
    engine, *_ = shardwise.initialize(model=megatron(unit), config=config(stage), mpu=unit)
    check(train(engine), 4 // size)
    place = dist.get_rank() // 2 if apart else dist.get_rank() % size
    assert (engine.get_model_parallel_rank(), engine.mp_world_size) == (place, size)


# -- DTensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "size", "own"), [(3, 2, True), thorough(1, 4, False), thorough(2, 2, False)])
@on_ranks(4)
def test_dtensors(stage: int, size: int, own: bool) -> None:
    model = parallelized(decoder(), size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if own else None
    settings = config(stage)
    if own:
        del settings["optimizer"]
    engine, stepped, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=settings)
    assert own is (stepped is optimizer)
    check(train(engine), 4 // size)
    assert not any(isinstance(p, DTensor) for p in engine.module.blocks[0].q.parameters())
    with pytest.raises(UsageError, match="it restores them"):
        shardwise.initialize(model=model, config=config(stage))
    engine.destroy()
    assert all(isinstance(p, DTensor) for p in model.blocks[0].q.parameters())
    with torch.no_grad():
        after = of_all_ranks(float(model(data(0, ROWS))))
    assert after == pytest.approx(after[:1] * 4, rel=1e-6)


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
