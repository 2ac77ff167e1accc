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
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.comm.ledger import Ledger, Record, is_of_script, user_line
from shardwise.comm.rendezvous import answers
from shardwise.comm.sealed import seal
from shardwise.compat import default_store
from shardwise.errors import DesyncError, PeerLostError

PATIENCE_S = 1.0
"""How long a rank that fails waits for word from the others: they fail within milliseconds of it, or not at all."""

FAILED = "failed"
"""Key of the traceback of a rank that has ended with an exception, the last one."""

_TRACEBACK = 4000
"""Letters of it that are told."""
_POLL_S = 0.02
_DYING_S = 0.1
"""How long the sockets of a process that has been killed may outlive one another."""

_CHECK = (
    "Check that every rank gets the same number of batches; that no branch (`if rank == 0:`, a condition on data) "
    "leaves out or adds a forward pass, backward(), step() or evaluation on some ranks; and that all ranks call "
    "save_checkpoint() and other methods that use collectives. Loops of different length, such as "
    "generate(synced_gpus=False), belong inside of `with engine.gathered():`."
)

_FEWER = "Did it get fewer batches than the others?"

Word = dict[str, Any]
"""What a rank has written: `state` and `text`. State "waits", for a collective: also `what`, `kind` and `line`.
State "ended", of a process: also `failed`, whether by an exception. State "ends": the rank is in `destroy()`."""

_PARTS: dict[str, dict[str, type]] = {
    "waits": {"text": str, "what": str, "kind": str, "line": str},
    "ended": {"text": str, "failed": bool},
    "ends": {"text": str},
}

Place = tuple[str, str, str]
"""A collective that a rank waits for: its name, its kind, and the user's line."""


_secret = ""


def sign_failures(secret: str) -> None:
    """Have tracebacks of failures written so that ranks which know the secret take them for such."""
    global _secret
    _secret = secret


def publish(word: Word) -> None:
    """Write this rank's whereabouts; without a store that can still be reached nothing happens."""
    store = default_store()
    if store is not None and answers(store, _DYING_S if word["state"] == "waits" else 0.0):
        try:
            store.set(_key(dist.get_rank()), json.dumps(word))
        except RuntimeError:
            return


def publish_end() -> None:
    """Write that this process ends, for ranks that still wait for it; if by an exception, with its traceback."""
    error = getattr(sys, "last_value", None)
    if error is None:
        publish({"state": "ended", "text": "has ended without an exception", "failed": False})
        return
    text = f"has ended with {type(error).__name__}: {error}"
    line = _raised_at(error)
    publish({"state": "ended", "text": f"{text}{f' at {line}' if line else ''}", "failed": True})
    store = default_store()
    if _secret and store is not None and answers(store):
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK:]
        try:
            said = f"rank {dist.get_rank()} {text}. Its traceback:\n{trace}"
            store.set(key_of(FAILED), seal(said, _secret, key_of(FAILED)))
        except RuntimeError:
            return


def _raised_at(error: BaseException) -> str:
    """Return the line of the script that has led to an exception, as far as there is one."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if is_of_script(trace.tb_frame.f_code.co_filename):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def being_in(method: str, failure: BaseException | None) -> str:
    """Return words for a rank that is in one of the engine's methods, perhaps because an exception has led there."""
    line = user_line()
    reason = "" if failure is None else f", after {type(failure).__name__}: {str(failure)[:200]}"
    return f"is in {method}{f' at {line}' if line else ''}{reason}"


def read(ranks: Iterable[int], patience: float) -> dict[int, Word]:
    """Return what ranks have written, waiting up to `patience` seconds for those that have not."""
    found: dict[int, Word] = {}
    missing = list(ranks)
    store = default_store()
    if store is not None and not answers(store, _DYING_S):
        return found  # it has gone, with the rank that served it
    deadline = time.monotonic() + patience
    try:
        while missing and store is not None:
            for rank in list(missing):
                if store.check([_key(rank)]):
                    missing.remove(rank)
                    word = _checked(store.get(_key(rank)))
                    if word is not None:
                        found[rank] = word
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S if missing else 0)
    except RuntimeError:
        pass  # it has gone meanwhile
    return found


