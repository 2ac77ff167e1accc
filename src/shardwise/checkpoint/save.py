"""Saving a checkpoint, collectively.

Rank 0 makes a hidden staging directory. Every rank collects its part, and refuses values that cannot be saved; writes
its file, and its part of the manifest as JSON. Rank 0 merges the parts to the manifest and renames.

After each step all ranks know that all have succeeded, or all raise and rank 0 removes the staging directory. Existing
files are unchanged until the last rename. If `latest` cannot be written after it, the error reports the publication.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint import directory
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import (
    RankSavePlan,
    TrainingState,
    add_replicated,
    collect,
    local_inventory,
    own_buffers,
)
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.checkpoint.manifest import Manifest, outline
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.publish import file_name, joined, publish, write_part
from shardwise.checkpoint.slow_io import warn_if_slow
from shardwise.errors import CheckpointError
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
    its path. `add_replicated` adds replicated state to this rank's `part`.
    """

    path: str
    tag: str
    token: str
    draft: directory.StagingDirectory | None
    part: RankSavePlan
    add_replicated: Callable[[], None]


def save(model: CheckpointedModel, request: SaveRequest, state: TrainingState) -> str:
    """Save a checkpoint; return its path. A collective.

    Raises CheckpointError on all ranks if saving failed. The previous state remains, unless the error reports that the
    new checkpoint is published and only `latest` could not be written.
    """
    comm, what = model.comm, request.what
    with staged(model, request, state) as made:
        with collective_step(comm, what) as written, warn_if_slow(f"{what}: rank {comm.rank} writes its part"):
            made.add_replicated()
            part = made.part
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
        part, add = collected(model, file, lambda: state, request.excluded, request.check_finite, what)
        yield PendingSave(path, begin.gathered[0]["tag"], token, draft, part, add)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def collected(
    model: CheckpointedModel,
    file: str,
    state: Callable[[], TrainingState],
    excluded: frozenset[int],
    check_finite: bool,
    what: str,
) -> tuple[RankSavePlan, Callable[[], None]]:
    """Collect this rank's part; return it with a function that adds this rank's replicated state. A collective."""
    model.share_changes()
    with collective_step(model.comm, what) as done:
        part = collect(model, file, state(), excluded, check_finite=check_finite)
        done.local = local_inventory(model)
    own = own_buffers(model, done.gathered)
    return part, functools.partial(add_replicated, part, model, done.gathered, own)


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
            "%s: values are infinite or NaN: %s. The checkpoint is marked; engine.resume() prefers the last finite "
            "one, which checkpoint.keep_last does not remove. %r %s",
            request.what,
            outline(found),
            directory.LATEST,
            "names it" if latest else "is left as it is",
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
            "%s: another job saves here, too: it has made %r since this one has saved or begun. %r and "
            "checkpoint.keep_last are then of both; give each job a directory of its own",
            path,
            found.tag,
            directory.LATEST,
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
