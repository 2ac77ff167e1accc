"""The last step of a save, and what it needs to know: the ranks' parts become one checkpoint.

Every rank has left two files in the draft's directory: its tensors, and the facts about them as JSON. Joining these
needs neither the model nor torch, so it can be done by rank 0 itself or by a process that writes in the background.
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
"""Endings of the files that lie beside a rank's file until the checkpoint is published."""


@dataclass(frozen=True)
class Whole:
    """What is known of a checkpoint as a whole, besides the ranks' parts; plain JSON values.

    Attributes:
        directory: holds all checkpoints of a run.
        tag: name of this one.
        latest: let `latest` name it.
        world: number of ranks that write.
        versions, layout, config: see `shardwise.checkpoint.manifest.Manifest`.
        optimizer: class of the optimizer, or None.
        created: when the state was taken, in seconds since 1970: what goes on in the background ends later.
        keep_last, keep_every: which checkpoints stay; see `shardwise.checkpoint.retention.prune`.
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


def beside(file: str, ending: str) -> str:
    """Return the name of a file that belongs to a rank's file of tensors."""
    return file.removesuffix(".safetensors") + ending


def unwritable(error: OSError, path: str, file: str, size: int) -> CheckpointError:
    """Return the error for a file of tensors that could not be written, with what the user needs to mend it."""
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


def publish(draft: directory.StagingDirectory, whole: Whole) -> list[str]:
    """Join the ranks' parts into the manifest and let the checkpoint appear (one process does this).

    Returns:
        What there is to tell about older checkpoints.

    Raises:
        CheckpointError: a part is missing or does not fit the others, or the checkpoint stands and `latest` could not
            be written.
        OSError: the checkpoint could not be published.
    """
    parts, files = [], {}
    for rank in range(whole.world):
        file = file_name(rank, whole.world, draft.token)
        path = os.path.join(draft.path, beside(file, FACTS))
        try:
            with open(path, "rb") as stream:
                part = json.load(stream)
            size = os.path.getsize(os.path.join(draft.path, file))
        except OSError as error:
            raise CheckpointError(
                f"{path}: written by rank {rank}, but not there on rank 0 ({error.strerror}); {whole.directory} "
                "must be on a file system that all ranks share"
            ) from error
        files[file] = FileFacts(part["facts"][0], tuple(part["facts"][1]))
        if size != files[file].size:
            raise CheckpointError(f"{file}: rank {rank} wrote {files[file].size} bytes, rank 0 finds {size}")
        parts.append(part)
    joined = _join(whole, parts, files)
    for file in files:
        for ending in (FACTS, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(draft.path, beside(file, ending)))
    directory.write_file(os.path.join(draft.path, manifest.NAME), manifestfile.to_bytes(joined))
    try:
        draft.publish()
        if whole.latest:
            directory.write_latest(whole.directory, whole.tag, joined.sequence)
    except OSError as error:
        if not draft.published:
            raise
        raise CheckpointError(
            f"{draft.target}: this checkpoint is complete, but a later step failed: "
            f"{error.filename or whole.directory}: {error.strerror} (errno {error.errno}). "
            f"{os.path.join(whole.directory, directory.LATEST)} may still name an earlier one; load this one with "
            f"tag={whole.tag!r}"
        ) from error
    return prune(whole.directory, whole.tag, joined.counters, whole.keep_last, whole.keep_every, finite=joined.finite)


def stands(draft: directory.StagingDirectory) -> bool:
    """Whether a draft whose writer has ended without a word has become the checkpoint of its tag."""
    try:
        found = manifestfile.load(draft.target, read_later=False)
    except CheckpointError:
        return False
    return any(f"-{draft.token}." in file for file in found.files)


def _join(whole: Whole, parts: list[dict[str, Any]], files: dict[str, FileFacts]) -> Manifest:
    common = parts[0]["trees"]
    stored = [manifest.tensor_from_json(entry) for part in parts for entry in part["stored"]]
    optimizer = None
    if whole.optimizer is not None:
        values = {name: value for part in parts for name, value in part["values"].items()}
        groups = [group for part in parts for group in part["trees"]["groups"]]
        optimizer = {"class": whole.optimizer, "groups": groups, "values": values}
    return Manifest(
        tag=whole.tag,
        created=whole.created,
        versions=whole.versions,
        layout={**whole.layout, "world": whole.world},
        config=whole.config,
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