def _checked(data: bytes) -> Word | None:
    """Return a word if it is one: anybody who reaches the store may have written it."""
    try:
        word = json.loads(data)
        parts = _PARTS[word["state"]]
        return word if all(isinstance(word[name], kind) for name, kind in parts.items()) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def key_of(*parts: object) -> str:
    """Return a key of the store, of this attempt: a restarted job may meet in the store of the one before."""
    first, *rest = parts
    return "/".join(map(str, ("shardwise", first, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), *rest)))


def _key(rank: int) -> str:
    return key_of("whereabouts", rank)


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

    def explain(
        self, error: PeerLostError, what: str, line: str, waited: float, kind: str = ""
    ) -> DesyncError | PeerLostError:
        """Return the error to raise: the first failure of this communicator, with what the other ranks say.

        Args:
            error: what the exchange has raised; `peer` is the group rank that has not answered, if that is known.
            what: the collective, in words that are the same on all ranks.
            line: the user's line that has led to it, or nothing.
            waited: seconds.
            kind: with which collectives it is in one order.
        """
        with self._lock:
            if self._first is None:
                self._first = self._compare(error, (what, kind, line), waited)
            return self._first

    def _compare(self, error: PeerLostError, place: Place, waited: float) -> DesyncError | PeerLostError:
        what, kind, line = place
        own = self._ranks[self._rank]
        at = f" at {line}" if line else ""
        last = self._last_completed()
        publish({"state": "waits", "text": f"waits in {what}{at}; {last}", "what": what, "kind": kind, "line": line})
        others = [rank for rank in self._ranks if rank != own]
        words = read(others, PATIENCE_S)
        peer = self._ranks[error.peer] if error.peer >= 0 else _missing(others, words, place)
        who = f"rank {own} of {len(self._ranks)}"
        if error.timed_out:
            begin = (
                f"{who} has waited {waited:.1f} s for rank {peer} in {what}{at}, and rank {peer} has not answered "
                f"(the limit for a collective: SHARDWISE_TIMEOUT, in minutes). Its connection is given up; {last}."
            )
        else:
            begin = f"{who} has lost rank {peer} in {what}{at}, after {waited:.1f} s; {last}.\n"
            begin += f"Rank {peer}: {_loss(peer, words)}"
        waits = {place} | {_place_of(word) for word in words.values() if word["state"] == "waits"}
        all_wait = len(words) == len(others) and all(word["state"] == "waits" for word in words.values())
        if all_wait and len(waits) > 1:
            end = f"The ranks wait for each other in different collectives. {_CHECK}"
        elif error.timed_out and all_wait:
            end = "The ranks are in the same collective: the network between them is too slow, or broken."
        elif error.timed_out and words.get(peer, {}).get("state") not in ("ended", "ends"):
            end = f"If rank {peer} is only slow, raise the limit. {_CHECK}"
        elif error.timed_out:
            end = f"Rank {peer}: {_loss(peer, words)}"
        else:
            end = f"The cause is on rank {peer}, or on a rank that it was waiting for: see their output."
        desync = (all_wait and len(waits) > 1) or words.get(peer, {}).get("state") == "ends"
        table = [f"  rank {rank}: {self._place(rank, words)}" for rank in others]
        report = (DesyncError if desync else PeerLostError)("\n".join([begin, *table, end]))
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
    if word["state"] == "ends":
        return f"it {word['text']}. {_FEWER}"
    if word["failed"]:
        return f"it {word['text']}."
    return f"it has ended without an exception. {_FEWER}"


def _place_of(word: Word) -> Place:
    return word["what"], word["kind"], word["line"]


def _missing(ranks: Sequence[int], words: dict[int, Word], place: Place) -> int:
    """Return the rank that is most likely the cause, where torch does not name one.

    First comes a rank that has ended, then one that has said nothing, then one that waits in another collective.
    """

    def order(rank: int) -> int:
        word = words.get(rank)
        if word is None:
            return 1
        return 0 if word["state"] != "waits" else 2 if _place_of(word) != place else 3

    return min(ranks, key=order)
