"""Saving: the joint action of all ranks that makes one checkpoint.

    begin      rank 0 makes a hidden directory
    collect    every rank finds what it has to write; whatever cannot be saved is refused here
    write      every rank writes its own file, and beside it what the manifest needs of it
    publish    rank 0 joins these into the manifest and renames

Each line ends with all ranks knowing that all have succeeded; otherwise all raise and rank 0 removes what was
written. Nothing that existed before is touched until the last rename. If `latest` cannot be written after it, the
error says that the checkpoint stands.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint import directory, manifest
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.collect import Part, TrainingState, add_buffers, buffer_digests, collect
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.protocols import ShardedModel
from shardwise.checkpoint.tensorfile import FileFacts
from shardwise.checkpoint.tensorwriter import write_tensors
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger


@dataclass(frozen=True)
class Request:
    """What to save and where.

    Attributes:
        directory: holds all checkpoints of a run.
        tag: name of this one.
        latest: let `latest` name it.
        excluded: indices of parameters to leave out.
        layout: facts for people: stage, dtype.
        config: the effective configuration.
        tag_validation: what to do when ranks name different tags: `ignore`, `warn` or `fail`.
    """

    directory: str
    tag: str
    latest: bool = True
    excluded: frozenset[int] = frozenset()
    layout: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tag_validation: str = "warn"


def save(model: ShardedModel, request: Request, state: TrainingState) -> str:
    """Save a checkpoint; all ranks call this together.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: it could not be saved, on all ranks alike. What existed before still does, unless the error
            says that the new checkpoint stands and only `latest` could not be written.
    """
    comm, device = model.comm, model.device
    what = f"saving checkpoint {request.tag!r} in {request.directory}"
    draft: directory.Draft | None = None
    try:
        with phase(comm, device, what) as begin:
            if comm.rank == 0:
                draft = directory.Draft(request.directory, request.tag)
            begin.said = {"tag": request.tag, "draft": [draft.path, draft.token] if draft else None}
        _compare_tags(request, [said["tag"] for said in begin.heard], comm.rank)
        path, token = begin.heard[0]["draft"]
        with phase(comm, device, what) as collected:
            part = collect(model, _file_name(comm.rank, comm.world, token), state, request.excluded)
            collected.said = buffer_digests(model)
        with phase(comm, device, what):
            add_buffers(part, model, collected.heard)
            _write(part, path, request)
        with phase(comm, device, what):
            if draft is not None:
                _publish(draft, model, request)
        draft = None
    finally:
        if draft is not None:
            draft.discard()
    return os.path.join(request.directory, begin.heard[0]["tag"])


def _compare_tags(request: Request, tags: Sequence[str], rank: int) -> None:
    """Apply `checkpoint.tag_validation`; every rank sees the same tags and does the same."""
    other = next((number for number, tag in enumerate(tags) if tag != tags[0]), None)
    if other is None or request.tag_validation == "ignore":
        return
    message = (
        f"ranks name different checkpoint tags: {tags[0]!r} on rank 0, {tags[other]!r} on rank {other}; pass the same "
        "tag on every rank"
    )
    if request.tag_validation == "fail":
        raise CheckpointError(f"{message} (checkpoint.tag_validation is 'fail')")
    if rank == 0:
        logger.warning("%s; rank 0's is used", message)


def _write(part: Part, path: str, request: Request) -> None:
    size = sum(tensor.nbytes for tensor in part.tensors.values())
    try:
        facts = write_tensors(os.path.join(path, part.file), part.tensors)
        told = {"facts": [facts.size, list(facts.checksums)], **part.to_json()}
        directory.write_file(os.path.join(path, _facts_name(part.file)), json.dumps(told).encode())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not there on this rank, although rank 0 has made it; {request.directory} must be on a file "
            "system that all ranks share"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{os.path.join(path, part.file)}: cannot be written: {error.strerror} (errno {error.errno}); this rank "
            f"needs {size / 1e6:.1f} MB, {_free(path)}. Free space or choose another directory; earlier checkpoints "
            "are unchanged"
        ) from error


def _file_name(rank: int, world: int, token: str) -> str:
    return f"rank{rank:05d}of{world:05d}-{token}.safetensors"


def _facts_name(file: str) -> str:
    return file.removesuffix(".safetensors") + ".json"


def _free(path: str) -> str:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"the free space is not known ({error.strerror})"
    return f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB are free"


def _publish(draft: directory.Draft, model: ShardedModel, request: Request) -> None:
    """Join the ranks' parts into the manifest and let the checkpoint appear (rank 0)."""
    parts, files = [], {}
    for rank in range(model.comm.world):
        file = _file_name(rank, model.comm.world, draft.token)
        path = os.path.join(draft.path, _facts_name(file))
        try:
            with open(path, "rb") as stream:
                part = json.load(stream)
            size = os.path.getsize(os.path.join(draft.path, file))
        except OSError as error:
            raise CheckpointError(
                f"{path}: written by rank {rank}, but not there on rank 0 ({error.strerror}); {request.directory} "
                "must be on a file system that all ranks share"
            ) from error
        files[file] = FileFacts(part["facts"][0], tuple(part["facts"][1]))
        if size != files[file].size:
            raise CheckpointError(f"{file}: rank {rank} wrote {files[file].size} bytes, rank 0 finds {size}")
        os.unlink(path)
        parts.append(part)
    joined = _join(model, request, parts, files)
    directory.write_file(os.path.join(draft.path, manifest.NAME), manifest.to_bytes(joined))
    try:
        draft.publish()
        if request.latest:
            directory.write_latest(request.directory, request.tag)
    except OSError as error:
        if not draft.published:
            raise
        raise CheckpointError(
            f"{draft.target}: this checkpoint is complete and stands, but what follows failed: "
            f"{error.filename or request.directory}: {error.strerror} (errno {error.errno}). "
            f"{os.path.join(request.directory, directory.LATEST)} may still name an earlier one; load this one with "
            f"tag={request.tag!r}"
        ) from error


def _join(model: ShardedModel, request: Request, parts: list[dict[str, Any]], files: dict[str, FileFacts]) -> Manifest:
    common = parts[0]["trees"]
    stored = [manifest.tensor_from_json(entry) for part in parts for entry in part["stored"]]
    order = {tensor.name: tensor.index for tensor in model.registry}
    tensors = sorted(manifest.combine(stored), key=lambda t: (t.kind, order.get(t.name, -1), t.name, t.rank or 0))
    optimizer = None
    if model.optimizer is not None:
        values = {name: value for part in parts for name, value in part["values"].items()}
        optimizer = {"class": type(model.optimizer).__name__, "groups": common["groups"], "values": values}
    return Manifest(
        tag=request.tag,
        created=time.time(),
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        layout={"world": model.comm.world, **request.layout},
        config=request.config,
        files=files,
        tensors=tensors,
        excluded=sorted(model.registry[index].name for index in request.excluded),
        optimizer=optimizer,
        scheduler=common["scheduler"],
        scaler=common["scaler"],
        counters=parts[0]["trees"]["counters"],
        ranks=[part["trees"]["rank"] for part in parts],
        extra=common["extra"],
        client=common["client"],
    )
