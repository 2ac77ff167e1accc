"""Methods of the engine that read the configuration, by the names that scripts call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.config import Resolution, resolve
from shardwise_deepspeed.getters import ConfigGetters


class Reader(ConfigGetters):
    def __init__(self, resolution: Resolution) -> None:
        self._resolution = resolution


def reader(**keys: Any) -> Any:
    return Reader(resolve({"train_batch_size": 8, **keys}))


def test_every_getter_works_on_an_empty_configuration_and_says_what_it_reads() -> None:
    engine = reader()
    names = [name for name in dir(ConfigGetters) if not name.startswith("_")]
    assert len(names) > 120
    for name in names:
        method = getattr(engine, name)
        method()
        assert method.__name__ == name
        assert method.__doc__.startswith("Return ") and method.__doc__.endswith(".")


VALUES: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "zero_optimization", False),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization", True),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization_stage", 3),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization_partition_gradients", True),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization_partition_weights", False),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization_partition_weights", True),
    ({"zero_optimization": {"reduce_bucket_size": 5e6}}, "zero_reduce_bucket_size", 5_000_000),
    ({"zero_optimization": {"max_live_parameters": 7}}, "zero_max_live_parameters", 7),
    ({}, "zero_overlap_comm", True),
    ({}, "zero_use_cpu_optimizer", False),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "zero_cpu_offload", False),
    ({}, "zero_nvme_offload_optimizer", False),
    ({}, "zero_partial_offload", 1.0),
    ({}, "zero_offload_param", None),
    ({"fp16": {"enabled": True}}, "fp16_enabled", True),
    ({"bfloat16": {"enabled": True}}, "bfloat16_enabled", True),
    ({"fp16": {"enabled": True}}, "dynamic_loss_scale", True),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "dynamic_loss_scale", False),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale", 128),
    ({"fp16": {"initial_scale_power": 4}}, "initial_dynamic_scale", 16),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "dynamic_loss_scale_args", None),
    (
        {"fp16": {"enabled": True, "hysteresis": 3}},
        "dynamic_loss_scale_args",
        {
            "init_scale": 65536,
            "scale_window": 1000,
            "delayed_shift": 3,
            "consecutive_hysteresis": False,
            "min_scale": 1.0,
        },
    ),
    ({"bf16": {"enabled": True}}, "get_data_types", (torch.bfloat16, torch.float32)),
    (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
        "get_data_types",
        (torch.float16, torch.float16),
    ),
    ({"torch_autocast": {"dtype": "half"}}, "torch_autocast_dtype", torch.float16),
    ({}, "torch_autocast_dtype", None),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "optimizer_name", "adamw"),
    ({"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}, "optimizer_params", {"lr": 0.5}),
    ({}, "optimizer_params", None),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler_name", "WarmupLR"),
    ({"gradient_clipping": 1}, "gradient_clipping", 1.0),
    ({"prescale_gradients": True}, "postscale_gradients", False),
    ({"checkpoint": {"tag_validation": "IGNORE"}}, "checkpoint_tag_validation_enabled", False),
    ({"checkpoint": {"tag_validation": "Fail"}}, "checkpoint_tag_validation_fail", True),
    ({}, "checkpoint_writer_enabled", False),
    ({}, "wall_clock_breakdown", False),
    ({"amp": {"enabled": False, "opt_level": "O2"}}, "amp_params", {"opt_level": "O2"}),
    ({}, "steps_per_print", None),
    ({"dataloader_drop_last": True}, "dataloader_drop_last", True),
    ({}, "is_elastic_model_parallel_supported", False),
]


@pytest.mark.parametrize(("keys", "name", "value"), VALUES)
def test_values(keys: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(reader(**keys), name)() == value


def test_getters_follow_a_changed_configuration() -> None:
    engine = reader()
    engine._resolution.config.gradient_clipping = 2.0
    assert engine.gradient_clipping() == 2.0
