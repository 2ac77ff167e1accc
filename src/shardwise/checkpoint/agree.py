"""Agreement of ranks on small facts: what each has to say, and whether all have succeeded.

Saving and loading are joint actions, and any rank's part may fail (a full disk, a damaged file). If the failing rank
simply raised, the others would wait for it for ever. So each phase ends with an exchange of outcomes, after
which all ranks go on or all raise, each naming the rank that failed and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.checkpoint.blocks import in_words
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, ShardwiseError

_LABEL = "checkpoint"
_LENGTH, _SHORT = 8, 512
"""Bytes of a message's length, and of what is exchanged at first: nearly all messages are shorter."""


def exchange(comm: Communicator, device: torch.device, value: Any) -> list[Any]:
    """Return the JSON values that all ranks have passed, in rank order (a small collective, two for long values)."""
    if comm.world == 1:
        return [value]
    own = json.dumps(value).encode()
    rows = _gather(comm, device, len(own).to_bytes(_LENGTH, "little") + own[: _SHORT - _LENGTH], _SHORT)
    sizes = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    texts = [row[_LENGTH : _LENGTH + size] for row, size in zip(rows, sizes, strict=True)]
    if max(sizes) > _SHORT - _LENGTH:
        texts = [row[:size] for row, size in zip(_gather(comm, device, own, max(sizes)), sizes, strict=True)]
    return [json.loads(text) for text in texts]


def _gather(comm: Communicator, device: torch.device, own: bytes, width: int) -> list[bytes]:
    """Return the bytes of all ranks, each filled up to the same length."""
    everything = torch.zeros(comm.world * width, dtype=torch.uint8, device=device)
    mine = everything[comm.rank * width : (comm.rank + 1) * width]
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    comm.all_gather([(everything, mine)], _LABEL, kind="explicit").wait()
    return [bytes(row.tolist()) for row in everything.cpu().view(comm.world, width)]


class SharedPhase:
    """One phase of a joint action; see `phase`."""

    def __init__(self) -> None:
        self.said: Any = None
        self.heard: list[Any] = []


@contextmanager
def phase(comm: Communicator, device: torch.device, what: str) -> Iterator[SharedPhase]:
    """Run this rank's part of a joint action; afterwards all ranks have succeeded, or all raise.

    What a rank puts into `said` (JSON) is in `heard` of all ranks, in rank order, after the block.

    Args:
        comm: the ranks.
        device: where the backend wants its tensors.
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
    outcomes = exchange(comm, device, {"error": told, "said": this.said})
    if failure is not None:
        if isinstance(failure, ShardwiseError):
            raise failure
        raise CheckpointError(f"{what}: {in_words(failure)}") from failure
    for rank, outcome in enumerate(outcomes):
        if outcome["error"] is not None:
            raise CheckpointError(f"{what}: failed on rank {rank}: {outcome['error']}")
    this.heard = [outcome["said"] for outcome in outcomes]
