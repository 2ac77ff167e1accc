"""Wrong configurations: each is refused with the path of the mistake and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import BatchSizeError, ConfigError, ConflictError, NotBuiltError

ZERO = "zero_optimization"


def with_batch(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **keys}


def optimizer(type: Any, **params: Any) -> dict[str, Any]:
    return with_batch(optimizer={"type": type, "params": params})


def scheduler(type: Any, **params: Any) -> dict[str, Any]:
    return with_batch(scheduler={"type": type, "params": params})


# (configuration, path, key that the advice names)
UNKNOWN = [
    (with_batch(gradient_clipp1ng=0.1), "gradient_clipp1ng", "gradient_clipping"),
    (with_batch(zero_optimisation={"stage": 2}), "zero_optimisation", "zero_optimization"),
    (with_batch(fp61={"enabled": True}), "fp61", "fp16"),
    (with_batch(FP16={"enabled": True}), "FP16", "fp16"),
    (with_batch(bf_16={"enabled": True}), "bf_16", "bf16"),
    (with_batch(stage=2), "stage", "zero_optimization"),
    (with_batch(overlap_comm=True), "overlap_comm", "zero_optimization.overlap_comm"),
    (with_batch(loss_scale=0), "loss_scale", "fp16.loss_scale"),
    (with_batch(lr=0.1), "lr", ""),
    (with_batch(enabled=True), "enabled", "anomaly_watch.enabled"),
    (with_batch(micro_batch_size=4), "micro_batch_size", "train_micro_batch_size_per_gpu"),
    (with_batch(gradient_accumulation_step=4), "gradient_accumulation_step", "gradient_accumulation_steps"),
    (with_batch(**{"gradient-clipping": 1.0}), "gradient-clipping", "gradient_clipping"),
    (with_batch(**{ZERO: {"stagee": 2}}), f"{ZERO}.stagee", "zero_optimization.stage"),
    (with_batch(**{ZERO: {"stage_3": 2}}), f"{ZERO}.stage_3", "zero_optimization.stage"),
    (with_batch(**{ZERO: {"overlap_com": True}}), f"{ZERO}.overlap_com", "zero_optimization.overlap_comm"),
    (with_batch(**{ZERO: {"stage3_max_live_params": 1}}), f"{ZERO}.stage3_max_live_params", ""),
    (with_batch(**{ZERO: {"fp16": {}}}), f"{ZERO}.fp16", "fp16"),
    (
        with_batch(**{ZERO: {"offload_optimizer": {"devise": "none"}}}),
        f"{ZERO}.offload_optimizer.devise",
        "zero_optimization.offload_optimizer.device",
    ),
    (with_batch(fp16={"enable": True}), "fp16.enable", "fp16.enabled"),
    (with_batch(bfloat16={"enable": True}), "bfloat16.enable", "bfloat16.enabled"),
    (with_batch(bf16={"check_overflow": True}), "bf16.check_overflow", ""),
    (with_batch(compile={"enabled": True}), "compile.enabled", ""),
    (with_batch(optimizer={"types": "Adam"}), "optimizer.types", "optimizer.type"),
    (with_batch(optimizer={"type": "Adam", "lr": 1}), "optimizer.lr", "optimizer.params.lr"),
    (with_batch(timers={"throughput": {"enabledd": 1}}), "timers.throughput.enabledd", "timers.throughput.enabled"),
    (
        with_batch(tensor_parallel={"partition_config": {"layer_specs": [{}, {"pattern": []}]}}),
        "tensor_parallel.partition_config.layer_specs[1].pattern",
        "",
    ),
]

VALUES = [
    (with_batch(gradient_clipping="high"), "gradient_clipping", ""),
    (with_batch(gradient_clipping="-1.0"), "gradient_clipping", ""),
    (with_batch(gradient_clipping="inf"), "gradient_clipping", ""),
    (with_batch(gradient_clipping=-1), "gradient_clipping", ""),
    (with_batch(gradient_clipping=float("nan")), "gradient_clipping", ""),
    (with_batch(gradient_clipping=True), "gradient_clipping", ""),
    ({"train_batch_size": "8 samples"}, "train_batch_size", ""),
    ({"train_batch_size": True}, "train_batch_size", ""),
    ({"train_batch_size": 8.5}, "train_batch_size", ""),
    ({"train_batch_size": 0}, "train_batch_size", ""),
    (with_batch(gradient_accumulation_steps=-2), "gradient_accumulation_steps", ""),
    (with_batch(fp16={"enabled": "maybe"}), "fp16.enabled", ""),
    (with_batch(fp16={"enabled": 2}), "fp16.enabled", ""),
    (with_batch(fp16=True), "fp16", ""),
    (with_batch(fp16="auto"), "fp16", ""),
    (with_batch(fp16={"loss_scale": -1}), "fp16.loss_scale", ""),
    (with_batch(fp16={"loss_scale_window": 0}), "fp16.loss_scale_window", ""),
    (with_batch(**{ZERO: {"stage": 4}}), f"{ZERO}.stage", ""),
    (with_batch(**{ZERO: {"stage": True}}), f"{ZERO}.stage", ""),
    (with_batch(**{ZERO: {"stage": "4"}}), f"{ZERO}.stage", ""),
    (with_batch(**{ZERO: 2}), ZERO, ""),
    (with_batch(**{ZERO: {"reduce_bucket_size": 0}}), f"{ZERO}.reduce_bucket_size", ""),
    (with_batch(**{ZERO: {"reduce_bucket_size": 1.5}}), f"{ZERO}.reduce_bucket_size", ""),
    (with_batch(**{ZERO: {"offload_optimizer": {"device": "gpu"}}}), f"{ZERO}.offload_optimizer.device", ""),
    (with_batch(**{ZERO: {"leaf_module": {"names": 3}}}), f"{ZERO}.leaf_module.names", ""),
    (with_batch(data_types={"grad_accum_dtype": "float8"}), "data_types.grad_accum_dtype", ""),
    (with_batch(gradient_allreduce_op="avg"), "gradient_allreduce_op", ""),
    (with_batch(steps_per_print=2.5), "steps_per_print", ""),
    (with_batch(checkpoint={"tag_validation": "maybe"}), "checkpoint.tag_validation", ""),
    (with_batch(wandb={"team": 3}), "wandb.team", ""),
    (with_batch(optimizer={"type": "Adam", "params": None}), "optimizer.params", ""),
    (with_batch(optimizer=[]), "optimizer", ""),
    (with_batch(schema_version=2), "schema_version", ""),
    (with_batch(**{"$schema": 3}), "$schema", ""),
    (
        with_batch(tensor_parallel={"partition_config": {"layer_specs": [3]}}),
        "tensor_parallel.partition_config.layer_specs[0]",
        "",
    ),
]

ARGUMENTS = [
    (optimizer("AdamX"), "optimizer.type", ""),
    (optimizer("FusedAdam"), "optimizer.type", ""),
    (optimizer("DeepSpeedCPUAdam"), "optimizer.type", ""),
    (with_batch(zero={"stage": 2}), "zero", ""),
    (with_batch(mixed_precision="bf16"), "mixed_precision", ""),
    (with_batch(gradient_checkpointing=True), "gradient_checkpointing", "activation_checkpointing"),
    (with_batch(allgather_bucket_size=1), "allgather_bucket_size", "zero_optimization.allgather_bucket_size"),
    (with_batch(dataloader_settings={}), "dataloader_settings", ""),
    (optimizer("fused_adamw_bnb"), "optimizer.type", ""),
    (optimizer("LBFGS"), "optimizer.type", ""),
    (optimizer("SparseAdam"), "optimizer.type", ""),
    (optimizer(3), "optimizer.type", ""),
    (with_batch(optimizer={"params": {"lr": 0.001}}), "optimizer.params", "type"),
    (optimizer("Adam", lrr=0.001), "optimizer.params.lrr", "optimizer.params.lr"),
    (optimizer("Adam", lrr="auto"), "optimizer.params.lrr", "optimizer.params.lr"),
    (optimizer("SGD", betas=[0.9, 0.99]), "optimizer.params.betas", ""),
    (optimizer("AdamW", lr="1e-4"), "optimizer.params.lr", ""),
    (optimizer("AdamW", lr=-1), "optimizer.params.lr", ""),
    (optimizer("AdamW", lr=True), "optimizer.params.lr", ""),
    (optimizer("AdamW", betas=[0.9]), "optimizer.params.betas", ""),
    (optimizer("AdamW", betas=[0.9, 1.0]), "optimizer.params.betas", ""),
    (optimizer("AdamW", amsgrad="no"), "optimizer.params.amsgrad", ""),
    (optimizer("AdamW", max_grad_norm=1.0), "optimizer.params.max_grad_norm", "gradient_clipping"),
    (scheduler("warmupLR"), "scheduler.type", ""),
    (scheduler("Nonsense"), "scheduler.type", ""),
    (scheduler("ReduceLROnPlateau"), "scheduler.type", ""),
    (with_batch(scheduler={"params": {"warmup_num_steps": 3}}), "scheduler.params", "type"),
    (scheduler("WarmupLR", warmup_num_step=3), "scheduler.params.warmup_num_step", "scheduler.params.warmup_num_steps"),
    (scheduler("WarmupLR", warmup_num_steps=-1), "scheduler.params.warmup_num_steps", ""),
    (scheduler("WarmupLR", warmup_num_steps=2.5), "scheduler.params.warmup_num_steps", ""),
    (scheduler("WarmupLR", warmup_num_steps="10"), "scheduler.params.warmup_num_steps", ""),
    (scheduler("WarmupLR", warmup_type="cosine"), "scheduler.params.warmup_type", ""),
    (scheduler("WarmupLR", warmup_max_lr=[0.1, -1]), "scheduler.params.warmup_max_lr", ""),
    (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps", ""),
    (scheduler("OneCycle", cycle_min_lr=0.1), "scheduler.params.cycle_max_lr", ""),
    (scheduler("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.1), "scheduler.params.cycle_min_lr", ""),
    (scheduler("OneCycle", cycle_min_lr=[0.0, 0.2], cycle_max_lr=0.1), "scheduler.params.cycle_min_lr", ""),
    (
        scheduler("OneCycle", cycle_min_lr=[0.0, 0.2], cycle_max_lr=[0.1] * 3),
        "scheduler.params.cycle_min_lr",
        "scheduler.params.cycle_max_lr",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_min_mom=0.95),
        "scheduler.params.cycle_min_mom",
        "scheduler.params.cycle_max_mom",
    ),
    (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_max_mom=1.0), "scheduler.params.cycle_max_mom", ""),
    (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, decay_step_size=-1), "scheduler.params.decay_step_size", ""),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_second_step_size=-1),
        "scheduler.params.cycle_second_step_size",
        "",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_momentum="yes"),
        "scheduler.params.cycle_momentum",
        "",
    ),
    (scheduler("LRRangeTest", lr_range_test_min_lr=0), "scheduler.params.lr_range_test_min_lr", ""),
    (scheduler("LRRangeTest", lr_range_test_min_lr=[0.1, "1"]), "scheduler.params.lr_range_test_min_lr", ""),
    (scheduler("LRRangeTest", lr_range_test_step_rate=-1), "scheduler.params.lr_range_test_step_rate", ""),
    (scheduler("WarmupDecayLR", total_num_steps="auto"), "scheduler.params.total_num_steps", ""),
    (scheduler("StepLR"), "scheduler.params.step_size", ""),
    (scheduler("CosineAnnealingLR", T_max=10, eta_mim=0.1), "scheduler.params.eta_mim", "scheduler.params.eta_min"),
]

CONFLICTS = [
    (with_batch(fp16={"enabled": True}, bf16={"enabled": True}), "fp16.enabled", "bf16.enabled"),
    (with_batch(fp16={"enabled": True}, bfloat16={"enabled": True}), "fp16.enabled", "bfloat16.enabled"),
    (with_batch(data_types={"param_dtype": "bf16"}), "data_types.param_dtype", "bf16.enabled"),
    (with_batch(data_types={"param_dtype": "fp32"}, fp16={"enabled": True}), "data_types.param_dtype", ""),
    (
        with_batch(**{ZERO: {"stage": 1, "compute_grad_norm": False}}, gradient_clipping=1),
        f"{ZERO}.compute_grad_norm",
        "gradient_clipping",
    ),
    (
        with_batch(**{ZERO: {"stage": 3, "compute_grad_norm": False}}),
        f"{ZERO}.compute_grad_norm",
        "zero_optimization.stage",
    ),
    (with_batch(gradient_allreduce_op="sum", prescale_gradients=True), "gradient_allreduce_op", "prescale_gradients"),
    (
        with_batch(managed_gradient_accumulation=False, gradient_accumulation_steps=4),
        "managed_gradient_accumulation",
        "",
    ),
    (
        with_batch(managed_gradient_accumulation=False, train_micro_batch_size_per_gpu=1),
        "managed_gradient_accumulation",
        "",
    ),
    (
        with_batch(fp16={"auto_cast": True}, torch_autocast={"enabled": True, "dtype": "fp16"}),
        "fp16.auto_cast",
        "torch_autocast",
    ),
    (with_batch(data_parallel_size=4), "data_parallel_size", ""),
    (optimizer("AdamW", adam_w_mode=False), "optimizer.params.adam_w_mode", "optimizer.type"),
]

CONTRADICTIONS = [
    (
        with_batch(gradient_allreduce_op="sum", **{ZERO: {"stage": 3}}),
        "gradient_allreduce_op",
        "zero_optimization.stage",
    ),
    (with_batch(**{ZERO: {"legacy_stage1": True}}), f"{ZERO}.legacy_stage1", ""),
    (with_batch(bf16={}, bfloat16={}), "bfloat16", "bf16"),
    (
        with_batch(**{ZERO: {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}),
        f"{ZERO}.stage3_prefetch_bucket_size",
        "zero_optimization.prefetch_bucket_size",
    ),
    (
        with_batch(**{ZERO: {"cpu_offload": False, "offload_optimizer": {"device": "none"}}}),
        f"{ZERO}.cpu_offload",
        "zero_optimization.offload_optimizer.device",
    ),
    (with_batch(amp={"enabled": False, "opt_level": "auto"}, datastates_ckpt=3), "datastates_ckpt", ""),
]


def only_problem(config: dict[str, Any]) -> ConfigError:
    """Resolve and return the error, which must list exactly one problem."""
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("config", "path", "advised"),
    [*UNKNOWN, *VALUES, *ARGUMENTS, *CONFLICTS, *CONTRADICTIONS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_path_and_advice(config: dict[str, Any], path: str, advised: str) -> None:
    error = only_problem(config)
    assert error.problems[0].path == path
    assert not advised or f"`{advised}`" in error.problems[0].message
    assert f"{path}: " in str(error) and "the config dict" in str(error)
    assert isinstance(error, ValueError)


def test_a_wrong_value_is_shown_with_the_accepted_ones() -> None:
    for config, *_ in VALUES:
        assert re.search("expected .+found ", only_problem(config).problems[0].message)


@pytest.mark.parametrize("config", [row[0] for row in CONFLICTS])
def test_contradictions_of_keys_are_assertion_errors_too(config: dict[str, Any]) -> None:
    assert isinstance(only_problem(config), ConflictError)
    assert isinstance(only_problem(config), AssertionError)


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 3,
                "fp61": {},
                "gradient_clipping": "one",
                "zero_optimization": {"stagee": 1, "stage": 7},
                "optimizer": {"type": "Adam", "params": {"lrr": 1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}},
                "autotuning": {"enabled": True},
                "fp16": {"enabled": True},
                "bf16": {"enabled": True},
            }
        )
    assert {problem.path for problem in caught.value.problems} == {
        "fp61",
        "zero_optimization.stagee",
        "zero_optimization.stage",
        "gradient_clipping",
        "optimizer.params.lrr",
        "scheduler.params.warmup_num_steps",
        "autotuning.enabled",
        "fp16.enabled",
        "train_batch_size",
    }
    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith("9 problems in the config dict:\n  1. ")


def test_a_mistyped_batch_key_is_reported_once() -> None:
    error = only_problem({"train_batch_sise": 8})
    assert error.problems[0].path == "train_batch_sise"


def test_class_of_the_error_says_what_kind_of_problem_it_is() -> None:
    assert type(only_problem({"train_batch_size": 8, "autotuning": {"enabled": True}})) is NotBuiltError
    assert type(only_problem({"gradient_accumulation_steps": 8})) is BatchSizeError


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, found 0"):
        resolve({"train_batch_size": 8}, world_size=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_accumulation_steps": 10**30},
            r"gradient_accumulation_steps: .*Give at most 9223372036854775807 .64 bits",
        ),
        ({"zero_optimization": {"reduce_bucket_size": 2**63}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"reduce_bucket_size": 1e308}}, "zero_optimization.reduce_bucket_size"),
        ({"train_micro_batch_size_per_gpu": "\uff18"}, "train_micro_batch_size_per_gpu"),
        ({"memory_limits": {"host": "\uff18GB"}}, "memory_limits.host"),
        ({"memory_limits": {"host": 2**70}}, "memory_limits.host"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a\0b"}}},
            "zero_optimization.offload_param.nvme_path: .*the character NUL",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": []}}}, "scheduler.params.warmup_min_lr"),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(with_batch(**config) if "train_micro_batch_size_per_gpu" not in config else config)
