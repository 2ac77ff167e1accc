"""Collective steps: all ranks succeed, or all raise an error that names the failed rank and the reason.

Any rank may fail to save or load (a full disk, a damaged file). Each step ends with an exchange of outcomes, because
other ranks would wait for ever if only the failing rank raised.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.checkpoint.checksums import in_words
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.utils.logging import logger


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


_MOST_BYTES = 4 << 20  # bytes of the device buffer in which the first rank receives


def on_first_rank(comm: Communicator, value: Any, label: str) -> list[Any]:
    """Return the JSON values of all ranks on the first rank, [] on the others (a collective)."""
    if not comm.sends or comm.imagined:
        return [value] * comm.world
    own, first = json.dumps(value).encode(), comm.rank == 0
    sizes = comm.exchange(len(own), label)
    width = max(1, _MOST_BYTES // comm.world)
    texts = [bytearray() for _ in sizes]
    for at in range(0, max(sizes), width):
        counts = [min(width, max(0, size - at)) for size in sizes]
        given = torch.frombuffer(bytearray(own[at : at + width]) or bytearray(1), dtype=torch.uint8)
        given = given[: counts[comm.rank]].to(comm.device)
        arrived = torch.empty(sum(counts) if first else 0, dtype=torch.uint8, device=comm.device)
        to_first = [given.numel(), *[0] * (comm.world - 1)]
        comm.all_to_all(arrived, given, counts if first else [0] * comm.world, to_first, label).wait()
        for text, part in zip(texts, arrived.cpu().split(counts) if first else (), strict=False):
            text += part.numpy().tobytes()
    return [json.loads(text) for text in texts] if first else []


def same_on_all(comm: Communicator, value: Any, label: str) -> bool:
    """Return True if all ranks give the same JSON value (a collective of a digest)."""
    return len(set(comm.fingerprints(json.dumps(value), label))) == 1


def held_by_any(comm: Communicator, names: Sequence[str], held: Collection[str], label: str) -> set[str]:
    """Return the names, given in one order on all ranks, that some rank holds (a collective).

    A rank sends and receives about 8 bytes a name, for any number of ranks.
    """
    if not names:
        return set()
    flags = [float(name in held) for name in names] + [0.0] * (-len(names) % comm.world)
    counts = torch.tensor(flags, dtype=torch.float32, device=comm.device)
    comm.sum_large(counts, label).wait()
    return {name for name, count in zip(names, counts.tolist(), strict=False) if count}


# -- waiting for a disk, with warnings ---------------------------------------------------------------------------------

WARN_AFTER_S = 10.0
"""Seconds before the first warning."""

SLOWEST = 20e6
"""Bytes per second; a slower disk counts as not responding."""


@contextmanager
def warn_if_slow(what: str) -> Iterator[None]:
    """Log from time to time that the block has not ended yet; `what` names its action."""
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        after = WARN_AFTER_S
        while not ended.wait(after):
            waited = time.monotonic() - began
            logger.warning(
                "%s: it has taken %.0f s so far, and goes on (is the disk slow, or does it not answer?)", what, waited
            )
            after = 3 * waited

    threading.Thread(target=watch, name="shardwise-slow-io", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
