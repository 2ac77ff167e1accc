"""Saving a checkpoint, collectively.

Rank 0 makes a hidden staging directory. Every rank collects its part, and refuses values that cannot be saved; writes
its file, and its part of the manifest as JSON. Rank 0 merges the parts to the manifest and renames.

After each step all ranks know that all have succeeded, or all raise and rank 0 removes the staging directory. Existing
files are unchanged until the last rename. If `latest` cannot be written after it, the error reports the publication.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint import directory, manifest, manifestfile
from shardwise.checkpoint.agree import collective_step, warn_if_slow
from shardwise.checkpoint.checksums import FileFacts, free_space, write_advice
from shardwise.checkpoint.collect import RankSavePlan, TrainingState, add_replicated, collected
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.checkpoint.manifest import Manifest, StoredTensor, outline
from shardwise.checkpoint.protocols import CheckpointedModel, Fetch, in_place
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from shardwise.units import format_size
from shardwise.utils.logging import logger

_JOB = secrets.token_hex(4)
_JOBS: dict[str, set[str | None]] = {}
"""By directory: jobs whose checkpoints `latest` has named, at the first save or with a warning."""
MOST_NAMES = 20
"""Maximum number of not finite values named in the manifest."""


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of a save.

    Attributes:
        latest, latest_if_not_finite: let `latest` name the checkpoint; even with infinite or NaN values.
        excluded: indices of parameters to leave out.
        layout: facts for people: stage, dtype.
        tag_validation: action if ranks name different tags: `ignore`, `warn` or `fail`.
        direct: write large files past the page cache if the file system supports it.
        keep_last, keep_every: retention; see `shardwise.checkpoint.listing.CheckpointDirectory.prune`.
        check_finite: look for values that are infinite or NaN, and mark a checkpoint that has them.
        numbers: numbers of the engine's states.
    """

    directory: str
    tag: str
    latest: bool = True
    excluded: frozenset[int] = frozenset()
    layout: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tag_validation: str = "warn"
    direct: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    check_finite: bool = True
    latest_if_not_finite: bool = True
    numbers: StateNumbers = field(default_factory=StateNumbers)

    @property
    def what(self) -> str:
        """Name of the step, for messages."""
        return f"saving checkpoint {self.tag!r} in {self.directory}"


@dataclass
class PendingSave:
    """A checkpoint before it is written, under rank 0's `tag`. `draft` is the staging directory, on rank 0, and `path`
    its path. This rank's `part` is without replicated state (`add_replicated`).
    """

    path: str
    tag: str
    draft: directory.StagingDirectory | None
    part: RankSavePlan


def save(model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> str:
    """Save a checkpoint; return its path. A collective.

    Raises CheckpointError on all ranks if saving failed. The previous state remains, unless the error reports that the
    new checkpoint is published and only `latest` could not be written.
    """
    comm, what = model.comm, request.what
    with staged(model, request, state) as made:
        with collective_step(comm, what) as written, warn_if_slow(f"{what}: rank {comm.rank} writes its part"):
            part = made.part
            add_replicated(part, model)
            write_part(made.path, part.file, part.tensors, part.to_json(), fetch=part.fetch, direct=request.direct)
            written.local = part.not_finite[:MOST_NAMES]
        with collective_step(comm, what):
            if made.draft is not None:
                with warn_if_slow(f"{what}: the checkpoint is published"):
                    finish(made.draft, header_of(model, request), request, written.gathered)
    return os.path.join(request.directory, made.tag)


@contextmanager
def staged(model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> Iterator[PendingSave]:
    """Make a staging directory, and collect this rank's part; if one fails, all ranks raise and it is removed."""
    comm, what = model.comm, request.what
    draft: directory.StagingDirectory | None = None
    try:
        with collective_step(comm, what) as begin:
            if comm.rank == 0:
                draft = directory.StagingDirectory(request.directory, request.tag)
                _warn_of_another_job(request.directory)
            number = request.numbers.after(request.directory) if draft else 0
            begin.local = {"tag": request.tag, "draft": [draft.path, draft.token, number] if draft else None}
        _compare_tags(request, [entry["tag"] for entry in begin.gathered], comm.rank)
        path, token, number = begin.gathered[0]["draft"]
        request.numbers.see(number)
        file = file_name(comm.rank, comm.world, token)
        part = collected(model, file, lambda: state, request.excluded, request.check_finite, what)
        yield PendingSave(path, begin.gathered[0]["tag"], draft, part)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def finish(
    draft: directory.StagingDirectory, header: Manifest, request: SaveRequest, names: Iterable[Sequence[str]]
) -> None:
    """Merge the ranks' parts, publish the checkpoint, and remove older ones. Values of `names`, of each rank, are
    infinite or NaN: they are logged, and mark the checkpoint. See `publish` for errors.
    """
    found, latest = list(dict.fromkeys(itertools.chain.from_iterable(names))), request.latest
    if found:
        latest = latest and request.latest_if_not_finite
        header = replace(header, layout={**header.layout, "finite": False, "not_finite": found[:MOST_NAMES]})
        logger.warning(
            f"{request.what}: values are infinite or NaN: {outline(found)}. The checkpoint is marked; engine.resume() "
            "prefers the last finite one, which checkpoint.keep_last does not remove. "
            f"{directory.LATEST!r} {'names it' if latest else 'is left as it is'}"
        )
    made = joined(draft, header)
    publish(draft, made, latest=latest)
    draft.check()
    there = CheckpointDirectory(request.directory)
    for note in there.prune(made.tag, made.counters, request.keep_last, request.keep_every, finite=made.finite):
        logger.info("%s", note)


def _warn_of_another_job(parent: str) -> None:
    """Warn once if another job has saved into the same directory since this one's first save."""
    path, found = os.path.abspath(parent), CheckpointDirectory(parent).head_of_latest()
    known = _JOBS.setdefault(path, {None, _JOB, None if found is None else found.job})
    if found is not None and found.job not in known:
        known.add(found.job)
        logger.warning(
            f"{path}: another job saves here, too: it has made {found.tag!r} since this one has saved or begun. "
            f"{directory.LATEST!r} and checkpoint.keep_last are then of both; give each job a directory of its own"
        )


def _compare_tags(request: SaveRequest, tags: Sequence[str], rank: int) -> None:
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


def header_of(model: CheckpointedModel, request: SaveRequest) -> Manifest:
    """Return the manifest without the ranks' parts, of a state of now; an asynchronous save ends later."""
    order = {"sequence": request.numbers.value}  # first, because it is read from the beginning of the file
    layout = {**order, **request.layout, "job": _JOB, "world": model.comm.world}
    optimizer = None if model.optimizer is None else {"class": type(model.optimizer).__name__}
    return Manifest(request.tag, time.time(), versions(), layout, request.config, {}, [], optimizer=optimizer)


def versions() -> dict[str, str]:
    """Return the versions of shardwise, torch and Python."""
    return {"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()}


# -- parts of ranks, and their publication -----------------------------------------------------------------------------
# Every rank leaves two files in the staging directory: its tensors, and their description as JSON. Rank 0 merges the
# descriptions, without the model.


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
            part = manifestfile.parsed(read_description(draft.path, file))
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


@manifestfile.without_collections()
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
        loader=common["loader"],
        counters=common["counters"],
        ranks=[part["trees"]["rank"] for part in parts],
        extra={name: tree for part in parts for name, tree in part["trees"]["extra"].items()},
        client=common["client"],
    )
