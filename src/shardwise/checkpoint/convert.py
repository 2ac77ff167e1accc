"""Converting a checkpoint of another library, on one process, without a model."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from typing import Any

from shardwise.checkpoint import directory
from shardwise.checkpoint.collect import RankSavePlan
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.checkpoint.formats.weight_files import writing
from shardwise.checkpoint.listing import StateNumbers
from shardwise.checkpoint.manifest import OPTIMIZER, PARAMETER, combine, in_order
from shardwise.checkpoint.nested_json import encode
from shardwise.checkpoint.opening import find_deepspeed
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.checkpoint.save import file_name, publish, versions
from shardwise.errors import CheckpointError, CheckpointPathError


def open_deepspeed(source: str, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Open a DeepSpeed checkpoint in directory `source`; without `tag`, `source` itself or the one in its `latest`.

    Raises:
        CheckpointPathError: there is no checkpoint of DeepSpeed.
        CheckpointError: it is incomplete, damaged, or of an unsupported kind.
    """
    path = source if tag is None else os.path.join(source, directory.check_tag(tag))
    if not os.path.isdir(path):
        raise CheckpointPathError(f"{path}: there is no such directory")
    found = find_deepspeed(source, tag)
    if found is None:
        raise CheckpointPathError(
            f"{path}: not a checkpoint of DeepSpeed: expected mp_rank_00_model_states.pt or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt. Give its directory (as runs/a/global_step100), or the one "
            "above it"
        )
    return DeepSpeedCheckpoint(found)


def convert(
    saved: DeepSpeedCheckpoint, target: str, tag: str, *, optimizer: str | None = None, with_optimizer: bool = True
) -> str:
    """Write an opened checkpoint in shardwise's format to `<target>/<tag>/`, and let `latest` name it; return its path.

    All bytes are first compared with their checksums, then ranges of mapped files are copied. The directory appears
    atomically. `optimizer` is the class of the optimizer that will continue, as `AdamW`; None: found from the state.

    Raises:
        CheckpointError: the checkpoint is damaged, the optimizer's class is ambiguous, or writing failed.
    """
    saved.check()
    described = _optimizer(saved, optimizer) if with_optimizer else None
    path = os.path.join(target, directory.check_tag(tag))
    found = saved.manifest
    with writing(path) as closing:
        draft = directory.StagingDirectory(directory.check_directory(target, "target"), tag)
        closing.callback(draft.discard)
        part = RankSavePlan(file_name(0, 1, draft.token))
        for tensor in found.tensors:
            if described is not None or not tensor.kind.startswith(OPTIMIZER):
                part.add_runs(replace(tensor, slices=()), [])
                for box, held in itertools.groupby(tensor.slices, lambda piece: piece.box):
                    part.add_runs(tensor, [(piece.start, piece.stop, saved.mapped(piece)) for piece in held], box)
        trees = {name: encode(getattr(found, name), name, part.store_tensor) for name in _TREES}
        if described is not None:
            described |= {name: encode(described[name], name, part.store_tensor) for name in ("groups", "values")}
        facts = write_tensors(os.path.join(draft.path, part.file), part.tensors)
        content = replace(
            found,
            **trees,
            optimizer=described,
            tag=tag,
            created=time.time(),
            versions={**versions(), **found.versions},
            layout={"sequence": StateNumbers().after(target), **found.layout},
            files={part.file: facts},
            tensors=in_order(combine(part.stored), [[t.name for t in found.of_kind(PARAMETER)]]),
        )
        publish(draft, content)
    return path


_TREES = ("scheduler", "scaler", "extra", "client")
"""Fields of the manifest with plain Python values."""


def _optimizer(saved: Checkpoint, name: str | None) -> dict[str, Any] | None:
    found = saved.manifest.optimizer
    if found is None:
        return None
    fix = (
        "load it into an engine with load_checkpoint(), which knows the optimizer, or leave its state out "
        "(--no-optimizer)"
    )
    if "refused" in found:
        raise CheckpointError(f"{saved.path}: {found['refused']}; {fix}")
    if name is None and found["class"] is None:
        entries = sorted({t.kind.removeprefix(OPTIMIZER) for t in saved.manifest.of_kind(OPTIMIZER)})
        raise CheckpointError(
            f"{saved.path}: the files do not name the optimizer of the state {entries}; name its class "
            f"(--optimizer AdamW), or {fix}"
        )
    return {**found, "class": name or found["class"]}
