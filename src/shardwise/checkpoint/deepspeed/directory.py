"""Which files a checkpoint of DeepSpeed has, and whether they belong together."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from shardwise.checkpoint import manifest
from shardwise.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PIPELINE = re.compile(r"layer_\d+(-model_\d+)?-model_states\.pt")


@dataclass
class Files:
    """Names of the files of one checkpoint.

    Attributes:
        shared: the file of model states that all ranks share; None at stage 3.
        model: files of model states by rank, at stage 3.
        optimizer: files of optimizer states by rank, at stages 1 to 3.
        experts: files of experts, by layer and number.
        expert_optimizer: files of optimizer states of experts by rank, at stage 0.
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
    """Whether a directory holds a checkpoint of DeepSpeed, perhaps of a kind that cannot be read, and none of ours."""
    names = _names(path)
    patterns = (_MODEL, _OPTIMIZER, _EXPERT, _EXPERT_OPTIMIZER, _PIPELINE)
    return manifest.NAME not in names and any(p.fullmatch(name) for p in patterns for name in names)


def find_files(path: str) -> Files:
    """Sort the files of a checkpoint.

    Raises:
        CheckpointError: they are of a kind that cannot be read, or of several checkpoints.
    """
    found = Files()
    names = _names(path)
    parts: set[int] = set()
    for name in names:
        if _PIPELINE.fullmatch(name):
            raise CheckpointError(
                f"{path}: {name}: a DeepSpeed checkpoint of pipeline-parallel models, which divides the model in ways "
                "of its own, and cannot be imported. Convert it to plain weights with its own tools and load those"
            )
        if (match := _MODEL.fullmatch(name)) is not None:
            parts.add(int(match.group(2)))
            if match.group(1) is None:
                found.shared = name
            else:
                found.model[int(match.group(1))] = name
        elif (match := _OPTIMIZER.fullmatch(name)) is not None:
            parts.add(int(match.group(3)))
            rank = int(match.group(2))
            if rank in found.optimizer:
                raise CheckpointError(
                    f"{path}: holds both {found.optimizer[rank]} and {name}: files of two checkpoints, one of them in "
                    "bf16. Move those that do not belong to it away"
                )
            found.optimizer[rank] = name
        elif (match := _EXPERT.fullmatch(name)) is not None:
            parts.add(int(match.group(3)))
            found.experts[int(match.group(1)), int(match.group(2))] = name
        elif (match := _EXPERT_OPTIMIZER.fullmatch(name)) is not None:
            parts.add(int(match.group(2)))
            found.expert_optimizer[int(match.group(1))] = name
    if parts - {0}:
        raise CheckpointError(
            f"{path}: a DeepSpeed checkpoint of {len(parts)} model-parallel parts (mp_rank_{max(parts):02d}). How they "
            "are to be joined is known only to the model, so it cannot be imported; merge them with the tools of the "
            "library that divided the model"
        )
    if found.shared is not None and found.model:
        raise CheckpointError(
            f"{path}: holds both {found.shared} (stages 0 to 2) and {found.model[min(found.model)]} (stage 3): files "
            "of two checkpoints. Move those that do not belong to it away"
        )
    if os.path.isdir(os.path.join(path, "offloaded_tensors")):
        raise CheckpointError(
            f"{path}: optimizer states are in offloaded_tensors/, copies of what was kept on NVMe, whose layout is not "
            "known here. Load it with DeepSpeed without NVMe offload, save it again, and import that"
        )
    return found


def check_ranks(path: str, files: dict[int, str], world: int, kind: str) -> None:
    """Check that there is a file for each of `world` ranks and for no other.

    Raises:
        CheckpointError: one is missing or too many; the message names it.
    """
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
