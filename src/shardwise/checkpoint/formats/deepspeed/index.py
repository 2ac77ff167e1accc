"""Files of a DeepSpeed checkpoint, and whether they belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.directory import holds_checkpoint
from shardwise.checkpoint.formats.deepspeed.zero_partitions import OptimizerFile
from shardwise.checkpoint.formats.torch_file import TorchFile
from shardwise.checkpoint.manifest import outline
from shardwise.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")

UNIVERSAL = "zero"
"""Directory of a universal checkpoint that has a directory for each parameter."""

_SAME = ("global_steps", "dp_world_size", "mp_world_size", "ds_version")
"""Keys of model states that are equal in all files of a checkpoint."""

_FOREIGN = "Move files that do not belong to it away"
_INCOMPLETE = "It is incomplete: saving it was interrupted, or files were not copied"


@dataclass
class Files:
    """File names of one `mp_rank_XX`: a pipeline stage or model-parallel part; usually there is one.

    `shared` is the file of model states of all ranks, which stage 3 has by rank (`model`). `optimizer` has files of
    optimizer states by rank, at stages 1 to 3. `experts` are by (layer, number), their optimizer states by rank, at
    stage 0.
    """

    shared: str | None = None
    model: dict[int, str] = field(default_factory=dict)
    optimizer: dict[int, str] = field(default_factory=dict)
    experts: dict[tuple[int, int], str] = field(default_factory=dict)
    expert_optimizer: dict[int, str] = field(default_factory=dict)


def recognised(path: str) -> bool:
    """Return True if a directory holds a checkpoint of DeepSpeed, readable or not, and none of shardwise."""
    names = _names(path)
    patterns = (_MODEL, _OPTIMIZER, _EXPERT, _EXPERT_OPTIMIZER, LAYER)
    return not holds_checkpoint(path) and any(p.fullmatch(name) for name in names for p in patterns)


def find_files(path: str) -> dict[int, Files]:
    """Return the files of each `mp_rank_XX`, by its number. Raises CheckpointError for unsupported kinds."""
    parts: dict[int, Files] = {}
    for name in _names(path):
        if match := _MODEL.fullmatch(name):
            found = parts.setdefault(int(match[2]), Files())
            if match[1] is None:
                found.shared = name
            else:
                found.model[int(match[1])] = name
        elif match := _OPTIMIZER.fullmatch(name):
            known = parts.setdefault(int(match[2]), Files()).optimizer.setdefault(int(match[1]), name)
            if known != name:
                raise CheckpointError(f"{path}: holds both {known} and {name}: files of two checkpoints. {_FOREIGN}")
        elif match := _EXPERT.fullmatch(name):
            parts.setdefault(int(match[3]), Files()).experts[int(match[1]), int(match[2])] = name
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            parts.setdefault(int(match[2]), Files()).expert_optimizer[int(match[1])] = name
    for found in parts.values():
        if found.shared is not None and found.model:
            if not is_universal(path):
                raise CheckpointError(
                    f"{path}: holds both {found.shared} (stages 0 to 2) and {found.model[min(found.model)]} (stage "
                    f"3): files of two checkpoints. {_FOREIGN}"
                )
            found.model.clear()  # the same content, which DeepSpeed reads at stage 3
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


def is_universal(path: str) -> bool:
    """Return True if a directory holds a universal checkpoint."""
    return os.path.isdir(os.path.join(path, UNIVERSAL))


def check_complete(found: Iterable[Any], expected: Iterable[Any], what: str) -> None:
    """Raise CheckpointError unless the expected numbers or names of files are there, and no other."""
    there, wanted = set(found), set(expected)
    missing, beyond = sorted(wanted - there), sorted(there - wanted)
    if missing:
        raise CheckpointError(
            f"missing: {what} {outline([str(number) for number in missing])}; {len(there)} of {len(wanted)} are there. "
            f"{_INCOMPLETE}"
        )
    if beyond:
        raise CheckpointError(
            f"holds {what} {beyond[0]}, and was saved with {len(wanted)}: files of another checkpoint. {_FOREIGN}"
        )


class OpenFiles:
    """The files of the checkpoint at `path`, opened at first use (`opened`)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.opened: dict[str, TorchFile] = {}
        self.layers = [name for name in _names(path) if LAYER.fullmatch(name)]

    def content(self, name: str) -> Mapping[str, Any]:
        """Return the dictionary in a file."""
        if name not in self.opened:
            self.opened[name] = TorchFile(os.path.join(self.path, name))
        content = self.opened[name].content
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{name}: expected a dictionary, found {type(content).__name__}")
        return content

    def model_states(self, name: str) -> Mapping[str, Any]:
        """Return the content of a file of model states."""
        content = self.content(name)
        missing = {"module", "buffer_names", "optimizer", "param_shapes", "dp_world_size", "ds_version"} - set(content)
        if missing:
            raise CheckpointError(
                f"{name}: expected the key {min(missing)!r}, found {outline(sorted(map(str, content)))}; not a file of "
                "model states, or of a version of DeepSpeed whose layout is not known (it was found with 0.19)"
            )
        return content

    def parts(self) -> list[tuple[str, Mapping[str, Any], Files]]:
        """Return the first file of model states, its content and the files of each `mp_rank_XX`, in order."""
        parts = find_files(self.path)
        found: list[tuple[str, Mapping[str, Any], Files]] = []
        for part, files in sorted(parts.items()):
            first = files.shared or (files.model[min(files.model)] if files.model else None)
            if first is None:
                raise CheckpointError(
                    f"the model states (mp_rank_{part:02d}_model_states.pt, or zero_pp_rank_0_mp_rank_{part:02d}_"
                    f"model_states.pt of stage 3) are missing. {_INCOMPLETE}"
                )
            model = self.model_states(first)
            check_complete(parts, range(int(model.get("mp_world_size", 1))), "files of mp_rank")
            found.append((first, model, files))
        if not found:
            raise CheckpointError(f"the model states (mp_rank_*_model_states.pt) are missing. {_INCOMPLETE}")
        for name, other, _ in found[1:]:
            self.compare(found[0][0], found[0][1], name, other)
        return found

    def models(self, files: Files, world: int) -> list[Mapping[str, Any]]:
        """Return the model states of all ranks of stage 3, in order."""
        check_complete(files.model, range(world), "model states of rank")
        models = [self.model_states(files.model[rank]) for rank in range(world)]
        for rank, model in enumerate(models):
            self.compare(files.model[0], models[0], files.model[rank], model)
        return models

    def compare(
        self, first: str, model: Mapping[str, Any], file: str, other: Mapping[str, Any], keys: Sequence[str] = _SAME
    ) -> None:
        """Raise CheckpointError if two files of model states (or with other `keys`) are of different checkpoints."""
        for key in keys:
            if other.get(key) != model.get(key):
                raise CheckpointError(
                    f"{file}: {key} is {other.get(key)!r}, in {first} {model.get(key)!r}: files of two checkpoints"
                )

    def optimizer_file(self, name: str) -> OptimizerFile:
        """Return a file of optimizer states."""
        return OptimizerFile(name, OptimizerFile(name, self.content(name))["optimizer_state_dict"])

    def optimizer_states(self, files: Files, world: int) -> list[OptimizerFile]:
        """Return the optimizer states of all ranks, in order."""
        check_complete(files.optimizer, range(world), "optimizer states of rank")
        ranks = [self.optimizer_file(files.optimizer[rank]) for rank in range(world)]
        for other in ranks[1:]:
            self.compare(ranks[0].file, ranks[0].content, other.file, other.content, ("zero_stage", "partition_count"))
        return ranks


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
