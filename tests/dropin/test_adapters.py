"""What has another form in DeepSpeed than here."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import logging
import os
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
import shardwise_deepspeed
from shardwise.errors import ConfigError, NotBuiltError, ReleasedParameterError, UsageError
from shardwise.utils.logging import logger as ours
from shardwise.zero.parameters.gathered import GatheredParameters
from shardwise.zero.units import leaves
from shardwise.zero.units.status import ZeroParamStatus
from shardwise_deepspeed import (
    accelerator,
    building,
    collectives,
    configuration,
    estimates,
    groups,
    helpers,
    logs,
    operators,
    optimizers,
    parameters,
)
from tests.dropin.clients import detach
from tests.harness import of_all_ranks, on_ranks
from tests.harness.logs import logged

pytestmark = pytest.mark.usefixtures("plain")


@pytest.mark.parametrize("name", [entry.name for entry in pkgutil.iter_modules(shardwise_deepspeed.__path__)])
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"shardwise_deepspeed.{name}")).failed == 0


# -- logging ----------------------------------------------------------------------------------------------------------


def test_there_is_one_logger(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.logger.name == "DeepSpeed" and logging.getLogger("DeepSpeed") is logs.logger
    logs.logger.setLevel(logging.ERROR)
    assert ours.level == logging.ERROR and logs.get_current_level() == logging.ERROR
    logs.set_log_level_from_string("INFO")
    assert ours.level == logging.INFO and logs.should_log_le("info") and not logs.should_log_le("debug")
    with pytest.raises(UsageError, match="log level 'loud': expected one of debug"):
        logs.set_log_level_from_string("loud")


def test_messages_reach_the_librarys_handlers() -> None:
    with logged() as log:
        logs.logger.warning("a %s", "b")
        for _ in range(2):
            logs.logger.warning_once("once")
            logs.log_dist_once("told", [-1])
    assert log.lines[:2] == ["a b", "once"] and len(log.lines) == 3 and log.lines[2].endswith("told")


def test_printing_and_making_loggers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logs.print_dist("hello", [0])
    logs.print_json_dist({"a": 1})
    logs.print_json_dist({"a": 1}, path=str(tmp_path / "file"))
    assert capsys.readouterr().out == '[rank 0] hello\n{"a": 1, "rank": 0}\n'
    assert (tmp_path / "file").read_text() == '{"a": 1, "rank": 0}'
    made = logs.LoggerFactory.create_logger("made", logging.ERROR)
    assert logs.LoggerFactory.create_logger("made", logging.INFO) is made and len(made.handlers) == 1
    with pytest.raises(UsageError):
        logs.LoggerFactory.create_logger()


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> accelerator.Accelerator:
    monkeypatch.setattr(accelerator, "_chosen", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found: accelerator.Accelerator = accelerator.get_accelerator()
    return found


def test_the_cpu_is_an_accelerator(cpu: accelerator.Accelerator) -> None:
    assert cpu is accelerator.get_accelerator() and accelerator.is_current_accelerator_supported()
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name(), cpu.current_device()) == ("cpu",) * 4
    assert cpu.communication_backend_name() == "gloo" and cpu.communication_backend_version() is None
    assert cpu.is_available() and cpu.device_count() >= 1 and cpu.use_host_timers() and cpu.is_synchronized_device()
    assert cpu.is_bf16_supported() and torch.float32 in cpu.supported_dtypes() and not cpu.is_triton_supported()
    with cpu.device(0), cpu.stream(cpu.current_stream()):
        assert cpu.on_accelerator(cpu.FloatTensor([1.0])) and cpu.HalfTensor([1]).dtype is torch.float16
        assert cpu.LongTensor([1]).dtype is torch.int64 and cpu.BFloat16Tensor([1]).dtype is torch.bfloat16
    cpu.manual_seed(3)
    state = cpu.get_rng_state()
    first = torch.rand(1)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(1)) and cpu.initial_seed() == 3
    assert 0 < cpu.memory_allocated() <= cpu.max_memory_allocated() <= cpu.total_memory()
    assert 0 < cpu.available_memory() <= cpu.total_memory() and cpu.memory_stats()["allocated_bytes.all.current"] > 0
    begin, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    begin.record()
    end.record()
    end.synchronize()
    assert begin.query() and begin.elapsed_time(end) >= 0
    tensor = torch.ones(1)
    assert cpu.pin_memory(tensor) is tensor is cpu.unpin_memory(tensor) and not cpu.is_pinned(tensor)
    assert cpu.lazy_call(lambda: 5) == 5 and cpu.create_graph() is None
    with pytest.raises(UsageError):
        cpu.replay_graph(None)
    environment: dict[str, str] = {}
    cpu.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"


def test_other_accelerators_are_refused_and_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_chosen", None)
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(UsageError, match="DS_ACCELERATOR=xpu: this version runs on cuda and cpu"):
        accelerator.get_accelerator()
    own = object()
    accelerator.set_accelerator(own)
    assert accelerator.get_accelerator() is own and not accelerator.is_current_accelerator_supported()


# -- building models --------------------------------------------------------------------------------------------------


def test_modules_are_built_elsewhere_and_in_a_dtype() -> None:
    with building.OnDevice(dtype=torch.bfloat16, device="cpu"):
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype is torch.bfloat16 and layer.weight.device.type == "cpu"
    with building.OnDevice(dtype=torch.float16, enabled=False):
        plain = nn.Linear(2, 2)
    assert plain.weight.dtype is torch.float32 is torch.get_default_dtype() and not plain.weight.is_meta
    with pytest.raises(ZeroDivisionError), building.OnDevice(dtype=torch.float16):
        _ = 1 / 0
    assert torch.get_default_dtype() is torch.float32 and not torch.ones(1).is_meta


def test_constructors_are_left_alone() -> None:
    assert building.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.float16, target_device=None) is torch.ones
    assert building._orig_torch_arange is torch.arange


@on_ranks(2)
def test_parameters_of_stage_3_say_how_large_they_are() -> None:
    """With the drop-in in place: released, gathered and kept whole."""
    plain = nn.Parameter(torch.ones(2))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    parameters.attach()
    try:
        for stage, persistent in ((1, 0), (3, 0), (3, 1000)):
            zero = {"stage": stage, "stage3_param_persistence_threshold": persistent}
            config = {"train_batch_size": 2, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
            engine = shardwise.initialize(model=model, config=config)[0]
            own = list(model.parameters())
            if stage == 1:
                assert not any(hasattr(p, name) for p in own for name in ("ds_id", "ds_numel", "partition_numel"))
            else:
                away = [p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in own]
                assert all(p.ds_numel == p.numel() and p.ds_shape == p.shape for p in own)
                assert away == [persistent == 0] * len(own) and len({p.ds_id for p in own}) == len(own)
                kept = [p.partition_numel() for p in own]
                with GatheredParameters(own):
                    assert all(p.ds_status is ZeroParamStatus.AVAILABLE for p in own)
                    assert [p.partition_numel() for p in own] == kept
                sizes = [sum(each) for each in zip(*of_all_ranks(kept), strict=True)]
                assert sizes == [(2 if persistent else 1) * p.numel() for p in own]
            engine.destroy()
            assert not any(hasattr(p, "ds_id") for p in [*own, plain]) and not hasattr(nn.Parameter, "ds_id")
    finally:
        detach()


@on_ranks(2)
def test_sharded_parameters_stay_where_they_are() -> None:
    """Lightning moves the module, not the engine, when it is done."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine = shardwise.initialize(model=model, config=config)[0]
    with logged(logging.WARNING) as log:
        for _ in range(2):
            model.to(torch.device("cpu", 0))
    assert len(log.lines) == 1 and "Sequential is moved to cpu: parameters that are sharded stay" in log.lines[0]
    with pytest.raises(ReleasedParameterError, match=r"double: the values of parameter '0\.weight'"):
        model.double()
    engine.backward(engine(torch.ones(1, 8)).mean())
    engine.step()
    engine.destroy()
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_leaf_modules_are_marked_and_obeyed() -> None:
    from shardwise.engine.modules import leaves_of

    model = nn.Sequential(Inner(), Inner(), nn.Linear(2, 1))
    found = leaves.set_z3_leaf_modules(model, [Inner])
    assert found == [model[0], model[1]] == leaves.get_z3_leaf_modules(model) and model[0]._z3_leaf is True
    assert leaves_of(model, None) == found and leaves.z3_leaf_module(model[0]) and not leaves.z3_leaf_module(model)
    assert leaves.unset_z3_leaf_modules(model, ["Inner"]) == found and leaves.get_z3_leaf_modules(model) == []
    assert leaves.set_z3_leaf_modules(model, [f"{__name__}.Inner"]) == found
    leaves.set_z3_leaf_module(model[1], False)
    assert leaves_of(model, None) == [model[0]]
    assert leaves.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    with pytest.raises(UsageError, match="Sequential has no module of Nothing"):
        leaves.set_z3_leaf_modules(model, ["Nothing"])
    with pytest.raises(UsageError, match="expected classes or their names, found 3"):
        leaves.set_z3_leaf_modules(model, [3])  # type: ignore[list-item]


