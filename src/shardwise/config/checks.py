"""Checks of combinations of keys that contradict each other. Each message names both keys."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import ConflictError

from . import names
from .normalize import Scan
from .problems import Problem, dotted
from .schema.root import Config
from .schema.zero import ZeroConfig


def check_combinations(config: Config, found: Scan, world_size: int) -> list[Problem]:
    """Return every contradiction between keys."""
    return [
        *_precision(config, found),
        *_zero(config),
        *_zeropp(config, world_size),
        *_groups(config, world_size),
        *_gradients(config),
        *_onebit(config),
        *_checkpoint(config),
        *_ranks(config, world_size),
        *_checkpoints(config, found),
        *_watch(config),
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
    yield from _masters(config, found)
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
        if cast.dtype == "fp32":
            message = 'is "fp32", which autocast does not cast to; write "bf16" or "fp16", or switch autocast off'
            yield Problem("torch_autocast.dtype", message, ConflictError)
        if cast.dtype == "fp16" and config.fp16.auto_cast:
            message = "casts inputs of fp16 models; `torch_autocast` casts by itself, so remove this key"
            yield Problem("fp16.auto_cast", message, ConflictError)
        if config.amp.enabled:
            message = "and `amp.enabled` are both true; keep `torch_autocast`, which needs nothing but torch"
            yield Problem("torch_autocast.enabled", message, ConflictError)
    if config.amp.enabled and (config.fp16.enabled or config.bf16.enabled or config.zero_optimization.stage):
        message = (
            f"cannot be combined with `fp16.enabled`, `{bf16}` and `zero_optimization.stage` above 0; keep one of them"
        )
        yield Problem("amp.enabled", message, ConflictError)


def _masters(config: Config, found: Scan) -> Iterator[Problem]:
    bf16 = config.bf16
    without = bf16.bf16_master_weights_and_grads or bf16.master_weights == "none"
    if (
        bf16.bf16_master_weights_and_grads
        and bf16.master_weights == "fp32"
        and ("bf16", "master_weights") in found.given
    ):
        message = 'is "fp32", but `bf16.bf16_master_weights_and_grads` = true means "none"; remove one of them'
        yield Problem("bf16.master_weights", message, ConflictError)
    if bf16.rounding is not None and not without:
        message = (
            f'is "{bf16.rounding}", but fp32 master weights are not rounded; set `bf16.master_weights` to "none", or '
            "remove this key"
        )
        yield Problem("bf16.rounding", message, ConflictError)
    if bf16.bf16_optimizer_states and not without:
        message = (
            'needs `bf16.bf16_master_weights_and_grads` to be true, or `bf16.master_weights` to be "none"; with fp32 '
            "master weights write `optimizer.params.fp32_optimizer_states` = false"
        )
        yield Problem("bf16.bf16_optimizer_states", message, ConflictError)
    elif bf16.bf16_optimizer_states and config.optimizer.params.get("fp32_optimizer_states") is True:
        message = "is true, but so is `optimizer.params.fp32_optimizer_states`; remove one of them"
        yield Problem("bf16.bf16_optimizer_states", message, ConflictError)


def _offload(zero: ZeroConfig) -> Iterator[Problem]:
    sections = {"offload_optimizer": (zero.offload_optimizer, 1), "offload_param": (zero.offload_param, 3)}
    for name, (section, least) in sections.items():
        if section is None or section.device == "none":
            continue
        at = f"zero_optimization.{name}"
        if zero.stage < least:
            message = (
                f"is {section.device}, which needs `zero_optimization.stage` {least}{'' if least == 3 else ' or more'}"
                f", found {zero.stage}. Set the stage to {least} (on one rank, too), or remove the section"
            )
            yield Problem(f"{at}.device", message, ConflictError)
        kinds = {"device": section.device, "gradients": getattr(section, "gradients", None)}
        on_disk = [key for key, place in kinds.items() if place == "nvme"]
        if on_disk and not _names_directory(section.nvme_path):
            message = f"is not set, but `{on_disk[0]}` is nvme: name a directory on a fast disk, or write cpu"
            yield Problem(f"{at}.nvme_path", message)


def _names_directory(path: str | None) -> bool:
    return path not in (None, "", "none", "None")


def _zero(config: Config) -> Iterator[Problem]:
    zero = config.zero_optimization
    if zero.legacy_stage1:
        yield Problem("zero_optimization.legacy_stage1", "the old stage 1 no longer exists; remove the key")
    yield from _offload(zero)
    offload = zero.offload_optimizer
    if offload is not None and offload.device != "none" and offload.ratio < 1 and zero.stage != 3:
        message = f"is {offload.ratio:g}; below 1 it needs `zero_optimization.stage` 3, found {zero.stage}"
        yield Problem("zero_optimization.offload_optimizer.ratio", message, ConflictError)
    if not zero.compute_grad_norm:
        if config.gradient_clipping > 0:
            message = (
                f"is false, but `gradient_clipping` = {config.gradient_clipping:g} needs the norm; "
                f"set gradient_clipping to 0 or this key to true"
            )
            yield Problem("zero_optimization.compute_grad_norm", message, ConflictError)
        if zero.stage not in (1, 2):
            message = f"false is for `zero_optimization.stage` 1 and 2, found {zero.stage}; remove the key"
            yield Problem("zero_optimization.compute_grad_norm", message, ConflictError)


def _zeropp(config: Config, world_size: int) -> Iterator[Problem]:
    zero = config.zero_optimization
    second, node = zero.zero_hpz_partition_size, zero.zero_node_size
    for name, requested, what in (
        ("zero_quantized_weights", zero.zero_quantized_weights, "gathers of sharded parameters"),
        ("zero_hpz_partition_size", second > 1, "gathers of sharded parameters"),
        ("zero_quantized_gradients", zero.zero_quantized_gradients, "ZeRO++; `compression` is for the other stages"),
    ):
        if requested and zero.stage != 3:
            message = f"is for `zero_optimization.stage` 3 ({what}), found {zero.stage}; remove the key or use stage 3"
            yield Problem(f"zero_optimization.{name}", message, ConflictError)
    hops = zero.zero_quantized_gradients or zero.mics_hierarchical_params_gather
    for name, given, on, what in (
        ("zeropp_loco_param", zero.zeropp_loco_param, zero.zero_quantized_gradients, "which is off"),
        ("zero_node_size", node, hops, "and `mics_hierarchical_params_gather`, which are off"),
    ):
        if given is not None and not on:
            message = f"is for `zero_optimization.zero_quantized_gradients`, {what}; remove the key or switch it on"
            yield Problem(f"zero_optimization.{name}", message, ConflictError)
    if zero.zero_quantized_weights and config.torch_autocast.enabled:
        reason = "which keeps fp32 parameters for exact gathers"
        message = f"cannot be combined with `torch_autocast.enabled`, {reason}; keep one of them"
        yield Problem("zero_optimization.zero_quantized_weights", message, ConflictError)
    for name, size in (("zero_hpz_partition_size", second), ("zero_node_size", node or 1)):
        if world_size % size:
            message = f"is {size}, which does not divide the number of ranks, {world_size}"
            yield Problem(f"zero_optimization.{name}", message, ConflictError)


def _groups(config: Config, world_size: int) -> Iterator[Problem]:
    zero = config.zero_optimization
    size, node, levels = zero.mics_shard_size, zero.zero_node_size, zero.mics_hierarchical_params_gather
    if size < -1 or size == 0:
        yield Problem("zero_optimization.mics_shard_size", f"is {size}; write a number of ranks, or -1 for all of them")
    if size < 1 or (size == world_size and not (levels and size > 1)):
        return
    if world_size % size:
        message = f"is {size}, which does not divide the number of ranks, {world_size}"
        yield Problem("zero_optimization.mics_shard_size", message, ConflictError)
    if levels and node is not None and size % min(node, size):
        message = f"is {size}, which is not a multiple of `zero_optimization.zero_node_size` = {node}"
        yield Problem("zero_optimization.mics_shard_size", message, ConflictError)
    for path, reason in not_in_groups(config):
        message = f"cannot be combined with `zero_optimization.mics_shard_size` = {size}: {reason}. Keep one of them"
        yield Problem(path, message, ConflictError)


def not_in_groups(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that groups of ranks with replicated state exclude, each with the reason."""
    zero = config.zero_optimization
    exchange = "it exchanges gradients among all ranks at once"
    if zero.zero_hpz_partition_size > 1:
        yield "zero_optimization.zero_hpz_partition_size", "each group of ranks has all parameters already"
    if zero.zero_quantized_gradients:
        yield "zero_optimization.zero_quantized_gradients", exchange
    if zero.zero_quantized_weights and zero.mics_hierarchical_params_gather:
        yield "zero_optimization.zero_quantized_weights", "codes are gathered in one level"
    if (config.compression.type or "none").lower() != "none":
        yield "compression.type", exchange
    if (config.optimizer.type or "").lower() in names.ONEBIT_OPTIMIZERS:
        yield "optimizer.type", exchange


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
    if name is None or name.lower() not in names.ONEBIT_OPTIMIZERS:
        return
    stage, most = config.zero_optimization.stage, names.ONEBIT_STAGES[name.lower()]
    if stage > most:
        reason = names.ONEBIT_STAGE_REASONS[most]
        message = f"is {stage}, but `optimizer.type` = {name} needs {reason}. Lower the stage or take another optimizer"
        yield Problem("zero_optimization.stage", message, ConflictError)
    compression = config.compression.type
    if compression is not None and compression.lower() != "none":
        message = f"is {compression}, but `optimizer.type` = {name} compresses what it sends itself; remove one of them"
        yield Problem("compression.type", message, ConflictError)


