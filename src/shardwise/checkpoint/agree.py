"""Collective steps: all ranks succeed, or all raise an error that names the failed rank and the reason.

Any rank may fail to save or load (a full disk, a damaged file). Each step ends with an exchange of outcomes, because
other ranks would wait for ever if only the failing rank raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.checkpoint.checksums import in_words
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, ShardwiseError


class CollectiveStep:
    """A collective step: `local` is this rank's value (JSON), `gathered` has those of all ranks after the step."""

    def __init__(self) -> None:
        self.local: Any = None
        self.gathered: list[Any] = []


@contextmanager
def collective_step(comm: Communicator, what: str) -> Iterator[CollectiveStep]:
    """Run this rank's part of a step, named `what` in messages; then all ranks have succeeded, or all raise."""
    this = CollectiveStep()
    failure: Exception | None = None
    try:
        yield this
    except Exception as error:
        failure = error
    error_text = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = comm.exchange({"error": error_text, "value": this.local}, "checkpoint")
    if failure is not None:
        if isinstance(failure, ShardwiseError):
            raise failure
        raise CheckpointError(f"{what}: {in_words(failure)}") from failure
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise CheckpointError(f"{what}: failed on rank {rank}: {outcome['error']}")
    this.gathered = [outcome["value"] for outcome in outcomes]
