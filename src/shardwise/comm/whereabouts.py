"""Where each rank is, so that a collective which fails can say how the ranks differ.

A rank whose collective fails writes into the default group's store what it was waiting for and for whom, reads what
the others have written, and raises one error that shows them side by side. Nothing is written while all is well. On
Gloo a wait that has run out closes the connection to the peer, so that the peer's own collective fails at once and it
writes as well: there is something to compare within moments of the first failure.

Invariant: the first failure is the one that counts. Gloo's connection is closed by it; what fails afterwards fails
for that reason, and raises the first error again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.comm.ledger import Ledger, Record
from shardwise.compat import default_store
from shardwise.errors import DesyncError, PeerLostError

PATIENCE_S = 1.0
"""How long a rank that fails waits for word from the others: they fail within milliseconds of it, or not at all."""

_POLL_S = 0.02

_CHECK = (
    "Check that every rank gets the same number of batches; that no branch (`if rank == 0:`, a condition on data) "
    "leaves out or adds a forward pass, backward(), step() or evaluation on some ranks; and that all ranks call "
    "save_checkpoint() and other methods that use collectives. Loops of different length, such as "
    "generate(synced_gpus=False), belong inside of `with engine.gathered():`."
)

Word = dict[str, Any]
"""What a rank has written: `state` ("waits" or "ended"), `text`, and for "waits" `what` and `peer`."""


def publish(word: Word) -> None:
    """Write this rank's whereabouts; without a store that can still be reached nothing happens."""
    store = default_store()
    if store is not None:
        try:
            store.set(_key(dist.get_rank()), json.dumps(word))
        except RuntimeError:
            return


def publish_end() -> None:
    """Write that this process ends, for ranks that still wait for it."""
    error = getattr(sys, "last_value", None)
    text = "has ended without an exception" if error is None else f"has ended with {type(error).__name__}: {error}"
    publish({"state": "ended", "text": text, "failed": error is not None})


def read(ranks: Iterable[int], patience: float) -> dict[int, Word]:
    """Return what ranks have written, waiting up to `patience` seconds for those that have not."""
    found: dict[int, Word] = {}
    missing = list(ranks)
    store = default_store()
    deadline = time.monotonic() + patience
    try:
        while missing and store is not None:
            for rank in list(missing):
                if store.check([_key(rank)]):
                    found[rank] = json.loads(store.get(_key(rank)))
                    missing.remove(rank)
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S if missing else 0)
    except RuntimeError:
        pass  # the store has gone, with the rank that served it
    return found


def _key(rank: int) -> str:
    # A restarted job may meet in the store of the attempt before.
    return f"shardwise/whereabouts/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


class Whereabouts:
    """Makes the errors of one communicator.

    Args:
        ledger: where its collectives are recorded.
        ranks: the global ranks of its group.
        rank: this process's place among them.
    """

    def __init__(self, ledger: Ledger, ranks: Sequence[int], rank: int) -> None:
        self._ledger = ledger
        self._ranks = list(ranks)
        self._rank = rank
        self._first: DesyncError | PeerLostError | None = None
        self._lock = threading.Lock()

    def explain(self, error: PeerLostError, what: str, line: str, waited: float) -> DesyncError | PeerLostError:
        """Return the error to raise: the first failure of this communicator, with what the other ranks say.

        Args:
            error: what the exchange has raised; `peer` is the group rank that it was waiting for.
            what: the collective, in words that are the same on all ranks.
            line: the user's line that has led to it, or nothing.
            waited: seconds.
        """
        with self._lock:
            if self._first is None:
                self._first = self._compare(error, what, line, waited)
            return self._first

    def _compare(self, error: PeerLostError, what: str, line: str, waited: float) -> DesyncError | PeerLostError:
        own = self._ranks[self._rank]
        peer = self._ranks[error.peer]
        at = f" at {line}" if line else ""
        last = self._last_completed()
        publish({"state": "waits", "text": f"waits for rank {peer} in {what}{at}; {last}", "what": what, "peer": peer})
        others = read([rank for rank in self._ranks if rank != own], PATIENCE_S)
        who = f"rank {own} of {len(self._ranks)}"
        if error.timed_out:
            begin = (
                f"{who} has waited {waited:.1f} s for rank {peer} in {what}{at}, and rank {peer} has not answered "
                f"(the limit for a collective: SHARDWISE_TIMEOUT, in minutes). Its connection is given up; {last}."
            )
        else:
            begin = f"{who} has lost rank {peer} in {what}{at}, after {waited:.1f} s; {last}.\n"
            begin += f"Rank {peer}: {_loss(peer, others)}"
        table = [f"  rank {rank}: {self._place(rank, others)}" for rank in self._ranks if rank != own]
        circle = _circle(own, peer, what, others)
        desync = len(set(circle.values())) > 1
        if desync:
            end = f"The ranks wait for each other in different collectives. {_CHECK}"
        elif error.timed_out and circle:
            end = "The ranks are in the same collective: the network between them is too slow, or broken."
        elif error.timed_out and others.get(peer, {}).get("state") != "ended":
            end = f"If rank {peer} is only slow, raise the limit. {_CHECK}"
        elif error.timed_out:
            end = f"Rank {peer}: {_loss(peer, others)}"
        else:
            end = f"The cause is on rank {peer}, or on a rank that it was waiting for: see their output."
        kind = DesyncError if desync else PeerLostError
        report = kind("\n".join([begin, *table, end]))
        if isinstance(report, PeerLostError):
            report.peer, report.timed_out = peer, error.timed_out
        report.__cause__ = error.__cause__
        return report

    def _last_completed(self) -> str:
        done = [record for record in self._ledger.records() if record.finished is not None]
        last = max(done, key=lambda record: record.finished or 0.0, default=None)
        return f"last completed: {describe(last) if last else 'nothing'}"

    def _place(self, rank: int, others: dict[int, Word]) -> str:
        if rank not in others:
            return "has not said where it is: it is gone, or busy outside of collectives (data, computing, waiting)"
        return str(others[rank]["text"])


def describe(record: Record) -> str:
    """Return the name of a collective, the same on all ranks."""
    return f"{record.op} {record.label!r} #{record.sequence}"


def _loss(peer: int, others: dict[int, Word]) -> str:
    word = others.get(peer)
    if word is None:
        return "it has ended or lost its connection. If it ended without an error, did it get fewer batches?"
    if word["state"] == "waits":
        return "it has given up waiting, and with that closed the connection."
    if word["failed"]:
        return f"it {word['text']}."
    return "it has ended without an exception. Did it get fewer batches than the others?"


def _circle(own: int, peer: int, what: str, others: dict[int, Word]) -> dict[int, str]:
    """Return the ranks that wait for each other in a circle, from this one on, and what for; empty if none do."""
    seen = {own: what}
    while peer not in seen:
        word = others.get(peer)
        if word is None or word["state"] != "waits":
            return {}
        seen[peer] = word["what"]
        peer = word["peer"]
    return seen