def _checkpoint(config: Config) -> Iterator[Problem]:
    options = config.checkpoint.on_signal
    if options is None:
        return
    if options.save_dir is None:
        message = "is missing; name the directory in which checkpoints are saved when a signal comes"
        yield Problem("checkpoint.on_signal.save_dir", message)
    both = sorted(set(options.exit_on) & set(options.save_on))
    if both:
        message = (
            f"has {both[0]}, and so has `checkpoint.on_signal.save_on`; the job cannot both end and go on after a "
            "signal, so leave it in one of them"
        )
        yield Problem("checkpoint.on_signal.exit_on", message, ConflictError)
    if not options.exit_on and not options.save_on:
        message = "names no signal in `exit_on` and none in `save_on`; name one, or remove the section"
        yield Problem("checkpoint.on_signal", message)


def _watch(config: Config) -> Iterator[Problem]:
    watch = config.anomaly_watch
    asking = {"non_finite": config.non_finite}
    if watch.enabled:
        asking |= {
            "anomaly_watch.loss_spike": watch.loss_spike,
            "anomaly_watch.grad_norm_spike": watch.grad_norm_spike,
        }
    if config.checkpoint.memory_copies is None:
        for path, action in asking.items():
            if action == "rewind":
                message = (
                    'is "rewind", and there is nothing to go back to: add "checkpoint": {"memory_copies": {"every": '
                    '10}}, or choose "skip" or "stop"'
                )
                yield Problem(path, message, ConflictError)
    if watch.min_steps > watch.window:
        message = (
            f"is {watch.min_steps}, and no more than `anomaly_watch.window` = {watch.window} steps are ever compared, "
            "so no value would be judged; lower it or widen the window"
        )
        yield Problem("anomaly_watch.min_steps", message, ConflictError)


