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
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint import directory
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.collect import Part, TrainingState, add_shared, collect, holdings
from shardwise.checkpoint.manifest import outline
from shardwise.checkpoint.newest import StateNumbers, latest_head
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.publish import FACTS, Whole, beside, file_name, publish, unwritable
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.checkpoint.slow_io import told_if_long
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger

_JOB = secrets.token_hex(4)
"""Random name of this job: rank 0's."""
_SEEN: dict[str, tuple[str | None, int]] = {}
"""By directory: job and number of the checkpoint that `latest` named at the save before."""
_TOLD: set[tuple[str, str | None]] = set()
"""Directories, and other jobs that were found to save there."""

_MOST_NAMES = 20
"""Names of values that are not finite in the manifest."""


@dataclass(frozen=True)
class SaveRequest:
    """What to save and where.

    Attributes:
        directory: holds all checkpoints of a run.
        tag: name of this one.
        latest: let `latest` name it.
        excluded: indices of parameters to leave out.
        layout: facts for people: stage, dtype.
        config: the effective configuration.
        tag_validation: what to do when ranks name different tags: `ignore`, `warn` or `fail`.
        direct: write past the page cache where the file system can do that.
        keep_last, keep_every: which older checkpoints stay; see `shardwise.checkpoint.retention.prune`.
        check_finite: look for values that are infinite or NaN, and mark the checkpoint if there are any.
        latest_if_not_finite: let `latest` name this one even then.
        numbers: gives the state its number.
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
        """The action in words, for messages."""
        return f"saving checkpoint {self.tag!r} in {self.directory}"


@dataclass
class PendingSave:
    """A checkpoint that is about to be written.

    Attributes:
        path: directory of the draft.
        token: what tells its files from those of other saves.
        tag: name that it will have: rank 0's.
        draft: the draft itself, on rank 0.
        part: what this rank writes; what several ranks have is still to be added.
        told: what each rank has of what several may have; see `shardwise.checkpoint.collect.add_shared`.
    """

    path: str
    token: str
    tag: str
    draft: directory.StagingDirectory | None
    part: Part
    told: list[dict[str, Any]]


def save(model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> str:
    """Save a checkpoint; all ranks call this together.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: it could not be saved, on all ranks alike. What existed before still does, unless the error
            says that the new checkpoint stands and only `latest` could not be written.
    """
    comm, what = model.comm, request.what
    with drafted(model, request, state) as made:
        with phase(comm, what) as written, told_if_long(f"{what}: rank {comm.rank} writes its part"):
            add_shared(made.part, model, made.told)
            _write(made.part, made.path, request)
            written.said = made.part.not_finite
        not_finite = names_of(written.heard, request, comm.rank)
        with phase(comm, what):
            if made.draft is not None:
                with told_if_long(f"{what}: the checkpoint is published"):
                    notes = publish(made.draft, whole_of(model, request, not_finite))
                for note in notes:
                    logger.info("%s", note)
    return os.path.join(request.directory, made.tag)


@contextmanager
def drafted(model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> Iterator[PendingSave]:
    """Make a draft, and find what this rank writes into it; if the block raises, the draft is removed again.

    Raises:
        CheckpointError: the directory cannot be made, or something cannot be saved; on all ranks alike.
    """
    comm, what = model.comm, request.what
    draft: directory.StagingDirectory | None = None
    try:
        with phase(comm, what) as begin:
            if comm.rank == 0:
                draft = directory.StagingDirectory(request.directory, request.tag)
                _tell_of_another_job(request.directory)
            number = request.numbers.after(request.directory) if draft else 0
            begin.said = {"tag": request.tag, "draft": [draft.path, draft.token, number] if draft else None}
        _compare_tags(request, [said["tag"] for said in begin.heard], comm.rank)
        path, token, number = begin.heard[0]["draft"]
        request.numbers.see(number)
        model.share_changes()
        with phase(comm, what) as collected:
            file = file_name(comm.rank, comm.world, token)
            part = collect(model, file, state, request.excluded, check_finite=request.check_finite)
            collected.said = holdings(model)
        yield PendingSave(path, token, begin.heard[0]["tag"], draft, part, collected.heard)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def names_of(told: Sequence[Sequence[str]], request: SaveRequest, rank: int) -> list[str]:
    """Return what has values that are infinite or NaN, of which each rank has told, and say so once."""
    found = list(dict.fromkeys(name for names in told for name in names))
    if found and rank == 0:
        _tell_not_finite(request, found)
    return found


def _tell_not_finite(request: SaveRequest, names: Sequence[str]) -> None:
    names_it = request.latest and request.latest_if_not_finite
    logger.warning(
        "%s: values are infinite or NaN: %s. The checkpoint is marked; engine.resume() prefers the last finite one, "
        "which checkpoint.keep_last does not remove. %s",
        request.what,
        outline(names),
        f"{directory.LATEST!r} names it" if names_it else f"{directory.LATEST!r} is left as it is",
    )


def _tell_of_another_job(parent: str) -> None:
    """Log once that another job has saved into the same directory since the save before."""
    known, found = os.path.abspath(parent), latest_head(parent)
    now = (None, 0) if found is None else (found.job, found.sequence)
    before = _SEEN.get(known, now)
    _SEEN[known] = now
    if found is not None and found.job not in (None, _JOB) and before != now and (known, found.job) not in _TOLD:
        _TOLD.add((known, found.job))
        logger.warning(
            "%s: another job saves here, too: it has made %r since this one has saved or begun. %r and "
            "checkpoint.keep_last are then of both; give each job a directory of its own",
            known,
            found.tag,
            directory.LATEST,
        )


def _compare_tags(request: SaveRequest, tags: Sequence[str], rank: int) -> None:
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


def _write(part: Part, path: str, request: SaveRequest) -> None:
    size = sum(tensor.nbytes for tensor in part.tensors.values())
    try:
        facts = write_tensors(os.path.join(path, part.file), part.tensors, direct=request.direct, bring=part.bring)
        told = {"facts": [facts.size, list(facts.checksums)], **part.to_json()}
        directory.write_file(os.path.join(path, beside(part.file, FACTS)), json.dumps(told).encode())
    except OSError as error:
        raise unwritable(error, path, part.file, size) from error


def whole_of(model: CheckpointedModel, request: SaveRequest, not_finite: Sequence[str]) -> Whole:
    """Return what is known of the checkpoint besides the ranks' parts."""
    # First: these are read from the beginning of the file.
    order = {"sequence": request.numbers.value, **({} if request.latest else {"latest": False})}
    marks = {"finite": False, "not_finite": list(not_finite[:_MOST_NAMES])} if not_finite else {}
    return Whole(
        directory=request.directory,
        tag=request.tag,
        latest=request.latest and (request.latest_if_not_finite or not not_finite),
        world=model.comm.world,
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        layout={**order, **request.layout, "job": _JOB, **marks},
        config=request.config,
        optimizer=None if model.optimizer is None else type(model.optimizer).__name__,
        created=time.time(),
        keep_last=request.keep_last,
        keep_every=request.keep_every,
    )