# -- optimizers -------------------------------------------------------------------------------------------------------


def stepped(optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5))
    made = optimizer([{"params": iter([weight])}], **options)
    for _ in range(3):
        weight.grad = weight.detach() ** 2 + 1
        made.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("ours", "options", "theirs", "same"),
    [
        (optimizers.FusedAdam, {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        (optimizers.FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        (optimizers.DeepSpeedCPUAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (optimizers.DeepSpeedCPUAdam, {"adamw_mode": False, "weight_decay": 0.1}, torch.optim.Adam,
         {"weight_decay": 0.1}),
        (optimizers.DeepSpeedCPUAdagrad, {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
        (optimizers.FusedLion, {"lr": 0.1}, shardwise.optim.Lion, {"lr": 0.1}),
        (optimizers.DeepSpeedCPULion, {"lr": 0.1}, shardwise.optim.Lion, {"lr": 0.1}),
    ],
)  # fmt: skip
def test_optimizers_step_as_torchs(ours: Any, options: dict[str, Any], theirs: Any, same: dict[str, Any]) -> None:
    torch.testing.assert_close(stepped(ours, **options), stepped(theirs, **same))


def test_options_without_a_meaning_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    for cls in (optimizers.FusedAdam, optimizers.DeepSpeedCPUAdam, optimizers.DeepSpeedCPUAdagrad):
        with pytest.raises(ConfigError, match="amsgrad=True"):
            cls([weight], amsgrad=True)
    narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    made = optimizers.DeepSpeedCPUAdam([narrow], fp32_optimizer_states=False)
    narrow.grad = torch.ones_like(narrow)
    made.step()
    assert made.state[narrow]["exp_avg"].dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"one type.*found torch\.bfloat16, torch\.float32"):
        optimizers.DeepSpeedCPULion([weight, narrow], fp32_optimizer_states=False)


@pytest.mark.parametrize("fp32", [True, False])
def test_optimizers_have_named_parameters_and_groups_of_one(fp32: bool) -> None:
    layer, scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.0))
    named = optimizers.DeepSpeedCPUAdam(layer.named_parameters(), fp32_optimizer_states=fp32)
    assert list(map(id, named.param_groups[0]["params"])) == list(map(id, layer.parameters()))
    groups = [{"params": scale}, {"params": layer.weight}]
    alone = optimizers.DeepSpeedCPUAdam(groups, fp32_optimizer_states=fp32)
    assert [group["params"][0] is one for group, one in zip(alone.param_groups, (scale, layer.weight), strict=True)]
    assert [len(group["params"]) for group in alone.param_groups] == [1, 1]


# -- collectives and groups -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_collectives_with_other_names() -> None:
    rank = shardwise.comm.get_rank()
    mine, whole = torch.full((2,), float(rank)), torch.empty(4)
    collectives.allgather_fn(whole, mine)
    part = torch.empty(2)
    collectives.reduce_scatter_fn(part, torch.arange(4.0))
    added = torch.ones(1)
    collectives.inference_all_reduce(added)
    outputs, sums = [torch.empty(4), torch.empty(2)], [torch.ones(1), torch.ones(2)]
    collectives.all_gather_coalesced(outputs, [mine, mine[:1]], async_op=True).wait()
    assert collectives.all_reduce_coalesced(sums) is None
    collectives.all_reduce_coalesced([torch.ones(1)], group=torch.distributed.new_group([0]))  # rank 1 is outside
    _, fast, bus = collectives.calc_bw_log("all_gather", 10**6, 1.0)
    assert (whole.tolist(), part.tolist(), added.tolist()) == ([0, 0, 1, 1], [[0, 2], [4, 6]][rank], [2])
    assert (outputs[1].tolist(), sums[1].tolist(), round(fast), round(bus)) == ([0, 1], [2, 2], 16, 8)
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (2, rank)
    assert (groups._get_sequence_data_parallel_world_size(), groups._get_sequence_parallel_world_size()) == (2, 1)
    assert groups.get_model_parallel_rank() == 0 and groups._get_sequence_parallel_group() is None
    assert collectives.has_all_gather_into_tensor() and not collectives.has_coalescing_manager()


def test_sizes_of_groups_of_experts_are_those_of_layers() -> None:
    with pytest.raises(UsageError, match="it is an argument of each MoE layer"):
        groups.initialize(ep_size=2)
    groups.initialize()
    assert groups.mpu is None


# -- configurations, estimates, helpers -------------------------------------------------------------------------------


def test_configurations_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    config = configuration.DeepSpeedConfig(str(file))
    assert config.zero_enabled and config.zero_optimization_stage == 2 == config.zero_optimization.stage
    assert (config.train_batch_size, config.gradient_accumulation_steps, config.world_size) == (8, 1, 1)
    assert config.fp16.enabled is False and not hasattr(config, "nonsense")
    assert configuration.load_ds_config(str(file))["train_batch_size"] == 8
    with pytest.raises(ConfigError, match="train_batch_sizes"):
        configuration.DeepSpeedConfig({"train_batch_sizes": 8})
    unit = SimpleNamespace(get_data_parallel_world_size=lambda: 4)
    for sizes in (
        {},
        {"sequence_parallel_size": 2},
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
    ):
        shared = configuration.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **sizes}, unit)
        assert shared.train_batch_size == shared.world_size == 4