def _ranks(config: Config, world_size: int) -> Iterator[Problem]:
    wanted = config.data_parallel_size
    if wanted is not None and wanted != world_size and config.sequence_parallel_size * config.tensor_parallel.size == 1:
        message = f"is {wanted}, but there are {world_size} ranks; remove the key or start {wanted} ranks"
        yield Problem("data_parallel_size", message, ConflictError)


def _checkpoints(config: Config, found: Scan) -> Iterator[Problem]:
    saving = config.checkpoint
    if saving.keep_every is not None and saving.keep_last is None:
        message = (
            f"is {saving.keep_every} and keeps checkpoints in addition to the newest, but without "
            "`checkpoint.keep_last` all stay; add it or remove this key"
        )
        yield Problem("checkpoint.keep_every", message, ConflictError)
    if saving.writer is None:
        return
    if saving.writer.type == "mock":
        message = 'is "mock", which writes nothing; a checkpoint that is not there cannot be loaded, so remove the key'
        yield Problem("checkpoint.writer.type", message)
    if saving.writer.decoupled and not saving.async_save and ("checkpoint", "async_save") in found.given:
        message = "is true, but `checkpoint.async_save` is false; both mean saves in the background, so remove one"
        yield Problem("checkpoint.writer.decoupled", message, ConflictError)
