"""Files of a DeepSpeed checkpoint, and whether they belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint import manifest
from shardwise.checkpoint.deepspeed import layer_files
from shardwise.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

UNIVERSAL = "zero"
"""Directory of a universal checkpoint that has a directory for each parameter."""


@dataclass
class Files:
    """File names of one model-parallel part of a checkpoint; usually there is one part. `shared` is the file of model
    states of all ranks, which stage 3 has by rank (`model`). `optimizer` has files of optimizer states by rank, at
    stages 1 to 3. `experts` are by (layer, number), their optimizer states by rank, at stage 0.
    """

    shared: str | None = None
    model: dict[int, str] = field(default_factory=dict)
    optimizer: dict[int, str] = field(default_factory=dict)
    experts: dict[tuple[int, int], str] = field(default_factory=dict)
    expert_optimizer: dict[int, str] = field(default_factory=dict)


def expert_file(layer: int, expert: int) -> str:
    """Return the name of the file of an expert."""
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def recognised(path: str) -> bool:
    """Return True if a directory holds a checkpoint of DeepSpeed, readable or not, and none of shardwise."""
    names = _names(path)
    patterns = (_MODEL, _OPTIMIZER, _EXPERT, _EXPERT_OPTIMIZER)
    return manifest.NAME not in names and any(
        layer_files.recognised(name) or any(p.fullmatch(name) for p in patterns) for name in names
    )


def is_universal(path: str) -> bool:
    """Return True if a directory holds a universal checkpoint."""
    return os.path.isdir(os.path.join(path, UNIVERSAL))


def find_layers(path: str) -> list[str]:
    """Return the names of the layer files of a checkpoint."""
    return [name for name in _names(path) if layer_files.recognised(name)]


def find_files(path: str) -> dict[int, Files]:
    """Return the files of each model-parallel part, by its number. Raises CheckpointError for unsupported kinds."""
    parts: dict[int, Files] = {}
    for name in _names(path):
        if (match := _MODEL.fullmatch(name)) is not None:
            found = parts.setdefault(int(match.group(2)), Files())
            if match.group(1) is None:
                found.shared = name
            else:
                found.model[int(match.group(1))] = name
        elif (match := _OPTIMIZER.fullmatch(name)) is not None:
            found = parts.setdefault(int(match.group(3)), Files())
            rank = int(match.group(2))
            if rank in found.optimizer:
                raise CheckpointError(
                    f"{path}: holds both {found.optimizer[rank]} and {name}: files of two checkpoints, one of them in "
                    "bf16. Move those that do not belong to it away"
                )
            found.optimizer[rank] = name
        elif (match := _EXPERT.fullmatch(name)) is not None:
            found = parts.setdefault(int(match.group(3)), Files())
            found.experts[int(match.group(1)), int(match.group(2))] = name
        elif (match := _EXPERT_OPTIMIZER.fullmatch(name)) is not None:
            found = parts.setdefault(int(match.group(2)), Files())
            found.expert_optimizer[int(match.group(1))] = name
    for found in parts.values():
        if found.shared is not None and found.model and is_universal(path):
            found.model.clear()  # the same content, which DeepSpeed reads at stage 3
        elif found.shared is not None and found.model:
            raise CheckpointError(
                f"{path}: holds both {found.shared} (stages 0 to 2) and {found.model[min(found.model)]} (stage 3): "
                "files of two checkpoints. Move those that do not belong to it away"
            )
        if found.experts and len(parts) > 1:
            raise CheckpointError(
                f"{path}: holds {found.experts[min(found.experts)]} and files of {len(parts)} model-parallel ranks "
                f"(mp_rank_{max(parts):02d}): experts of models that are divided so are not read. Save it with one "
                "model-parallel rank and import that"
            )
    if os.path.isdir(os.path.join(path, "offloaded_tensors")):
        raise CheckpointError(
            f"{path}: optimizer states are in offloaded_tensors/, copies of what was kept on NVMe, whose layout is not "
            "known here. Load it with DeepSpeed without NVMe offload, save it again, and import that"
        )
    return parts


def check_parts(path: str, parts: Mapping[int, Files], world: Any) -> None:
    """Raise CheckpointError unless there are files for each of `world` model-parallel ranks and for no other."""
    if not isinstance(world, int) or world < 1:
        raise CheckpointError(f"{path}: mp_world_size: expected a number of model-parallel ranks, found {world!r}")
    missing = sorted(set(range(world)) - set(parts))
    if missing:
        raise CheckpointError(
            f"{path}: the files of model-parallel rank {missing[0]} (*mp_rank_{missing[0]:02d}_*) are missing; it was "
            f"saved by {world} of them. It is incomplete: saving it was interrupted, or files were not copied"
        )
    beyond = sorted(set(parts) - set(range(world)))
    if beyond:
        raise CheckpointError(
            f"{path}: holds files of model-parallel rank {beyond[0]} (*mp_rank_{beyond[0]:02d}_*), but was saved by "
            f"{world} of them: files of another checkpoint. Move files that do not belong to it away"
        )


def tensor_ranks(model: Mapping[str, Any]) -> int:
    """Return the number of model-parallel ranks of each stage, from model states."""
    found = (model.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1)
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"checkpoint_parallel_dimensions: tp_degree: expected a number of ranks, found {found!r}")
    return found


def check_ranks(path: str, files: dict[int, str], world: int, kind: str) -> None:
    """Raise CheckpointError unless there is a file for each of `world` ranks and for no other."""
    missing = sorted(set(range(world)) - set(files))
    if missing:
        raise CheckpointError(
            f"{path}: the {kind} states of {'ranks' if len(missing) > 1 else 'rank'} "
            f"{manifest.outline([str(rank) for rank in missing])} are missing; it was saved by {world} ranks and has "
            f"files of {len(files)}. It is incomplete: saving it was interrupted, or files were not copied"
        )
    beyond = sorted(set(files) - set(range(world)))
    if beyond:
        raise CheckpointError(
            f"{path}: holds {files[beyond[0]]}, but was saved by {world} ranks: a file of another checkpoint. Move "
            "files that do not belong to it away"
        )


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
