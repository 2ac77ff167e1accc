"""What small names answer: questions about experts, leaf modules, dotted names, devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.utils import safe_get_full_grad, safe_update_full_grad_vectorized
from shardwise.zero.units import leaves
from tests.harness import on_ranks
from tests.harness.training import engine_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4)))


@pytest.mark.usefixtures("installed")
def test_a_model_without_experts_is_divided_into_nothing_else() -> None:
    import deepspeed
    from deepspeed.moe import utils as moe

    net = model()
    groups = moe.split_params_into_different_moe_groups_for_optimizer(
        {"params": [p for p in net.parameters()], "name": "parameters"}
    )
    assert len(groups) == 1 and groups[0]["name"] == "parameters" and len(groups[0]["params"]) == 4
    assert moe.split_params_into_different_moe_groups_for_optimizer((groups[0],)) == groups
    engine = deepspeed.initialize(
        model=net, model_parameters=groups, config={"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    )[0]
    assert [group["name"] for group in engine.optimizer.param_groups] == ["parameters"]
    engine.destroy()
    # What makes parameters is left for the optimizer.
    assert len(moe.split_params_into_different_moe_groups_for_optimizer({"params": net.parameters()})[0]["params"]) == 4
    assert moe.has_moe_layers(net) == (False, 0) and not moe.is_moe_param(net[0].weight)
    assert moe.configure_moe_param_groups(net.parameters()) == list(net.parameters())
    assert not moe.is_moe_param_group(groups[0])
    assert moe.split_params_into_shared_and_expert_params(net.parameters()) == (list(net.parameters()), [])
    net[0](torch.ones(8)).sum().backward()
    assert [len(part) for part in moe.split_params_grads_into_shared_and_expert_params(net.parameters())] == [2, 0]
    with pytest.raises(ValueError, match="expected parameter groups"):
        moe.split_params_into_different_moe_groups_for_optimizer([net[0].weight])


@pytest.mark.usefixtures("installed")
def test_experts_are_taken_out_of_parameter_groups() -> None:
    from deepspeed.moe import utils as moe
    from deepspeed.moe.layer import MoE

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(4, torch.nn.Linear(4, 4), num_experts=3))
    assert moe.has_moe_layers(net) == (True, 3)
    shared, experts = moe.split_params_into_shared_and_expert_params(net.parameters())
    assert len(shared) == 3 and len(experts) == 6 and all(map(moe.is_moe_param, experts))
    for limit, sizes in ((178956971, [3, 6]), (20, [3, 2, 2, 2])):
        groups = moe.split_params_into_different_moe_groups_for_optimizer(
            {"params": net.parameters(), "lr": 0.1, "name": "all"}, limit
        )
        assert [len(group["params"]) for group in groups] == sizes
        assert [moe.is_moe_param_group(group) for group in groups] == [False] + [True] * (len(sizes) - 1)
        assert {group["lr"] for group in groups} == {0.1} and groups[1]["name"] == "ep_size_1"
    assert [len(group["params"]) for group in moe.configure_moe_param_groups(net.parameters())] == [3, 6]
    engine, *_ = shardwise.initialize(
        model=net, model_parameters=groups, config={"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    )
    assert engine.has_moe_layers and engine.num_experts == [3]
    engine.destroy()


@pytest.mark.usefixtures("installed")
def test_marks_of_experts_are_refused() -> None:
    from deepspeed.moe import utils as moe

    net = model()
    net[0].weight.allreduce = False
    assert moe.is_moe_param(net[0].weight)
    for call in (
        lambda: moe.split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters())}),
        lambda: moe.configure_moe_param_groups(net.parameters()),
        lambda: moe.has_moe_layers(net),
    ):
        with pytest.raises(UsageError, match=r"1 parameters are marked .* marks are not read"):
            call()


def test_leaf_modules_by_name() -> None:
    net = model()
    assert leaves.set_z3_leaf_modules_by_name(net, ["1.0"]) == ([net[1][0]], [])
    assert leaves.get_z3_leaf_modules(net) == [net[1][0]]
    assert leaves.set_z3_leaf_modules_by_suffix(net, ["0"], flag=False) == ([net[0], net[1][0]], [])
    assert leaves.get_z3_leaf_modules(net) == []
    assert leaves.set_z3_leaf_modules_by_name(net, ["0", "9"], raise_if_not_found=False) == ([net[0]], ["9"])
    for call in (
        lambda: leaves.set_z3_leaf_modules_by_name(net, ["9"]),
        lambda: leaves.set_z3_leaf_modules_by_suffix(net, ["9"]),
        lambda: leaves.set_z3_leaf_modules(net, [nn.Conv2d]),
    ):
        with pytest.raises(ValueError, match="leaf modules: Sequential has no module") as error:
            call()
        assert isinstance(error.value, UsageError)


@on_ranks(2)
def test_gradients_of_several_parameters_are_updated() -> None:
    engine = engine_of(model(), 3, {"type": "SGD", "params": {"lr": 0.5}})
    parameters = [*engine.module.parameters(), torch.nn.Parameter(torch.ones(1))]
    safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: gradient)  # there is none yet
    engine.backward(engine(torch.ones(1, 8)).sum())
    before: list[Any] = [safe_get_full_grad(p) for p in parameters]
    safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: gradient * parameter.dim())
    for parameter, gradient in zip(parameters[:-1], before, strict=False):
        assert torch.equal(safe_get_full_grad(parameter), gradient * parameter.dim())
    engine.destroy()


@pytest.mark.usefixtures("installed")
def test_compression_has_the_names_of_deepspeed() -> None:
    from deepspeed.compression.compress import init_compression, redundancy_clean, student_initialization
    from deepspeed.compression.helper import convert_conv1d_to_linear

    class Conv1D(nn.Module):  # as that of transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    net, x = nn.Sequential(Conv1D(), nn.Linear(3, 2)), torch.randn(4, 8)
    expected = net(x)
    assert torch.allclose(convert_conv1d_to_linear(net, Conv1D)(x), expected, atol=1e-6)
    assert type(net[0]) is nn.Linear
    method = {"shared_parameters": {"enabled": True, "schedule_offset": 0}, "different_groups": {"a": {}}}
    config = {"compression_training": {"weight_quantization": method}}
    prepared = init_compression(model=net, deepspeed_config=config, mpu=None)
    quantized = prepared(x)
    assert torch.equal(redundancy_clean(model=prepared, deepspeed_config=config)(x), quantized)
    other = {"compression_training": {"layer_reduction": {"enabled": True, "other_module_name": ["1"]}}}
    student = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    student_initialization(student_model=student, teacher_model=net, deepspeed_config=other)
    assert torch.equal(student[1].weight, net[1].weight)


@pytest.mark.usefixtures("installed")
def test_dotted_names_decorators_and_model_parallel_units() -> None:
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.utils import bwc, instrument_w_nvtx

    net = model()
    assert recursive_getattr(net, "1.0") is net[1][0]
    recursive_setattr(net, "1.0", nn.ReLU())
    recursive_setattr(net, "0", nn.Identity())
    assert [type(net[0]), type(net[1][0])] == [nn.Identity, nn.ReLU]

    @instrument_w_nvtx
    def double(value: int) -> int:
        return 2 * value

    assert double(2) == 4 and double.__name__ == "double"
    unit = SimpleNamespace(get_model_parallel_rank=lambda: 3, get_pipe_parallel_world_size=lambda: 2)
    assert bwc.bwc_tensor_model_parallel_rank(None) == 0 and bwc.bwc_tensor_model_parallel_rank(unit) == 3
    assert bwc.bwc_pipeline_parallel_world_size(unit) == 2 and bwc.bwc_pipeline_parallel_group(unit) is None


@pytest.mark.usefixtures("installed")
def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise_deepspeed.accelerator import Accelerator

    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Accelerator("cpu").device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Accelerator("cpu").device_count() == 2
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert Accelerator("cpu").device_count() == 4


@pytest.mark.usefixtures("installed")
def test_layers_of_experts_have_the_groups_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.moe.layer import MoE

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    MoE(4, nn.Linear(4, 4), num_experts=2).set_deepspeed_parallelism()
    with pytest.raises(UsageError, match="ep_size=2, and there is no process group"):
        MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2).set_deepspeed_parallelism()
