"""Agreement of ranks on small facts: what each has to say, and whether all have succeeded.

Saving and loading are joint actions, and any rank's part may fail (a full disk, a damaged file). If the failing rank
simply raised, the others would wait for it for ever. So each phase ends with an exchange of outcomes, after
which all ranks go on or all raise, each naming the rank that failed and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.checkpoint.checksums import in_words
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, ShardwiseError


class SharedPhase:
    """One phase of a joint action; see `phase`."""

    def __init__(self) -> None:
        self.said: Any = None
        self.heard: list[Any] = []


@contextmanager
def phase(comm: Communicator, what: str) -> Iterator[SharedPhase]:
    """Run this rank's part of a joint action; afterwards all ranks have succeeded, or all raise.

    What a rank puts into `said` (JSON) is in `heard` of all ranks, in rank order, after the block.

    Args:
        comm: the ranks.
        what: the action in words, for messages: "saving checkpoint 'a'".

    Raises:
        ShardwiseError: this rank's own error; on a rank that had none, a CheckpointError that names the one that had.
    """
    this = SharedPhase()
    failure: Exception | None = None
    try:
        yield this
    except Exception as error:
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = comm.exchange({"error": told, "said": this.said}, "checkpoint")
    if failure is not None:
        if isinstance(failure, ShardwiseError):
            raise failure
        raise CheckpointError(f"{what}: {in_words(failure)}") from failure
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise CheckpointError(f"{what}: failed on rank {rank}: {outcome['error']}")
    this.heard = [outcome["said"] for outcome in outcomes]
