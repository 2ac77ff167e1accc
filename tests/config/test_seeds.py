"""Configurations as articles and tutorials print them: each is accepted, or refused for the right reason.

Where an article prints only one section, the smallest rest that makes a configuration is added; where a text lost its
closing braces, they are put back.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import ConflictError, NotBuiltError

ADAM = {"type": "Adam", "params": {"lr": 5e-5}}
COMMS_LOGGER = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
ARTICLE_ZERO_3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e6,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
CHECKPOINTING = {"partition_activations": True, "contiguous_memory_optimization": True, "cpu_checkpointing": True}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
ADAMW = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def small(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, **keys}


FLOPS_PROFILER = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True}

ACCEPTED = {
    "batch only": small(),
    "optimizer": small(optimizer=ADAM),
    "stage 1": small(optimizer=ADAM, zero_optimization={"stage": 1}),
    "stage 2": small(optimizer=ADAM, zero_optimization={"stage": 2}),
    "stage 2 with small buckets": small(optimizer=ADAM, zero_optimization={"stage": 2, "reduce_bucket_size": 5e6}),
    "stage 3": small(optimizer=ADAM, zero_optimization={"stage": 3}),
    "communication log": small(optimizer=ADAM, zero_optimization={"stage": 0}, comms_logger=COMMS_LOGGER),
    "the whole script": small(
        optimizer={"type": "Adam", "params": {"lr": 1.5e-4}},
        comms_logger=COMMS_LOGGER,
        zero_optimization={"stage": 3, "reduce_bucket_size": 5e6},
    ),
    "compression": small(
        compression={
            "type": "powerSGD",
            "params": {"matrix_approximation_rank": 2, "start_compressing_after_step": 1000},
        }
    ),
    "mixed precision": small(fp16=FP16),
    "clipping": small(gradient_clipping=1.0),
    "stage 3 with AdamW": {
        "train_batch_size": 256,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
    },
    "base configuration": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "fp16": FP16,
    },
    "base configuration for a large model": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "fp16": FP16,
        "zero_optimization": {"reduce_bucket_size": 1e9, "stage3_prefetch_bucket_size": 1e9},
    },
    "offload of everything": small(zero_optimization=ARTICLE_ZERO_3),
    "recomputation": small(activation_checkpointing=CHECKPOINTING),
    "offload, recomputation and fp16": small(
        zero_optimization=ARTICLE_ZERO_3,
        activation_checkpointing=CHECKPOINTING,
        fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    ),
    "case study": {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "fp16": {"enabled": True},
    },
    "time breakdown": small(wall_clock_breakdown=True),
    "profiler": small(flops_profiler=FLOPS_PROFILER),
    "initial scale": small(fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 16}),
}

AUTOTUNING = {
    "enabled": True,
    "results_dir": None,
    "exps_dir": None,
    "overwrite": False,
    "metric": "throughput",
    "num_nodes": None,
    "num_gpus": None,
    "start_profile_step": 3,
    "end_profile_step": 5,
    "fast": True,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": None,
}
SPARSE_ATTENTION = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
}

REFUSED = {
    "autotuning": (small(autotuning=AUTOTUNING), ["autotuning.enabled"]),
    "sparse attention": (small(sparse_attention=SPARSE_ATTENTION), ["sparse_attention"]),
}

HYBRID = small(
    zero_optimization={"stage": 3},
    pipeline={"enabled": True, "partition": "uniform", "stages": 4},
    tensor_parallel={"enabled": True, "size": 2},
)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    resolution = resolve(ACCEPTED[name])
    config = resolution.config
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
    assert not resolution.warnings


def test_hybrid_parallelism_divides_the_ranks() -> None:
    config = resolve(HYBRID, world_size=8).config
    assert config.pipeline.stages == 4 and config.tensor_parallel.size == 2
    with pytest.raises(ConflictError, match=r"pipeline\.stages: is 4, but there are 2 ranks"):
        resolve(HYBRID, world_size=2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_because_it_is_not_built(name: str) -> None:
    config, paths = REFUSED[name]
    with pytest.raises(NotBuiltError) as caught:
        resolve(config, world_size=2)
    assert [problem.path for problem in caught.value.problems] == paths
    assert all("this version does not have" in problem.message for problem in caught.value.problems)


@pytest.mark.parametrize("section", ["autotuning", "flops_profiler", "pipeline", "tensor_parallel"])
def test_the_same_section_switched_off_is_accepted_and_listed(section: str) -> None:
    printed = {
        "autotuning": AUTOTUNING,
        "flops_profiler": FLOPS_PROFILER,
        "pipeline": {"partition": "uniform", "stages": 1},
        "tensor_parallel": {"size": 2},
    }
    resolution = resolve(small(**{section: {**printed[section], "enabled": False}}))
    assert [(note.path, note.reason) for note in resolution.no_effect] == [(section, "the section is switched off")]


def test_values_arrive_as_printed() -> None:
    config = resolve(ACCEPTED["the whole script"]).config
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.reduce_bucket_size == 5_000_000
    assert config.optimizer.type == "adam"
    assert config.optimizer.params == {"lr": 1.5e-4}
    assert config.comms_logger.enabled and config.comms_logger.prof_all and not config.comms_logger.verbose
    assert config.gradient_clipping == 0
