"""Converting a checkpoint of another library, on one process, without a model."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint import directory, manifest, manifestfile, nested_json
from shardwise.checkpoint.collect import RankSavePlan
from shardwise.checkpoint.deepspeed import DeepSpeedCheckpoint, recognised
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.checkpoint.manifest import OPTIMIZER, PARAMETER, Manifest, Slice, StoredTensor
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.safetensors_reader import FileFacts, Spec
from shardwise.checkpoint.safetensors_writer import TensorWriter, file_order
from shardwise.errors import CheckpointError, CheckpointPathError


def open_deepspeed(source: str, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Open a DeepSpeed checkpoint in directory `source`; without `tag`, `source` itself or the one in its `latest`.

    Raises:
        CheckpointPathError: there is no checkpoint of DeepSpeed.
        CheckpointError: it is incomplete, damaged, or of an unsupported kind.
    """
    if not os.path.isdir(source):
        raise CheckpointPathError(f"{source}: there is no such directory")
    if tag is None and not recognised(source):
        there = CheckpointDirectory(source)
        tag = there.latest() or there.latest(directory.LATEST_UNIVERSAL)
    path = source if tag is None else os.path.join(source, directory.check_tag(tag))
    if not recognised(path):
        if not os.path.isdir(path):
            raise CheckpointPathError(f"{path}: there is no such directory")
        raise CheckpointPathError(
            f"{path}: not a checkpoint of DeepSpeed: expected mp_rank_00_model_states.pt or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt. Give its directory (as runs/a/global_step100), or the one "
            "above it"
        )
    return DeepSpeedCheckpoint(path)


def convert(
    saved: DeepSpeedCheckpoint, target: str, tag: str, *, optimizer: str | None = None, with_optimizer: bool = True
) -> str:
    """Write an opened checkpoint in shardwise's format to `<target>/<tag>/`, and let `latest` name it; return its path.

    All bytes are first compared with their checksums, then tensors are copied one at a time. The directory appears
    atomically. `optimizer` is the class of the optimizer that will continue, as `AdamW`; None: found from the state.

    Raises:
        CheckpointError: the checkpoint is damaged, the optimizer's class is ambiguous, or writing failed.
    """
    saved.verify(saved.blocks())
    described = _optimizer(saved, optimizer) if with_optimizer else None
    tensors = [t for t in saved.manifest.tensors if described is not None or not t.kind.startswith(OPTIMIZER)]
    path = os.path.join(target, directory.check_tag(tag))
    draft: directory.StagingDirectory | None = None
    try:
        draft = directory.StagingDirectory(directory.check_directory(target, "target"), tag)
        part = RankSavePlan(f"rank00000of00001-{draft.token}.safetensors")
        trees = _trees(saved, part, described)
        stored, facts = _write(saved, draft.path, part, tensors)
        number = StateNumbers().after(target)
        made = _manifest(saved, tag, number, trees, stored, {part.file: facts})
        directory.write_file(os.path.join(draft.path, manifest.NAME), manifestfile.to_bytes(made))
        draft.publish()
        draft = None
        CheckpointDirectory(target).set_latest(tag)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be written: {error.strerror} (errno {error.errno}); what was there "
            "before is unchanged"
        ) from error
    finally:
        if draft is not None:
            draft.discard()
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


def _trees(saved: Checkpoint, part: RankSavePlan, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    old = saved.manifest
    if optimizer is not None:
        optimizer = {
            "class": optimizer["class"],
            "groups": [
                nested_json.encode(group, f"optimizer.param_groups[{number}]", part.store_tensor)
                for number, group in enumerate(optimizer["groups"])
            ],
            "values": {
                name: {
                    key: nested_json.encode(value, f"optimizer state {key!r} of {name!r}", part.store_tensor)
                    for key, value in values.items()
                }
                for name, values in optimizer["values"].items()
            },
        }
    return {
        "optimizer": optimizer,
        "scheduler": nested_json.encode(old.scheduler, "state of the learning-rate schedule", part.store_tensor),
        "scaler": nested_json.encode(old.scaler, "state of the loss scaler", part.store_tensor),
        "extra": {
            name: nested_json.encode(value, f"extra state of module {name!r}", part.store_tensor)
            for name, value in old.extra.items()
        },
        "client": nested_json.encode(old.client, "client_state", part.store_tensor),
    }


def _write(
    saved: Checkpoint, folder: str, part: RankSavePlan, tensors: list[StoredTensor]
) -> tuple[list[StoredTensor], FileFacts]:
    specs = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in part.tensors.items()}
    sources: dict[str, StoredTensor] = {}
    stored = []
    for tensor in tensors:
        key = f"{tensor.kind}/{tensor.name}" + ("" if tensor.rank is None else f"@{tensor.rank}")
        sources[key] = tensor
        specs[key] = Spec(tensor.torch_dtype, tensor.shape)
        slices = (Slice(part.file, key, 0, tensor.numel),) if tensor.numel or tensor.kind != PARAMETER else ()
        stored.append(StoredTensor(**{**vars(tensor), "slices": slices}))
    writer = TensorWriter(os.path.join(folder, part.file), specs, checksums=True)
    try:
        for key in file_order(specs):
            writer.write(key, saved.read(sources[key]) if key in sources else part.tensors[key])
    except BaseException:
        writer.abandon()
        raise
    facts = writer.close()
    assert facts is not None
    return stored, facts


def _manifest(
    saved: Checkpoint,
    tag: str,
    number: int,
    trees: dict[str, Any],
    tensors: list[StoredTensor],
    files: dict[str, FileFacts],
) -> Manifest:
    old = saved.manifest
    versions = {"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return Manifest(
        tag=tag,
        created=time.time(),
        versions={**versions, **old.versions},
        layout={"sequence": number, **old.layout},
        config=old.config,
        files=files,
        tensors=manifest.in_order(tensors, [[tensor.name for tensor in old.of_kind(PARAMETER)]]),
        counters=old.counters,
        ranks=old.ranks,
        **trees,
    )
