"""Keys of the user that change nothing in this run, with the reason: hints for mechanisms of other libraries, keys of a
section that is off or of another ZeRO stage, compression without communication, overruled keys. They are accepted and
listed, because published configurations are full of them.
"""

from __future__ import annotations

import math
from typing import Any

from .batch import MICRO, STEPS, TRAIN
from .checks import reactions
from .conditions import value_at
from .integrations import read_by_clients
from .names import optimizer_model
from .normalize import Scan
from .problems import Note, dotted
from .schema.attention import KEYS
from .schema.root import Config
from .schema_index import Key, keys_of, walk

_STAGE = ("zero_optimization", "stage")
_OFFLOAD = ("offload_param", "offload_optimizer")
_ZEROPP = (
    ("zero_optimization", "zero_quantized_weights"),
    ("zero_optimization", "zero_quantized_gradients"),
    ("zero_optimization", "zeropp_loco_param"),
    ("registered_buffers",),
    ("float8", "all_gather"),
)


def without_effect(config: Config, found: Scan, world_size: int = 1) -> tuple[list[Note], list[Note]]:
    """Return notes on given keys that change nothing; then on those of them that a client library acts upon."""
    notes: list[Note] = []
    clients = read_by_clients(found)
    read: list[Note] = []
    listed: set[tuple[str, ...]] = set()
    for path, key in walk():
        if path not in found.given or "*" in path:
            continue
        client = clients.get(".".join(path))
        within = any(path[:depth] in listed for depth in range(1, len(path)))
        if within and client is None:
            continue
        value = value_at(config, ".".join(path))
        # A plan of the built model may choose the tier.
        off = "" if (*path, "device") in found.autos or _holds_anyway(path, config) else _switched_off(key, value)
        others = "" if _STAGE in found.autos else _other_stage(path, config)
        others = others or _nothing_travels(path, config, world_size)
        others = others or _overruled(path, config, world_size)
        reason = key.no_effect or off or others
        if reason:
            listed.add(path)
        if client is not None:
            text = f"{client}. No effect on the engine: {reason}" if reason else client
            read.append(Note(dotted(found.given[path]), _plain(value), text))
        elif reason:
            notes.append(Note(dotted(found.given[path]), _plain(value), reason))
    return [*notes, *_of_optimizer(config, found)], read


def _of_optimizer(config: Config, found: Scan) -> list[Note]:
    model = optimizer_model(config.optimizer.type) if config.optimizer.type is not None else None
    where = dotted(found.given.get(("optimizer", "params"), ("optimizer", "params")))
    keys = keys_of(model) if model is not None else {}
    given = [(name, value, keys[name].no_effect) for name, value in config.optimizer.params.items() if name in keys]
    return [Note(f"{where}.{name}", value, reason) for name, value, reason in given if reason]


def _switched_off(key: Key, value: Any) -> str:
    if key.kind != "section" or key.child is None or value is None:
        return ""
    if key.name == "compile":
        on, switch = value.deepcompile, "deepcompile"
    elif "enabled" in keys_of(key.child):
        on, switch = value.enabled is not False, "enabled"  # None: the other keys decide
    elif key.name in _OFFLOAD:
        on, switch = value.device != "none", "device"
    else:
        return ""
    others = value.model_fields_set - {switch}
    return "" if on or not others else "the section is switched off"


def _holds_anyway(path: tuple[str, ...], config: Config) -> bool:
    if path == ("activation_offload",):
        return config.activation_checkpointing.cpu_checkpointing
    if path == ("anomaly_watch",):  # the limit of rewinds
        return config.non_finite == "rewind"
    if path == ("fp16",):  # its loss scale is that of autocast
        return config.scales_loss
    return path == ("bf16",) and config.bf16.check_grad_overflow


def _other_stage(path: tuple[str, ...], config: Config) -> str:
    stage = config.zero_optimization.stage
    if path[0] != "zero_optimization" or len(path) != 2 or stage == 3:
        return ""
    belongs = path[1].startswith("stage3_") or path[1] == "leaf_module"
    return f"it belongs to stage 3, and the stage is {stage}" if belongs else ""


