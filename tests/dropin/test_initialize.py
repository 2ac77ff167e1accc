"""`deepspeed.initialize`: the arguments that the native function lacks."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ConfigError, LaunchError, UsageError
from tests.dropin.clients import drop_in
from tests.harness import on_ranks

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": CONFIG},
        {"config_params": CONFIG},
        {"args": argparse.Namespace(deepspeed_config=json.dumps(CONFIG))},
        {"args": argparse.Namespace(deepscale_config=CONFIG, device_rank=0)},
        {"config": CONFIG, "dist_init_required": False},
        {"config": CONFIG, "dist_init_required": True, "distributed_port": 29501},
    ],
)
@on_ranks(1)
@drop_in()
def test_the_configuration_is_found(arguments: dict[str, Any]) -> None:
    import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=nn.Linear(2, 1), **arguments)
    assert type(engine) is deepspeed.DeepSpeedEngine and optimizer is engine.optimizer and loader is scheduler is None
    assert engine.train_batch_size() == 2
    engine.destroy()


@pytest.mark.usefixtures("installed")
def test_two_configurations_are_refused() -> None:
    import deepspeed

    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="config and config_params"):
        deepspeed.initialize(model=model, config=CONFIG, config_params=CONFIG)
    with pytest.raises(ConfigError, match=r"config and args\.deepspeed_config"):
        deepspeed.initialize(argparse.Namespace(deepspeed_config="x.json"), model=model, config=CONFIG)
    with pytest.raises(ConfigError, match="needs a configuration"):
        deepspeed.initialize(model=model)
    with pytest.raises(UsageError, match="NoneType"):
        deepspeed.initialize(config=CONFIG)


@pytest.mark.usefixtures("installed")
def test_a_process_group_that_is_required() -> None:
    import deepspeed

    assert not dist.is_initialized()
    with pytest.raises(LaunchError, match="dist_init_required=False"):
        deepspeed.initialize(model=nn.Linear(2, 1), config=CONFIG, dist_init_required=False)
    assert not dist.is_initialized()


@on_ranks(1)
@drop_in()
def test_requests_of_speed_only_leave_plans_and_choices_possible() -> None:
    import deepspeed

    micro = "train_micro_batch_size_per_gpu"
    config = {**CONFIG, "compile": {"deepcompile": True}, "tensor_parallel": {"kernel_inject": True}, micro: "auto"}
    model = deepspeed.tp_model_init(nn.Linear(2, 1), 1, torch.float32, config)
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=torch.ones(4, 2))
    assert engine.train_batch_size() == 2 and engine.config == config
    assert engine.memory_plans(stages=[1]).plans[0].total is not None
    engine.destroy()


@on_ranks(1)
@drop_in()
def test_only_a_prepared_model_is_compressed() -> None:
    import deepspeed
    from deepspeed.compression.compress import init_compression

    shared = {"enabled": True, "schedule_offset": 0, "unknown": 1}
    groups = {"all": {"params": {"start_bits": 2, "target_bits": 2, "quantization_period": 1}}}
    method = {"shared_parameters": shared, "different_groups": groups}
    config = {**CONFIG, "compression_training": {"weight_quantization": method}}
    net, x = nn.Linear(8, 4), torch.randn(2, 8)
    plain = net(x)
    engine, *_ = deepspeed.initialize(model=net, config=config)
    assert torch.equal(engine(x), plain)
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=init_compression(net, config), config=config)
    assert not torch.equal(engine(x), plain)
    engine.destroy()


@on_ranks(4)
@drop_in()
def test_data_parallel_groups_are_those_of_the_newest_engine() -> None:
    import deepspeed
    from deepspeed.utils import groups

    def place(**arguments: Any) -> tuple[int, int, list[int]]:
        engine, *_ = deepspeed.initialize(config={**CONFIG, "train_batch_size": 4}, **arguments)
        group = dist.get_process_group_ranks(groups.get_data_parallel_group())
        found = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank(), group
        engine.destroy()
        return found

    rank = dist.get_rank()
    stages = deepspeed.pipe.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], num_stages=2, loss_fn=nn.MSELoss())
    first = rank // 2 * 2
    assert place(model=stages) == (2, rank % 2, [first, first + 1])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    unit = SimpleNamespace(
        get_data_parallel_group=lambda: pairs[rank // 2],
        get_data_parallel_world_size=lambda: 2,
        get_data_parallel_rank=lambda: rank % 2,
    )
    assert place(model=nn.Linear(2, 1), mpu=unit) == (2, rank % 2, [first, first + 1])
    assert place(model=nn.Linear(2, 1)) == (4, rank, [0, 1, 2, 3])
    assert groups.get_data_parallel_group() is dist.group.WORLD
