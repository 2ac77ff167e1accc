"""Checks of combinations of keys that contradict each other. Each message names both keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from shardwise.errors import ConflictError

from . import names
from .conditions import holds
from .normalize import Scan
from .problems import Problem, dotted
from .schema.base import ConfigSection
from .schema.root import Config
from .schema.tables import table


def check_combinations(config: Config, found: Scan, world_size: int) -> list[Problem]:
    """Return every contradiction between keys."""
    return [
        *_precision(config, found),
        *_of_sections(config),
        *_budget(config),
        *_zeropp(config, world_size),
        *_groups(config, world_size),
        *_gradients(config),
        *_onebit(config),
        *_watch(config),
        *_local(config, world_size),
        *_quantized(config),
        *_pairs(config),
    ]


def check_worth_a_warning(config: Config) -> list[str]:
    """Return settings that are allowed and probably not meant."""
    warnings = []
    if config.vocabulary_size is not None and config.vocabulary_size % 8:
        padded = -(-config.vocabulary_size // 8) * 8
        warnings.append(
            f"vocabulary_size: {config.vocabulary_size} is not a multiple of 8, which is slow on tensor "
            f"cores; pad the embedding to {padded}"
        )
    schedule = config.scheduler.params
    total, warmup = schedule.get("total_num_steps"), schedule.get("warmup_num_steps")
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        warnings.append(
            f"scheduler.params.total_num_steps: {total} is less than warmup_num_steps = {warmup}, so the run "
            f"ends within the warm-up"
        )
    decays = [name for name in ("decay_lr_rate", "decay_mom_rate") if schedule.get(name)]
    if config.scheduler.type == "OneCycle" and decays and not schedule.get("decay_step_size"):
        warnings.append(
            f"scheduler.params.{decays[0]}: has no effect, because decay_step_size = 0 means no decay after the cycle"
        )
    return warnings


def _divides(path: str, size: int, world_size: int) -> Iterator[Problem]:
    if world_size % size:
        message = f"is {size}, which does not divide the number of ranks, {world_size}"
        yield Problem(path, message, ConflictError)


def precision_of(config: Config) -> str:
    """Dtype of parameters in the forward pass: fp16, bf16 or fp32."""
    if config.fp16.enabled:
        return "fp16"
    return "bf16" if config.bf16.enabled else "fp32"


def _precision(config: Config, found: Scan) -> Iterator[Problem]:
    bf16 = dotted(found.given.get(("bf16", "enabled"), ("bf16", "enabled")))
    if config.fp16.enabled and config.bf16.enabled:
        message = f"this and `{bf16}` are both true; a model has one precision, so set one to false"
        yield Problem("fp16.enabled", message, ConflictError)
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != precision_of(config):
        message = (
            f"is {wanted}, but `fp16.enabled` and `{bf16}` make it {precision_of(config)}; remove this key "
            f"or set {'both to false' if wanted == 'fp32' else f'`{wanted}.enabled` to true'}"
        )
        yield Problem("data_types.param_dtype", message, ConflictError)
    without = config.bf16.bf16_master_weights_and_grads or config.bf16.master_weights == "none"
    if without and config.bf16.bf16_optimizer_states and config.optimizer.params.get("fp32_optimizer_states") is True:
        message = "is true, but so is `optimizer.params.fp32_optimizer_states`; remove one of them"
        yield Problem("bf16.bf16_optimizer_states", message, ConflictError)
    cast = config.torch_autocast
    if cast.enabled:
        sixteen = f"{precision_of(config)}.enabled"
        if precision_of(config) != "fp32":
            written = bf16 if sixteen == "bf16.enabled" else sixteen
            message = (
                f"and `{written}` are both true; autocast computes with fp32 parameters in 16 bits, and there would be "
                f"none: set this to false, or `{written}`"
            )
            yield Problem("torch_autocast.enabled", message, ConflictError)
        if cast.dtype == "fp16" and config.fp16.auto_cast:
            message = "casts inputs of fp16 models; `torch_autocast` casts by itself, so remove this key"
            yield Problem("fp16.auto_cast", message, ConflictError)


def _of_sections(section: ConfigSection, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Yield the contradictions within each section."""
    for key, text, kind in section.contradictions(lambda name: f"`{'.'.join((*path, name))}`"):
        yield Problem(".".join((*path, key)), text, kind)
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), ConfigSection):
            yield from _of_sections(inner, (*path, name))
        elif isinstance(inner, dict):
            for given, item in inner.items():
                if isinstance(item, ConfigSection):
                    yield from _of_sections(item, (*path, name, given))


def _quantized(config: Config) -> Iterator[Problem]:
    if config.quantize_training.enabled and "weight_quantization" in config.compression_training.methods:
        message = "and `compression_training.weight_quantization` both quantize weights; keep the latter"
        yield Problem("quantize_training", message, ConflictError)


