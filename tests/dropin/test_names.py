"""What small names answer: questions about experts, keys of formats, leaf modules, versions, dotted names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.utils import safe_get_full_grad, safe_update_full_grad_vectorized
from shardwise.zero.units import leaves
from tests.harness import run_ranks


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


def test_the_configuration_marks_leaf_modules() -> None:
    net = model()
    zero = {"stage": 3, "leaf_module": {"name_suffixes": ["1"]}}
    config = {"train_batch_size": 1, "zero_optimization": zero, "optimizer": {"type": "Adam"}}
    engine = shardwise.initialize(model=net, config=config).engine
    assert [leaves.z3_leaf_module(module) for module in net] == [False, True]
    engine.destroy()


def updated(stage: int) -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    engine = shardwise.initialize(model=model(), config=config)[0]
    parameters = [*engine.module.parameters(), torch.nn.Parameter(torch.ones(1))]
    safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: gradient)  # there is none yet
    engine.backward(engine(torch.ones(1, 8)).sum())
    before: list[Any] = [safe_get_full_grad(p) for p in parameters]
    safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: gradient * parameter.dim())
    for parameter, gradient in zip(parameters[:-1], before, strict=False):
        assert torch.equal(safe_get_full_grad(parameter), gradient * parameter.dim())
    engine.destroy()


def test_gradients_of_several_parameters_are_updated() -> None:
    run_ranks(updated, 2, 3)


@pytest.mark.usefixtures("installed")
def test_words_of_formats() -> None:
    import deepspeed
    from deepspeed.checkpoint import constants as checkpoint
    from deepspeed.git_version_info import compatible_ops, installed_ops, torch_info
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, GDSBuilder
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.config import get_gradient_clipping
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys, get_scalar_param
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero import leaf_module_config

    from shardwise.config.schema.schedules import NATIVE_SCHEDULES

    flags = {name for model in NATIVE_SCHEDULES.values() for name in model.model_fields} - {"last_batch_iteration"}
    for name in flags:
        assert getattr(lr_schedules, name.upper()) == name
    assert {lr_schedules.LR_RANGE_TEST, lr_schedules.ONE_CYCLE, lr_schedules.WARMUP_COSINE_LR} < set(NATIVE_SCHEDULES)
    assert (lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE) == ("log", "linear")
    assert get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT == 0.0
    assert get_gradient_clipping({constants.GRADIENT_CLIPPING: 2.0}) == 2.0
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled and not get_bfloat16_config({}).enabled
    assert get_float16_config({"fp16": {"enabled": True}}).initial_scale_power == 16
    assert get_scalar_param({"a": 1}, "b", 2) == 2
    assert dict_raise_error_on_duplicate_keys([("a", 1)]) == {"a": 1}
    with pytest.raises(ValueError, match="occur twice: a"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])
    assert (
        leaf_module_config.DeepSpeedZeroLeafModuleConfig().classes
    ) == leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES
    assert checkpoint.FP32_FLAT_GROUPS == "fp32_flat_groups"
    assert installed_ops == compatible_ops == deepspeed.ops.__compatible_ops__
    assert compatible_ops[CPUAdamBuilder.NAME] and compatible_ops[AsyncIOBuilder.NAME]
    assert not compatible_ops[GDSBuilder.NAME]
    assert torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    assert deepspeed.is_compile_supported()


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

    class Unit:
        def get_model_parallel_rank(self) -> int:
            return 3

        def get_model_parallel_world_size(self) -> int:
            return 4

        def get_pipe_parallel_world_size(self) -> int:
            return 2

    assert bwc.bwc_tensor_model_parallel_rank(None) == 0 and bwc.bwc_tensor_model_parallel_world_size() == 1
    assert bwc.bwc_tensor_model_parallel_rank(Unit()) == 3 and bwc.bwc_tensor_model_parallel_world_size(Unit()) == 4
    assert bwc.bwc_pipeline_parallel_world_size(Unit()) == 2 and bwc.bwc_pipeline_parallel_group(Unit()) is None


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
