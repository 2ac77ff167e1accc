"""Publication: merging the ranks' parts to one checkpoint, in one process, without the model and without torch. Every
rank has left two files in the staging directory: its tensors, and their description as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.checksums import FileFacts, free_space, write_advice
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.retention import prune
from shardwise.errors import CheckpointError

FACTS = ".json"
FAILURE = ".failed"
LOCK = ".lock"
"""Suffixes of the sidecar files of a rank's file, until publication."""


@dataclass(frozen=True)
class CheckpointHeader:
    """A checkpoint's data except the ranks' parts, as plain JSON (see `shardwise.checkpoint.manifest.Manifest`,
    `shardwise.checkpoint.retention.prune`). `latest` lets `latest` name it. `optimizer` is the class, or None.
    `created` is the time of the state in seconds since 1970; an asynchronous save ends later.
    """

    directory: str
    tag: str
    latest: bool
    world: int
    versions: dict[str, str]
    layout: dict[str, Any]
    config: dict[str, Any]
    optimizer: str | None
    created: float
    keep_last: int | None = None
    keep_every: int | None = None


def file_name(rank: int, world: int, token: str) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank{rank:05d}of{world:05d}-{token}.safetensors"


def sidecar_path(file: str, ending: str) -> str:
    """Return the name of a sidecar file of a rank's file of tensors."""
    return file.removesuffix(".safetensors") + ending


def unwritable(error: OSError, path: str, file: str, size: int) -> CheckpointError:
    """Return the error for a file of tensors that could not be written, with the fix."""
    if isinstance(error, FileNotFoundError):
        parent = os.path.dirname(path)
        return CheckpointError(
            f"{path}: not there on this rank, although rank 0 has made it; {parent} must be on a file system that all "
            "ranks share, and files must not be removed while they are written"
        )
    return CheckpointError(
        f"{os.path.join(path, file)}: cannot be written: {error.strerror} (errno {error.errno}); this rank needs "
        f"{size / 1e6:.1f} MB, {free_space(path)}. {write_advice(error)}; earlier checkpoints are unchanged"
    )


def publish(draft: directory.StagingDirectory, header: CheckpointHeader) -> list[str]:
    """Merge the ranks' parts to the manifest and publish the checkpoint; return notes on older checkpoints.

    Raises:
        CheckpointError: a part is missing or contradicts the others, or the checkpoint is published and `latest` could
            not be written.
        OSError: the checkpoint could not be published.
    """
    parts, files = [], {}
    for rank in range(header.world):
        file = file_name(rank, header.world, draft.token)
        path = os.path.join(draft.path, sidecar_path(file, FACTS))
        try:
            with open(path, "rb") as stream:
                part = json.load(stream)
            size = os.path.getsize(os.path.join(draft.path, file))
        except OSError as error:
            raise CheckpointError(
                f"{path}: written by rank {rank}, but not there on rank 0 ({error.strerror}); {header.directory} "
                "must be on a file system that all ranks share"
            ) from error
        files[file] = FileFacts(part["facts"][0], tuple(part["facts"][1]))
        if size != files[file].size:
            raise CheckpointError(f"{file}: rank {rank} wrote {files[file].size} bytes, rank 0 finds {size}")
        parts.append(part)
    joined = _join(header, parts, files)
    for file in files:
        for ending in (FACTS, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(draft.path, sidecar_path(file, ending)))
    directory.write_file(os.path.join(draft.path, manifest.NAME), manifestfile.to_bytes(joined))
    try:
        draft.publish()
        if header.latest:
            directory.write_latest(header.directory, header.tag, joined.sequence)
    except OSError as error:
        if not draft.published:
            raise
        raise CheckpointError(
            f"{draft.target}: this checkpoint is complete, but a later step failed: "
            f"{error.filename or header.directory}: {error.strerror} (errno {error.errno}). "
            f"{os.path.join(header.directory, directory.LATEST)} may still name an earlier one; load this one with "
            f"tag={header.tag!r}"
        ) from error
    return prune(
        header.directory, header.tag, joined.counters, header.keep_last, header.keep_every, finite=joined.finite
    )


def is_published(draft: directory.StagingDirectory) -> bool:
    """Return True if a staging directory was published before its writer exited."""
    try:
        found = manifestfile.load(draft.target, read_later=False)
    except CheckpointError:
        return False
    return any(f"-{draft.token}." in file for file in found.files)


def _join(header: CheckpointHeader, parts: list[dict[str, Any]], files: dict[str, FileFacts]) -> Manifest:
    common = parts[0]["trees"]
    stored = [manifest.tensor_from_json(entry) for part in parts for entry in part["stored"]]
    optimizer = None
    if header.optimizer is not None:
        values = {name: value for part in parts for name, value in part["values"].items()}
        groups = [group for part in parts for group in part["trees"]["groups"]]
        optimizer = {"class": header.optimizer, "groups": groups, "values": values}
    return Manifest(
        tag=header.tag,
        created=header.created,
        versions=header.versions,
        layout={**header.layout, "world": header.world},
        config=header.config,
        files=files,
        tensors=manifest.in_order(manifest.combine(stored), [part["order"] for part in parts]),
        excluded=sorted({name for part in parts for name in part["excluded"]}),
        optimizer=optimizer,
        scheduler=common["scheduler"],
        scaler=common["scaler"],
        counters=common["counters"],
        ranks=[part["trees"]["rank"] for part in parts],
        extra={name: tree for part in parts for name, tree in part["trees"]["extra"].items()},
        client=common["client"],
    )
