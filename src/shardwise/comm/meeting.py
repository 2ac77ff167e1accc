"""The ranks of a job meet before they form a process group, so that one that does not come is named.

torch waits for all ranks without a word, for the whole limit of a collective, and then names a key of its store. Here
every rank first writes that it has come. After seconds the first that has come says for whom the ranks wait, and an
error names who has not come. A launcher that sees a rank end before that writes it into the same store, and the others
give up at once.

Because requests of all ranks for all ranks would grow with the square of their number, the first rank alone looks for
the others, and writes into the store what it finds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from shardwise.comm.rendezvous import NOTICE_S
from shardwise.errors import DesyncError, LaunchError, ShardwiseError

_POLL_S, _SLOWEST_POLL_S = 0.002, 0.25
_LATER_S = 2.0
"""Seconds after the limit from which on other ranks look for themselves, because the first may not look any more."""
_ALL, _APART = "meeting/all", "meeting/apart"
"""Keys: all have come; why they do not meet."""

_log = logging.getLogger("shardwise")


def ended_key(attempt: str, rank: int) -> str:
    """Key of the job's store under which a launcher writes how a rank has ended while others go on."""
    return f"shardwise/ended/attempt{attempt}/{rank}"


REFUSED = "meeting/refused"
"""Key under which a rank writes why it does not come."""

MEETING = "the meeting of the ranks (shardwise.initialize or init_distributed)"


def meet(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    attempt: str = "0",
    what: str = MEETING,
) -> None:
    """Wait until all ranks have come.

    Args:
        store: under a prefix that only this meeting has.
        rank: of this process.
        ranks: all that come.
        timeout: how long to wait.
        attempt: of the job, as an elastic agent counts.
        what: to which they come, in words.

    Raises:
        LaunchError: a rank has ended, or has not come in time, or the process that serves the store has gone.
        DesyncError: a rank has written `REFUSED` into the store.
    """
    if len(ranks) == 1:
        return
    try:
        _meet(store, rank, ranks, timeout, attempt, what)
    except RuntimeError as error:
        if isinstance(error, ShardwiseError):
            raise
        # torch's own text has the frames of its C++ code.
        reason = str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
        raise LaunchError(
            f"rank {rank} has lost the store in which the ranks meet, before all had come to {what}: the process that "
            f"serves it (the launcher, or rank 0 without one) has ended. See its output. ({reason})"
        ) from None


def _meet(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, attempt: str, what: str) -> None:
    began = time.monotonic()
    store.set(_came(rank), "")
    place = store.add("meeting/number", 1)
    if place == len(ranks):
        store.set(_ALL, "")
    limit = timeout.total_seconds() + (0.0 if place == 1 else _LATER_S)
    notice, pause = NOTICE_S, _POLL_S
    # Waiting for the key would have torch print a warning whenever a part of the time is over.
    while not store.check([_ALL]):
        if store.check([REFUSED]):
            raise DesyncError(f"{what}: {store.get(REFUSED).decode()}")
        if store.check([_APART]):
            raise LaunchError(store.get(_APART).decode())
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)
        waited = time.monotonic() - began
        if waited < limit and (place > 1 or pause < _SLOWEST_POLL_S):
            continue
        missing = _missing(store, ranks)
        why = _why_apart(store, ranks, missing, attempt, what, waited if waited >= limit else None)
        if why is not None:
            store.compare_set(_APART, "", why)
            raise LaunchError(why)
        if waited >= notice and missing:
            notice = 2 * waited
            _log.warning("%s not come to %s after %.0f s; the others wait", _who(missing), what, waited)


def _missing(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not come, in about as many requests as there are of them."""
    if store.check([_came(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _missing(store, ranks[:half]) + _missing(store, ranks[half:])


def _why_apart(
    store: dist.Store, ranks: Sequence[int], missing: Sequence[int], attempt: str, what: str, limit: float | None
) -> str | None:
    """Return why ranks do not meet, if they do not: one has ended, or the limit (None: there is time) is over."""
    job = store
    while isinstance(job, dist.PrefixStore):
        job = job.underlying_store
    for other in missing:
        if job.check([ended_key(attempt, other)]):
            how = job.get(ended_key(attempt, other)).decode()
            return f"rank {other} has not come to {what}: it has ended with {how}. Every rank has to call it."
    if limit is None or not missing:
        return None
    return (
        f"{_who(missing)} not come to {what} within {limit:.0f} s; {len(ranks) - len(missing)} of {len(ranks)} ranks "
        "have. Look at what they do: they stand still, load something for long, or take another way through the "
        "script. If they are only slow, raise the limit (SHARDWISE_TIMEOUT, in minutes)."
    )


def _came(rank: int) -> str:
    return f"meeting/{rank}"


def _who(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
