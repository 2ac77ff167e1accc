"""Wrong configurations: each is refused with the path of the mistake and the way out."""

from __future__ import annotations

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


# (configuration, path, words that must be in the message)
UNKNOWN = [
    (with_batch(gradient_clipp1ng=0.1), "gradient_clipp1ng", "did you mean `gradient_clipping`?"),
    (with_batch(zero_optimisation={"stage": 2}), "zero_optimisation", f"did you mean `{ZERO}`?"),
    (with_batch(fp61={"enabled": True}), "fp61", "did you mean `fp16`?"),
    (with_batch(FP16={"enabled": True}), "FP16", "did you mean `fp16`?"),
    (with_batch(bf_16={"enabled": True}), "bf_16", "did you mean `bf16`?"),
    (with_batch(stage=2), "stage", f"belongs to section `{ZERO}`: write `{ZERO}.stage`"),
    (with_batch(overlap_comm=True), "overlap_comm", f"write `{ZERO}.overlap_comm`"),
    (with_batch(loss_scale=0), "loss_scale", "write `fp16.loss_scale`"),
    (with_batch(lr=0.1), "lr", "no key of the top level"),
    (with_batch(enabled=True), "enabled", "belongs to other sections, such as `anomaly_watch.enabled`"),
    (with_batch(micro_batch_size=4), "micro_batch_size", "`train_micro_batch_size_per_gpu`"),
    (with_batch(gradient_accumulation_step=4), "gradient_accumulation_step", "`gradient_accumulation_steps`"),
    (with_batch(**{"gradient-clipping": 1.0}), "gradient-clipping", "`gradient_clipping`"),
    (with_batch(**{ZERO: {"stagee": 2}}), f"{ZERO}.stagee", f"did you mean `{ZERO}.stage`?"),
    (with_batch(**{ZERO: {"stage_3": 2}}), f"{ZERO}.stage_3", f"`{ZERO}.stage`"),
    (with_batch(**{ZERO: {"overlap_com": True}}), f"{ZERO}.overlap_com", f"`{ZERO}.overlap_comm`"),
    (
        with_batch(**{ZERO: {"stage3_max_live_params": 1}}),
        f"{ZERO}.stage3_max_live_params",
        "stage3_max_live_parameters",
    ),
    (with_batch(**{ZERO: {"fp16": {}}}), f"{ZERO}.fp16", "belongs to the top level: write `fp16`"),
    (
        with_batch(**{ZERO: {"offload_optimizer": {"devise": "none"}}}),
        f"{ZERO}.offload_optimizer.devise",
        f"`{ZERO}.offload_optimizer.device`",
    ),
    (with_batch(fp16={"enable": True}), "fp16.enable", "did you mean `fp16.enabled`?"),
    (with_batch(bfloat16={"enable": True}), "bfloat16.enable", "did you mean `bfloat16.enabled`?"),
    (with_batch(bf16={"check_overflow": True}), "bf16.check_overflow", "bf16.check_grad_overflow"),
    (with_batch(compile={"enabled": True}), "compile.enabled", "engine.compile()"),
    (with_batch(optimizer={"types": "Adam"}), "optimizer.types", "`optimizer.type`"),
    (with_batch(optimizer={"type": "Adam", "lr": 1}), "optimizer.lr", "only `optimizer.params.lr` is read"),
    (with_batch(timers={"throughput": {"enabledd": 1}}), "timers.throughput.enabledd", "`timers.throughput.enabled`"),
    (
        with_batch(tensor_parallel={"partition_config": {"layer_specs": [{}, {"pattern": []}]}}),
        "tensor_parallel.partition_config.layer_specs[1].pattern",
        "layer_specs[1].patterns`",
    ),
]

