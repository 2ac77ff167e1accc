"""Publication: merging the ranks' parts to one checkpoint, on rank 0, without the model. Every rank has left two files
in the staging directory: its tensors, and their description as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.checksums import FileFacts, free_space, write_advice
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.protocols import Fetch, in_place
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from shardwise.units import format_size


def file_name(rank: int, world: int, token: str) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank{rank:05d}of{world:05d}-{token}.safetensors"


def description_name(file: str) -> str:
    """Return the name of the description of a rank's file of tensors."""
    return file.removesuffix(".safetensors") + ".json"


def _unwritable(error: OSError, path: str, file: str, size: int, fix: str) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(
            f"{path}: not there on this rank, although rank 0 has made it; {os.path.dirname(path)} must be on a file "
            "system that all ranks share, and files must not be removed while they are written"
        )
    return CheckpointError(
        f"{os.path.join(path, file)}: cannot be written: {error.strerror} (errno {error.errno}); this rank needs "
        f"{format_size(size)}, {free_space(path)}. {fix or write_advice(error)}; what was there before is unchanged"
    )


def write_part(
    path: str,
    file: str,
    tensors: Mapping[str, torch.Tensor],
    description: Mapping[str, Any],
    *,
    fetch: Fetch = in_place,
    direct: bool = False,
    over: bool = False,
    fix: str = "",
) -> list[int]:
    """Write a rank's tensors and their description (JSON with its digest) into a directory; return the bytes of both.
    `over` overwrites files in place. Raises CheckpointError, with the `fix`, if that fails.
    """
    try:
        facts = write_tensors(os.path.join(path, file), tensors, direct=direct, over=over, fetch=fetch)
        body = json.dumps({"facts": [facts.size, list(facts.checksums)], **description}).encode()
        text = _digest(body) + b"\n" + body
        with open(os.path.join(path, description_name(file)), "wb" if over else "xb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise _unwritable(error, path, file, sum(tensor.nbytes for tensor in tensors.values()), fix) from error
    return [facts.size, len(text)]


def read_description(path: str, file: str) -> bytes:
    """Return the JSON text of a part. Raises OSError; CheckpointError if it is damaged."""
    with open(os.path.join(path, description_name(file)), "rb") as stream:
        digest, _, body = stream.read().partition(b"\n")
    if digest != _digest(body):
        raise CheckpointError(f"{os.path.join(path, description_name(file))}: its description is damaged")
    return body


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def joined(draft: directory.StagingDirectory, header: Manifest) -> Manifest:
    """Return the manifest of the ranks' parts in a staging directory, and remove their descriptions.

    Raises CheckpointError if a part is missing or contradicts the others.
    """
    parts, world = {}, header.layout["world"]
    for rank in range(world):
        file = file_name(rank, world, draft.token)
        try:
            part = json.loads(read_description(draft.path, file))
            size = os.path.getsize(os.path.join(draft.path, file))
        except OSError as error:
            raise CheckpointError(
                f"{file}: written by rank {rank}, but not there on rank 0 ({error.strerror}); {draft.parent} "
                "must be on a file system that all ranks share"
            ) from error
        if size != facts_of(part).size:
            raise CheckpointError(f"{file}: rank {rank} wrote {facts_of(part).size} bytes, rank 0 finds {size}")
        parts[file] = part
    made = join(header, parts)
    for file in parts:
        os.unlink(os.path.join(draft.path, description_name(file)))
    return made


def publish(draft: directory.StagingDirectory, made: Manifest, *, latest: bool = True) -> None:
    """Write the manifest of a complete staging directory, publish the checkpoint, and let `latest` name it.

    Raises:
        CheckpointError: the checkpoint is published, and `latest` could not be written; or the save was given up.
        OSError: the checkpoint could not be published.
    """
    directory.write_file(os.path.join(draft.path, manifest.NAME), manifestfile.to_bytes(made))
    try:
        draft.publish()
        if latest:
            CheckpointDirectory(draft.parent).set_latest(made.tag, check=draft.check)
    except OSError as error:
        if not draft.published:
            raise
        raise CheckpointError(
            f"{draft.target}: this checkpoint is complete, but a later step failed: "
            f"{error.filename or draft.parent}: {error.strerror} (errno {error.errno}). "
            f"{os.path.join(draft.parent, directory.LATEST)} may still name an earlier one; load this one with "
            f"tag={made.tag!r}"
        ) from error


def facts_of(part: Mapping[str, Any]) -> FileFacts:
    """Return size and checksums of a part's file, from the part's description."""
    size, checksums = part["facts"]
    return FileFacts(size, tuple(checksums))


def join(header: Manifest, described: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """Return the manifest of the ranks' parts, by file in the order of ranks, from one without them (`header`). Raises
    CheckpointError if they contradict each other.
    """
    parts = list(described.values())
    common = parts[0]["trees"]
    stored = [tensor for part in parts for tensor in manifest.from_json(list[StoredTensor], part["stored"])]
    optimizer = None
    if header.optimizer is not None:
        values = {name: value for part in parts for name, value in part["values"].items()}
        groups = [group for part in parts for group in part["trees"]["groups"]]
        optimizer = {**header.optimizer, "groups": groups, "values": values}
    return replace(
        header,
        files={file: facts_of(part) for file, part in described.items()},
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
