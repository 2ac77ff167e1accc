"""Converting a checkpoint of another library, on one process, without a model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from shardwise.checkpoint import directory
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.checkpoint.formats.native import NativeWriter
from shardwise.checkpoint.manifest import OPTIMIZER
from shardwise.checkpoint.opening import find_deepspeed
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.weights_writer import writing
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

    All bytes are first compared with their checksums, then tensors are copied one at a time. The directory appears
    atomically. `optimizer` is the class of the optimizer that will continue, as `AdamW`; None: found from the state.

    Raises:
        CheckpointError: the checkpoint is damaged, the optimizer's class is ambiguous, or writing failed.
    """
    saved.check()
    described = _optimizer(saved, optimizer) if with_optimizer else None
    path = os.path.join(target, directory.check_tag(tag))
    tensors = [t for t in saved.manifest.tensors if described is not None or not t.kind.startswith(OPTIMIZER)]
    content = replace(saved.manifest, optimizer=described, tensors=tensors)
    with writing(path) as closing:
        writer = NativeWriter(directory.check_directory(target, "target"), tag, content)
        closing.callback(writer.abandon)
        for key, tensor in writer.order():
            writer.write(key, tensor.kind, saved.pieces(tensor))
        writer.finish()
    return path


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