VALUES = [
    (with_batch(gradient_clipping="high"), "gradient_clipping", 'a number >= 0, found "high" (string)'),
    (with_batch(gradient_clipping="-1.0"), "gradient_clipping", 'a number >= 0, found "-1.0" (string)'),
    (with_batch(gradient_clipping="inf"), "gradient_clipping", 'found "inf" (string)'),
    (with_batch(gradient_clipping=-1), "gradient_clipping", ">= 0, found -1"),
    (with_batch(gradient_clipping=float("nan")), "gradient_clipping", "found NaN"),
    (with_batch(gradient_clipping=True), "gradient_clipping", "found true"),
    ({"train_batch_size": "8 samples"}, "train_batch_size", "an integer > 0"),
    ({"train_batch_size": True}, "train_batch_size", "found true"),
    ({"train_batch_size": 8.5}, "train_batch_size", "Write 8 or 9"),
    ({"train_batch_size": 0}, "train_batch_size", "an integer > 0"),
    (with_batch(gradient_accumulation_steps=-2), "gradient_accumulation_steps", "an integer > 0"),
    (with_batch(fp16={"enabled": "maybe"}), "fp16.enabled", 'true or false, found "maybe"'),
    (with_batch(fp16={"enabled": 2}), "fp16.enabled", "true or false, found 2"),
    (with_batch(fp16=True), "fp16", 'Write {"enabled": true}'),
    (with_batch(fp16="auto"), "fp16", 'an object {...}, found "auto"'),
    (with_batch(fp16={"loss_scale": -1}), "fp16.loss_scale", "a number >= 0"),
    (with_batch(fp16={"loss_scale_window": 0}), "fp16.loss_scale_window", "an integer > 0"),
    (with_batch(**{ZERO: {"stage": 4}}), f"{ZERO}.stage", "one of 0, 1, 2, 3, found 4"),
    (with_batch(**{ZERO: {"stage": True}}), f"{ZERO}.stage", "one of 0, 1, 2, 3, found true"),
    (with_batch(**{ZERO: {"stage": "4"}}), f"{ZERO}.stage", 'one of 0, 1, 2, 3, found "4" (string)'),
    (with_batch(**{ZERO: 2}), ZERO, "an object {...}, found 2"),
    (with_batch(**{ZERO: {"reduce_bucket_size": 0}}), f"{ZERO}.reduce_bucket_size", "an integer > 0"),
    (with_batch(**{ZERO: {"reduce_bucket_size": 1.5}}), f"{ZERO}.reduce_bucket_size", "Write 1 or 2"),
    (
        with_batch(**{ZERO: {"offload_optimizer": {"device": "gpu"}}}),
        f"{ZERO}.offload_optimizer.device",
        'one of "none", "cpu", "nvme", found "gpu" (string). Did you mean "cpu"?',
    ),
    (with_batch(**{ZERO: {"leaf_module": {"names": 3}}}), f"{ZERO}.leaf_module.names", "a string or a list of strings"),
    (with_batch(data_types={"grad_accum_dtype": "float8"}), "data_types.grad_accum_dtype", '"fp32"'),
    (with_batch(gradient_allreduce_op="avg"), "gradient_allreduce_op", 'one of "mean", "sum"'),
    (with_batch(steps_per_print=2.5), "steps_per_print", "an integer >= 0 or infinity or null"),
    (with_batch(checkpoint={"tag_validation": "maybe"}), "checkpoint.tag_validation", '"warn"'),
    (with_batch(wandb={"team": 3}), "wandb.team", "a string or null, found 3"),
    (with_batch(optimizer={"type": "Adam", "params": None}), "optimizer.params", "an object {...}, found null"),
    (with_batch(optimizer=[]), "optimizer", "found [] (list)"),
    (with_batch(schema_version=2), "schema_version", "expected 1, found 2"),
    (with_batch(**{"$schema": 3}), "$schema", "address of a JSON Schema"),
    (
        with_batch(tensor_parallel={"partition_config": {"layer_specs": [3]}}),
        "tensor_parallel.partition_config.layer_specs[0]",
        "an object {...}, found 3",
    ),
]

