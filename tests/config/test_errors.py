"""Wrong configurations: each is refused with the path of the mistake and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import BatchSizeError, ConfigError, ConflictError, NotBuiltError

Keys = dict[str, Any]


def config_of(keys: Keys) -> dict[str, Any]:
    """A configuration in which values stand at paths with dots."""
    source: dict[str, Any] = {} if any(key.startswith("train_") for key in keys) else {"train_batch_size": 8}
    for path, value in keys.items():
        place = source
        *above, last = path.split(".")
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return source


# Path of the mistake -> key that the advice names.
UNKNOWN = {
    "gradient_clipp1ng": "gradient_clipping",
    "zero_optimisation": "zero_optimization",
    "FP16": "fp16",
    "stage": "zero_optimization",
    "overlap_comm": "zero_optimization.overlap_comm",
    "loss_scale": "fp16.loss_scale",
    "lr": "",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient-clipping": "gradient_clipping",
    "gradient_checkpointing": "activation_checkpointing",
    "zero": "",
    "zero_optimization.stage_3": "zero_optimization.stage",
    "zero_optimization.fp16": "fp16",
    "zero_optimization.offload_optimizer.devise": "zero_optimization.offload_optimizer.device",
    "bfloat16.enable": "bfloat16.enabled",
    "compile.enabled": "",
    "optimizer.types": "optimizer.type",
    "timers.throughput.enabledd": "timers.throughput.enabled",
    "checkpoint.keeplast": "checkpoint.keep_last",
}

VALUES: list[tuple[str, Any]] = [
    *(("gradient_clipping", value) for value in ("high", "-1.0", "inf", -1, float("nan"), True)),
    *(("train_batch_size", value) for value in ("8 samples", True, 8.5, 0)),
    ("train_micro_batch_size_per_gpu", "\uff18"),
    ("fp16.enabled", "maybe"),
    ("fp16.enabled", 2),
    *(("fp16", value) for value in (True, "auto")),
    ("fp16.loss_scale", -1),
    *(("zero_optimization.stage", value) for value in (4, True, "4")),
    ("zero_optimization", 2),
    *(("zero_optimization.reduce_bucket_size", value) for value in (0, 1.5, 2**63, 1e308)),
    ("zero_optimization.offload_optimizer.device", "gpu"),
    ("zero_optimization.leaf_module.names", 3),
    ("data_types.grad_accum_dtype", "float8"),
    ("steps_per_print", 2.5),
    ("memory_limits.host", "\uff18GB"),
    ("checkpoint.tag_validation", "maybe"),
    ("checkpoint.keep_last", 0),
    ("checkpoint.memory_copies.every", 0),
    ("checkpoint.memory_copies.replicas", -1),
    ("wandb.team", 3),
    ("optimizer", []),
    ("schema_version", 2),
    ("$schema", 3),
    ("compression.type", 3),
]

# Type, argument, value -> key that the advice names.
OPTIMIZERS: list[tuple[str, str, Any, str]] = [
    ("Adam", "lrr", 0.001, "optimizer.params.lr"),
    ("SGD", "betas", [0.9, 0.99], ""),
    ("AdamW", "lr", "1e-4", ""),
    ("AdamW", "lr", True, ""),
    ("AdamW", "betas", [0.9, 1.0], ""),
    ("AdamW", "amsgrad", "no", ""),
    ("AdamW", "max_grad_norm", 1.0, "gradient_clipping"),
    ("AdamW", "adam_w_mode", False, "optimizer.type"),
]
CYCLE = {"cycle_min_lr": 0, "cycle_max_lr": 1}
SCHEDULES: list[tuple[str, Keys, str, str]] = [
    ("WarmupLR", {"warmup_num_step": 3}, "warmup_num_step", "scheduler.params.warmup_num_steps"),
    *(("WarmupLR", {"warmup_num_steps": value}, "warmup_num_steps", "") for value in (-1, 2.5, "10")),
    ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type", ""),
    ("WarmupLR", {"warmup_max_lr": [0.1, -1]}, "warmup_max_lr", ""),
    ("WarmupLR", {"warmup_min_lr": []}, "warmup_min_lr", ""),
    ("WarmupDecayLR", {}, "total_num_steps", ""),
    ("WarmupDecayLR", {"total_num_steps": "auto"}, "total_num_steps", ""),
    ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr", ""),
    ("OneCycle", {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1}, "cycle_min_lr", ""),
    (
        "OneCycle",
        {"cycle_min_lr": [0.0, 0.2], "cycle_max_lr": [0.1] * 3},
        "cycle_min_lr",
        "scheduler.params.cycle_max_lr",
    ),
    ("OneCycle", {**CYCLE, "cycle_min_mom": 0.95}, "cycle_min_mom", "scheduler.params.cycle_max_mom"),
    ("OneCycle", {**CYCLE, "decay_step_size": -1}, "decay_step_size", ""),
    ("OneCycle", {**CYCLE, "cycle_momentum": "yes"}, "cycle_momentum", ""),
    ("LRRangeTest", {"lr_range_test_min_lr": 0}, "lr_range_test_min_lr", ""),
    ("StepLR", {}, "step_size", ""),
    ("CosineAnnealingLR", {"T_max": 10, "eta_mim": 0.1}, "eta_mim", "scheduler.params.eta_min"),
]
NAMES = {
    "optimizer": ["AdamX", "FusedAdam", "LBFGS", "SparseAdam", 3],
    "scheduler": ["warmupLR", "Nonsense", "ReduceLROnPlateau"],
    "compression": ["powersdg"],
}

# Keys, path of the contradiction, key that the message names.
CONFLICTS: list[tuple[Keys, str, str]] = [
    ({"fp16.enabled": True, "bf16.enabled": True}, "fp16.enabled", "bf16.enabled"),
    ({"data_types.param_dtype": "bf16"}, "data_types.param_dtype", "bf16.enabled"),
    (
        {"zero_optimization.compute_grad_norm": False, "zero_optimization.stage": 1, "gradient_clipping": 1},
        "zero_optimization.compute_grad_norm",
        "gradient_clipping",
    ),
    ({"gradient_allreduce_op": "sum", "prescale_gradients": True}, "gradient_allreduce_op", "prescale_gradients"),
    (
        {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4},
        "managed_gradient_accumulation",
        "",
    ),
    (
        {"fp16.auto_cast": True, "torch_autocast.enabled": True, "torch_autocast.dtype": "fp16"},
        "fp16.auto_cast",
        "torch_autocast",
    ),
    ({"data_parallel_size": 4}, "data_parallel_size", ""),
    ({"checkpoint.keep_every": 5}, "checkpoint.keep_every", "checkpoint.keep_last"),
    (
        {"checkpoint.on_signal.save_dir": "a", "checkpoint.on_signal.save_on": ["SIGTERM"]},
        "checkpoint.on_signal.exit_on",
        "",
    ),
]
CONTRADICTIONS: list[tuple[Keys, str, str]] = [
    (
        {"gradient_allreduce_op": "sum", "zero_optimization.stage": 3},
        "gradient_allreduce_op",
        "zero_optimization.stage",
    ),
    ({"zero_optimization.legacy_stage1": True}, "zero_optimization.legacy_stage1", ""),
    ({"bf16": {}, "bfloat16": {}}, "bfloat16", "bf16"),
    (
        {"zero_optimization.prefetch_bucket_size": 1, "zero_optimization.stage3_prefetch_bucket_size": 1},
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.prefetch_bucket_size",
    ),
    (
        {"zero_optimization.cpu_offload": False, "zero_optimization.offload_optimizer.device": "none"},
        "zero_optimization.cpu_offload",
        "zero_optimization.offload_optimizer.device",
    ),
    ({"optimizer.params": {"lr": 0.001}}, "optimizer.params", "type"),
    ({"optimizer.type": "Adam", "optimizer.lr": 1}, "optimizer.lr", "optimizer.params.lr"),
    ({"scheduler.params": {"warmup_num_steps": 3}}, "scheduler.params", "type"),
    (
        {"tensor_parallel.partition_config": {"layer_specs": [{}, {"pattern": []}]}},
        "tensor_parallel.partition_config.layer_specs[1].pattern",
        "",
    ),
    ({"checkpoint.writer.type": "MOCK"}, "checkpoint.writer.type", ""),
    (
        {"checkpoint.writer.decoupled": True, "checkpoint.async_save": False},
        "checkpoint.writer.decoupled",
        "checkpoint.async_save",
    ),
    ({"checkpoint.on_signal": {}}, "checkpoint.on_signal.save_dir", ""),
    (
        {"checkpoint.on_signal.save_dir": "a", "checkpoint.on_signal.exit_on": ["SIGKILL"]},
        "checkpoint.on_signal.exit_on",
        "",
    ),
    ({"compression.params": {"ratio": 0.1}}, "compression.params", "type"),
    (
        {"compression.type": "topk", "compression.params": {"ration": 1}},
        "compression.params.ration",
        "compression.params.ratio",
    ),
    ({"compression.type": "topk", "compression.params": {"ratio": 0}}, "compression.params.ratio", ""),
    ({"zero_optimization.offload_optimizer.device": "cpu"}, "zero_optimization.offload_optimizer.device", ""),
    (
        {"zero_optimization.stage": 2, "zero_optimization.offload_param.device": "cpu"},
        "zero_optimization.offload_param.device",
        "",
    ),
    (
        {"zero_optimization.stage": 1, "zero_optimization.offload_optimizer.device": "nvme"},
        "zero_optimization.offload_optimizer.nvme_path",
        "",
    ),
    (
        {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "zero_optimization.offload_optimizer.ratio",
        "",
    ),
    ({"tensorboard.job_name": "a\0b"}, "tensorboard.job_name", ""),
]

CASES: list[tuple[Keys, str, str]] = [
    *(({path: {}}, path, advised) for path, advised in UNKNOWN.items()),
    *(({path: value}, path, "") for path, value in VALUES),
    *(
        ({"optimizer.type": kind, f"optimizer.params.{name}": value}, f"optimizer.params.{name}", advised)
        for kind, name, value, advised in OPTIMIZERS
    ),
    *(
        ({"scheduler.type": kind, "scheduler.params": params}, f"scheduler.params.{name}", advised)
        for kind, params, name, advised in SCHEDULES
    ),
    *(({f"{section}.type": name}, f"{section}.type", "") for section, names in NAMES.items() for name in names),
    *CONFLICTS,
    *CONTRADICTIONS,
]


def only_problem(config: dict[str, Any]) -> ConfigError:
    """Resolve and return the error, which must list exactly one problem."""
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value


@pytest.mark.parametrize(("keys", "path", "advised"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_path_and_advice(keys: Keys, path: str, advised: str) -> None:
    error = only_problem(config_of(keys))
    assert error.problems[0].path == path
    assert not advised or f"`{advised}`" in error.problems[0].message
    assert f"{path}: " in str(error) and "the config dict" in str(error)
    assert isinstance(error, ValueError)


def test_a_wrong_value_is_shown_with_the_accepted_ones() -> None:
    for path, value in VALUES:
        assert re.search("expected .+found ", only_problem(config_of({path: value})).problems[0].message), path


@pytest.mark.parametrize("keys", [row[0] for row in CONFLICTS], ids=str)
def test_contradictions_of_keys_are_assertion_errors_too(keys: Keys) -> None:
    error = only_problem(config_of(keys))
    assert isinstance(error, ConflictError) and isinstance(error, AssertionError)


def test_everything_wrong_is_reported_at_once() -> None:
    keys = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 3,
        "fp61": {},
        "zero_optimization.stagee": 1,
        "zero_optimization.stage": 7,
        "optimizer": {"type": "Adam", "params": {"lrr": 1}},
        "nebula.enabled": True,
        "fp16.enabled": True,
        "bf16.enabled": True,
    }
    with pytest.raises(ConfigError) as caught:
        resolve(config_of(keys))
    wrong = keys.keys() - {"train_micro_batch_size_per_gpu", "optimizer", "bf16.enabled"} | {"optimizer.params.lrr"}
    assert {problem.path for problem in caught.value.problems} == wrong
    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith("7 problems in the config dict:\n  1. ")


def test_class_of_the_error_says_what_kind_of_problem_it_is() -> None:
    assert type(only_problem(config_of({"nebula.enabled": True}))) is NotBuiltError
    assert type(only_problem({"gradient_accumulation_steps": 8})) is BatchSizeError
    assert only_problem({"train_batch_sise": 8}).problems[0].path == "train_batch_sise"
    with pytest.raises(ValueError, match="world_size must be at least 1, found 0"):
        resolve({"train_batch_size": 8}, world_size=0)