def _budget(config: Config) -> Iterator[Problem]:
    budget, limit = config.memory_budget, config.memory_limits.device
    if None not in (budget, limit) and budget != limit:
        yield Problem("memory_budget", "and `memory_limits.device` are the same limit; remove one", ConflictError)


def _zeropp(config: Config, world_size: int) -> Iterator[Problem]:
    zero = config.zero_optimization
    second, node = zero.zero_hpz_partition_size, zero.zero_node_size
    if not zero.compute_grad_norm and config.gradient_clipping > 0:
        message = (
            f"is false, but `gradient_clipping` = {config.gradient_clipping:g} needs the norm; set gradient_clipping "
            "to 0 or this key to true"
        )
        yield Problem("zero_optimization.compute_grad_norm", message, ConflictError)
    for name, size in (("zero_hpz_partition_size", second), ("zero_node_size", node or 1)):
        yield from _divides(f"zero_optimization.{name}", size, world_size)


def _groups(config: Config, world_size: int) -> Iterator[Problem]:
    zero = config.zero_optimization
    size, node, levels = zero.mics_shard_size, zero.zero_node_size, zero.mics_hierarchical_params_gather
    if size < 1 or (size == world_size and not (levels and size > 1)):
        return
    yield from _divides("zero_optimization.mics_shard_size", size, world_size)
    if levels and node is not None and size % min(node, size):
        message = f"is {size}, which is not a multiple of `zero_optimization.zero_node_size` = {node}"
        yield Problem("zero_optimization.mics_shard_size", message, ConflictError)
    for path, reason in excluded("groups", config):
        message = f"cannot be combined with `zero_optimization.mics_shard_size` = {size}: {reason}. Keep one of them"
        yield Problem(path, message, ConflictError)


def excluded(by: Literal["groups", "local_sgd"], config: Config) -> list[tuple[str, str]]:
    """Return the keys that groups of ranks with replicated state or `local_sgd` exclude, each with the reason."""
    rows = table("exclusive.toml")[by]
    return [(path, row["reason"]) for path, row in rows.items() if holds({**_condition(path), **row}, config)]


def _condition(path: str) -> dict[str, Any]:
    return {"path": path, **table("exclusive.toml")["conditions"].get(path, {})}


def _gradients(config: Config) -> Iterator[Problem]:
    factor = config.gradient_predivide_factor
    if config.gradient_allreduce_op == "sum":
        if config.zero_optimization.stage == 3:
            message = '"sum" cannot be combined with `zero_optimization.stage` 3; use "mean" or stage 0, 1 or 2'
            yield Problem("gradient_allreduce_op", message)
        if config.prescale_gradients or factor != 1:
            message = '"sum" divides by nothing; remove `prescale_gradients` and `gradient_predivide_factor`'
            yield Problem("gradient_allreduce_op", message, ConflictError)


def _onebit(config: Config) -> Iterator[Problem]:
    name = config.optimizer.type
    if name is None or not config.optimizer.is_onebit:
        return
    stage, most = config.zero_optimization.stage, names.ONEBIT_STAGES[name.lower()]
    if stage > most:
        reason = names.ONEBIT_STAGE_REASONS[most]
        message = f"is {stage}, but `optimizer.type` = {name} needs {reason}. Lower the stage or take another optimizer"
        yield Problem("zero_optimization.stage", message, ConflictError)
    if config.compression.method:
        written = config.compression.type
        message = f"is {written}, but `optimizer.type` = {name} compresses what it sends itself; remove one of them"
        yield Problem("compression.type", message, ConflictError)


def _watch(config: Config) -> Iterator[Problem]:
    if config.checkpoint.memory_copies is None:
        for path, action in config.reactions.items():
            if action == "rewind":
                message = (
                    'is "rewind", and there is nothing to go back to: add "checkpoint": {"memory_copies": {"every": '
                    '10}}, or choose "skip" or "stop"'
                )
                yield Problem(path, message, ConflictError)


def _local(config: Config, world_size: int) -> Iterator[Problem]:
    local, size = config.local_sgd, config.local_sgd.replica_size
    if not local.enabled:
        return
    yield from _divides("local_sgd.replica_size", size or 1, world_size)
    for path, reason in excluded("local_sgd", config):
        yield Problem(path, f"cannot be combined with `local_sgd`: {reason}. Keep one of them", ConflictError)


def _pairs(config: Config) -> Iterator[Problem]:
    """Yield the pairs of keys that cannot be combined."""
    for *paths, reason in table("exclusive.toml")["pairs"]:
        first, other = map(_condition, paths)
        if holds(first, config) and holds(other, config):
            fix = first.get("fix", "remove one of the two")
            yield Problem(paths[0], f"cannot be combined with `{paths[1]}`: {reason}; {fix}", ConflictError)