ARGUMENTS = [
    (optimizer("AdamX"), "optimizer.type", 'did you mean "Adamax"?'),
    (optimizer("FusedAdam"), "optimizer.type", 'did you mean "Adam"?'),
    (optimizer("DeepSpeedCPUAdam"), "optimizer.type", 'did you mean "Adam"?'),
    (with_batch(zero={"stage": 2}), "zero", "write that"),
    (with_batch(mixed_precision="bf16"), "mixed_precision", "write one of them"),
    (with_batch(gradient_checkpointing=True), "gradient_checkpointing", "`activation_checkpointing` sets its options"),
    (with_batch(allgather_bucket_size=1), "allgather_bucket_size", f"write `{ZERO}.allgather_bucket_size`"),
    (with_batch(dataloader_settings={}), "dataloader_settings", "no key of the top level"),
    (optimizer("fused_adamw_bnb"), "optimizer.type", "known: Adadelta, Adafactor, Adagrad, adagrad, Adam, adam, "),
    (optimizer("LBFGS"), "optimizer.type", "several times per step"),
    (optimizer("SparseAdam"), "optimizer.type", "sparse gradients"),
    (optimizer(3), "optimizer.type", "a string or null, found 3"),
    (with_batch(optimizer={"params": {"lr": 1e-3}}), "optimizer.params", "has no `type`"),
    (optimizer("Adam", lrr=1e-3), "optimizer.params.lrr", "did you mean `optimizer.params.lr`?"),
    (optimizer("Adam", lrr="auto"), "optimizer.params.lrr", "did you mean `optimizer.params.lr`?"),
    (optimizer("SGD", betas=[0.9, 0.99]), "optimizer.params.betas", "SGD has no such argument"),
    (optimizer("AdamW", lr="1e-4"), "optimizer.params.lr", "Remove the quotes: 0.0001"),
    (optimizer("AdamW", lr=-1), "optimizer.params.lr", "a number >= 0"),
    (optimizer("AdamW", lr=True), "optimizer.params.lr", "a number"),
    (optimizer("AdamW", betas=[0.9]), "optimizer.params.betas", "two numbers in [0, 1)"),
    (optimizer("AdamW", betas=[0.9, 1.0]), "optimizer.params.betas", "two numbers in [0, 1)"),
    (optimizer("AdamW", amsgrad="no"), "optimizer.params.amsgrad", "true or false"),
    (optimizer("AdamW", max_grad_norm=1.0), "optimizer.params.max_grad_norm", "`gradient_clipping`"),
    (scheduler("warmupLR"), "scheduler.type", 'did you mean "WarmupLR"?'),
    (scheduler("Nonsense"), "scheduler.type", "known: "),
    (scheduler("ReduceLROnPlateau"), "scheduler.type", "needs a metric"),
    (with_batch(scheduler={"params": {"warmup_num_steps": 3}}), "scheduler.params", "has no `type`"),
    (
        scheduler("WarmupLR", warmup_num_step=3),
        "scheduler.params.warmup_num_step",
        "`scheduler.params.warmup_num_steps`",
    ),
    (scheduler("WarmupLR", warmup_num_steps=-1), "scheduler.params.warmup_num_steps", "an integer >= 0, found -1"),
    (scheduler("WarmupLR", warmup_num_steps=2.5), "scheduler.params.warmup_num_steps", "an integer >= 0"),
    (scheduler("WarmupLR", warmup_num_steps="10"), "scheduler.params.warmup_num_steps", "Remove the quotes: 10"),
    (scheduler("WarmupLR", warmup_type="cosine"), "scheduler.params.warmup_type", 'one of "log", "linear"'),
    (scheduler("WarmupLR", warmup_max_lr=[0.1, -1]), "scheduler.params.warmup_max_lr", "numbers >= 0"),
    (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps", "WarmupDecayLR needs this argument"),
    (scheduler("OneCycle", cycle_min_lr=0.1), "scheduler.params.cycle_max_lr", "OneCycle needs this argument"),
    (scheduler("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.1), "scheduler.params.cycle_min_lr", "is above"),
    (scheduler("OneCycle", cycle_min_lr=[0.0, 0.2], cycle_max_lr=0.1), "scheduler.params.cycle_min_lr", "is above"),
    (
        scheduler("OneCycle", cycle_min_lr=[0.0, 0.2], cycle_max_lr=[0.1] * 3),
        "scheduler.params.cycle_min_lr",
        "has 2 values and `scheduler.params.cycle_max_lr` 3",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_min_mom=0.95),
        "scheduler.params.cycle_min_mom",
        "above `scheduler.params.cycle_max_mom` = 0.9",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_max_mom=1.0),
        "scheduler.params.cycle_max_mom",
        ">= 0 and < 1",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, decay_step_size=-1),
        "scheduler.params.decay_step_size",
        "integer >= 0, found -1",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_second_step_size=-1),
        "scheduler.params.cycle_second_step_size",
        "integer >= 0 or null, found -1",
    ),
    (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_momentum="yes"),
        "scheduler.params.cycle_momentum",
        "true or false",
    ),
    (
        scheduler("LRRangeTest", lr_range_test_min_lr=0),
        "scheduler.params.lr_range_test_min_lr",
        "a number > 0 or a list of numbers > 0, found 0",
    ),
    (
        scheduler("LRRangeTest", lr_range_test_min_lr=[0.1, "1"]),
        "scheduler.params.lr_range_test_min_lr",
        "numbers > 0",
    ),
    (
        scheduler("LRRangeTest", lr_range_test_step_rate=-1),
        "scheduler.params.lr_range_test_step_rate",
        "number >= 0",
    ),
    (
        scheduler("WarmupDecayLR", total_num_steps="auto"),
        "scheduler.params.total_num_steps",
        "needs total_num_steps, a fact",
    ),
    (scheduler("StepLR"), "scheduler.params.step_size", "StepLR needs this argument"),
    (
        scheduler("CosineAnnealingLR", T_max=10, eta_mim=0.1),
        "scheduler.params.eta_mim",
        "`scheduler.params.eta_min`",
    ),
]

