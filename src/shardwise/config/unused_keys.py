"""Keys of the user that change nothing in this run, with the reason: hints for mechanisms of other libraries, keys of a
section that is off or of another ZeRO stage, compression without communication, overruled keys. They are accepted and
listed, because published configurations are full of them.
"""

from __future__ import annotations

from typing import Any

from .conditions import holds, value_at
from .integrations import read_by_clients
from .names import model_of
from .normalize import Scan
from .problems import Note, dotted
from .schema.attention import KEYS
from .schema.root import Config
from .schema.tables import table
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
    model = model_of("optimizer", config.optimizer.type) if config.optimizer.type is not None else None
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
    row = table("overruled.toml").get(".".join(path))
    if row is not None and holds({"path": ".".join(path), "given": True, **row}, config):
        return str(row["reason"])
    zero, sparse = config.zero_optimization, config.sparse_attention
    all_ranks = zero.mics_shard_size == world_size and not zero.mics_hierarchical_params_gather
    if path == ("zero_optimization", "mics_shard_size") and all_ranks:
        return "it is the number of ranks: one group of all"
    if path[0] == "sparse_attention" and sparse is not None and path[1:] not in ((), ("mode",)):
        return "" if path[1] in KEYS[sparse.mode] else f'it belongs to other modes than "{sparse.mode}"'
    return ""


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