def _nothing_travels(path: tuple[str, ...], config: Config, world_size: int) -> str:
    if world_size > 1:
        return ""
    if path == ("compression",) and config.compression.type is not None:
        return "there is one rank, so no gradient travels"
    return "there is one rank, so nothing travels" if path in _ZEROPP and value_at(config, ".".join(path)) else ""


def _overruled(path: tuple[str, ...], config: Config, world_size: int) -> str:
    zero, sparse = config.zero_optimization, config.sparse_attention
    if path[0] in (TRAIN, MICRO, STEPS) and config.elasticity.enabled:
        return "`elasticity` chooses the batch sizes (`ignore_non_elastic_batch_info`)"
    tuning = config.autotuning
    if path == ("autotuning",) and tuning.metric_path is None and not tuning.model_info.profile:
        return "it is read by `--autotuning` of the launcher, and in the runs that the launcher starts then"
    if path[:1] == ("elasticity",) and path[1:] == ("num_gpus_per_node",) and config.elasticity.version == 0.1:
        return "it belongs to version 0.2"
    if path == ("aio",) and "nvme" not in _offloaded(config):
        return "nothing is offloaded to disk"
    if path == ("zero_optimization", "sub_group_size") and (
        zero.offload_optimizer is None or zero.offload_optimizer.device == "none"
    ):
        return "the optimizer is stepped once, on the device"
    if path[:2] == ("zero_optimization", "offload_param") and path[2:] == ("max_in_cpu",):
        return "" if zero.offload_param is None or zero.offload_param.device == "nvme" else "nothing is on disk"
    if path == ("gradient_predivide_factor",) and config.prescale_gradients:
        return "`prescale_gradients` divides by the number of ranks before the sum, so nothing is left to divide"
    if path == ("zero_optimization", "mics_hierarchical_params_gather") and zero.mics_shard_size < 1:
        return "it belongs to `zero_optimization.mics_shard_size`, which is not set"
    if path == ("float8", "all_gather") and config.float8.all_gather and zero.stage < 3:
        return "parameters are gathered at stage 3 only"
    all_ranks = zero.mics_shard_size == world_size and not zero.mics_hierarchical_params_gather
    if path == ("zero_optimization", "mics_shard_size") and all_ranks:
        return "it is the number of ranks: one group of all"
    if path == ("zero_optimization", "optimizer_over_replicas") and zero.stage == 0:
        return "stage 0 divides no optimizer state"
    saved = config.activation_checkpointing
    kept = ("activation_checkpointing", "contiguous_memory_optimization")
    if path == kept and saved.contiguous_memory_optimization and not saved.cpu_checkpointing:
        return "saved inputs stay on the device, whose allocator uses the same memory in each pass"
    moves = config.activation_offload.enabled or saved.cpu_checkpointing
    if path == ("activation_offload", "min_bytes") and not moves:
        return "no activations are moved"
    silent = not config.steps_per_print or math.isinf(config.steps_per_print)
    if path == ("timers",) and config.timers.throughput.enabled and silent:
        return "rates are printed with `steps_per_print`, which is not set"
    watch = config.anomaly_watch
    if path == ("anomaly_watch", "trace_steps") and watch.enabled and watch.trace != "after":
        return f'it belongs to `anomaly_watch.trace` "after", which is "{watch.trace}"'
    if path == ("anomaly_watch", "max_rewinds"):
        return "" if "rewind" in reactions(config).values() else 'no key requests "rewind"'
    if path == ("sparse_attention",) and sparse is not None and sparse.mode == "dense":
        return 'the mode "dense" is ordinary attention'
    if path[0] == "sparse_attention" and sparse is not None and path[1:] not in ((), ("mode",)):
        return "" if path[1] in KEYS[sparse.mode] else f'it belongs to other modes than "{sparse.mode}"'
    return ""


def _offloaded(config: Config) -> set[str]:
    zero = config.zero_optimization
    return {section.device for section in (zero.offload_param, zero.offload_optimizer) if section is not None}


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