CONFLICTS = [
    (with_batch(fp16={"enabled": True}, bf16={"enabled": True}), "fp16.enabled", "`bf16.enabled`"),
    (with_batch(fp16={"enabled": True}, bfloat16={"enabled": True}), "fp16.enabled", "`bfloat16.enabled`"),
    (
        with_batch(data_types={"param_dtype": "bf16"}),
        "data_types.param_dtype",
        "make it fp32; remove this key or set `bf16.enabled`",
    ),
    (
        with_batch(data_types={"param_dtype": "fp32"}, fp16={"enabled": True}),
        "data_types.param_dtype",
        "set both to false",
    ),
    (
        with_batch(**{ZERO: {"stage": 1, "compute_grad_norm": False}}, gradient_clipping=1),
        f"{ZERO}.compute_grad_norm",
        "`gradient_clipping` = 1",
    ),
    (
        with_batch(**{ZERO: {"stage": 3, "compute_grad_norm": False}}),
        f"{ZERO}.compute_grad_norm",
        f"`{ZERO}.stage` 1 and 2",
    ),
    (with_batch(gradient_allreduce_op="sum", prescale_gradients=True), "gradient_allreduce_op", "`prescale_gradients`"),
    (
        with_batch(managed_gradient_accumulation=False, gradient_accumulation_steps=4),
        "managed_gradient_accumulation",
        "Let the script count: gradient_accumulation_steps = 1 and train_batch_size = 2",
    ),
    (
        with_batch(managed_gradient_accumulation=False, train_micro_batch_size_per_gpu=1),
        "managed_gradient_accumulation",
        "= 8 (8 = 1 x 8 x 1 ranks)",
    ),
    (
        with_batch(fp16={"auto_cast": True}, torch_autocast={"enabled": True, "dtype": "fp16"}),
        "fp16.auto_cast",
        "`torch_autocast` casts by itself",
    ),
    (with_batch(data_parallel_size=4), "data_parallel_size", "there are 1 ranks"),
    (optimizer("AdamW", adam_w_mode=False), "optimizer.params.adam_w_mode", "`optimizer.type` AdamW"),
]

CONTRADICTIONS = [
    (with_batch(gradient_allreduce_op="sum", **{ZERO: {"stage": 3}}), "gradient_allreduce_op", f"`{ZERO}.stage` 3"),
    (with_batch(**{ZERO: {"legacy_stage1": True}}), f"{ZERO}.legacy_stage1", "no longer exists"),
    (with_batch(bf16={}, bfloat16={}), "bfloat16", "another name of `bf16`"),
    (
        with_batch(**{ZERO: {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}),
        f"{ZERO}.stage3_prefetch_bucket_size",
        f"another name of `{ZERO}.prefetch_bucket_size`",
    ),
    (
        with_batch(**{ZERO: {"cpu_offload": False, "offload_optimizer": {"device": "none"}}}),
        f"{ZERO}.cpu_offload",
        f"old form of `{ZERO}.offload_optimizer.device`",
    ),
    (with_batch(amp={"enabled": False, "opt_level": "auto"}, datastates_ckpt=3), "datastates_ckpt", "an object"),
]


def only_problem(config: dict[str, Any]) -> ConfigError:
    """Resolve and return the error, which must list exactly one problem."""
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [*UNKNOWN, *VALUES, *ARGUMENTS, *CONFLICTS, *CONTRADICTIONS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_path_and_advice(config: dict[str, Any], path: str, words: str) -> None:
    error = only_problem(config)
    assert error.problems[0].path == path
    assert words in error.problems[0].message
    assert f"{path}: " in str(error) and "the config dict" in str(error)
    assert isinstance(error, ValueError)


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