def test_estimates_are_the_arithmetic_of_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    two, three = estimates.estimate_zero2_model_states_mem_needs, estimates.estimate_zero3_model_states_mem_needs
    assert two(1000, 4, cpu_offload=False, additional_buffer_factor=1) == (16000, 2000 + 4000)
    assert two(1000, 4, additional_buffer_factor=1) == (16000, 2000)
    assert three(1000, 10, 4, 2, False, additional_buffer_factor=1) == (160, 40 + 18000 // 8, 40)
    assert three(1000, 10, 4, 2, additional_buffer_factor=1) == (9000, 40, 40)
    assert three(1000, 10, 4, 2, True, False, additional_buffer_factor=1) == (8000, 40 + 250, 40)
    assert three(1000, 10, 4, 2, True, True, False) == (24000, 40, 40)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    estimates.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    estimates.estimate_zero3_model_states_mem_needs_all_live(model, num_nodes=2)
    shown = capsys.readouterr().out
    assert shown.count("cpu_offload=") == 8 and "1M parameters, 1M in the largest layer, ZeRO stage 3" in shown


def test_helpers(tmp_path: Path) -> None:
    nest = {"a": [torch.ones(2), "text"], "b": (torch.zeros(1, dtype=torch.int64),)}
    moved = helpers.move_to_device(nest, "meta", criterion_func=torch.is_floating_point)
    assert moved["a"][0].is_meta and not moved["b"][0].is_meta and moved["a"][1] == "text"
    assert helpers.move_to_device(torch.ones(1), "meta").is_meta
    view = torch.arange(100.0)[:2]
    copied = helpers.clone_tensors_for_torch_save({"view": view})["view"]
    assert torch.equal(copied, view) and copied.untyped_storage().nbytes() == 8
    same = helpers.copy_to_device([view], "cpu", lambda tensor: True)[0]
    assert same.data_ptr() != view.data_ptr()
    helpers.set_random_seed(1)
    first = torch.rand(1)
    helpers.set_random_seed(1)
    assert torch.equal(first, torch.rand(1))
    helpers.ensure_directory_exists(tmp_path / "a" / "b" / "file")
    assert os.path.isdir(tmp_path / "a" / "b")
    assert helpers.get_only_unique_item([3, 3]) == 3
    with pytest.raises(RuntimeError, match=r"all equal, found \[1, 2\]"):
        helpers.get_only_unique_item([1, 2])
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert helpers.clip_grad_norm_([weight], 1.0) == 5 and weight.grad.norm() < 1.01
    made = torch.optim.SGD([weight], lr=1.0)
    assert helpers.update_lr(made.param_groups, [0.5]) == [0.5]

    class Wrapper:
        optimizer = made

    assert helpers.get_torch_optimizer(Wrapper()) is made is helpers.get_torch_optimizer(made)
    with pytest.raises(TypeError):
        helpers.get_torch_optimizer(3)


def test_builders_say_what_works_here(caplog: pytest.LogCaptureFixture) -> None:
    working = {name for name, builder in operators.ALL_OPS.items() if builder.is_compatible()}
    assert working == {"async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"}
    for name, builder in operators.ALL_OPS.items():
        assert builder.name == builder.NAME == name
        if name in working:
            done_by = builder.load()
            assert done_by.__name__ == builder.home
            continue
        with pytest.raises(NotBuiltError, match=re.escape(f"{type(builder).__name__}().load(): {builder.reason}")):
            builder.load()
        assert builder.reason and not builder.is_compatible(verbose=True)
        assert f"{type(builder).__name__}: {builder.reason}" in caplog.text
    device = accelerator.Accelerator("cpu")
    assert type(device.create_op_builder("CPUAdamBuilder")) is device.get_op_builder("CPUAdamBuilder")
    assert device.get_op_builder("Nothing") is None
    with pytest.raises(UsageError, match="no builder of operators is called 'CPUAdam'; there are AsyncIOBuilder"):
        device.create_op_builder("CPUAdam")


@pytest.mark.parametrize(
    "name", ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion"]
)
def test_a_schedule_of_the_optimizer_that_gave_its_groups_sets_the_rates(name: str, installed: None) -> None:
    """Accelerate exchanges the optimizer where one is offloaded, and steps the script's schedule."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    own = torch.optim.AdamW([{"params": iter([model.weight])}, {"params": [model.bias]}], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.0 if step else 1.0)
    optimizers = importlib.import_module("shardwise_deepspeed.optimizers")
    exchanged = getattr(optimizers, name)(own.param_groups, lr=0.5)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=exchanged,
        config={"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    )
    weights = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 2)).square().mean())
        engine.step()
        weights.append(model.weight.detach().clone())
        with pytest.warns(UserWarning, match="lr_scheduler.step") if len(weights) == 1 else contextlib.nullcontext():
            schedule.step()
    assert engine.get_lr() == [0.0, 0.0] and torch.equal(weights[0], weights[2])
    engine.destroy()
