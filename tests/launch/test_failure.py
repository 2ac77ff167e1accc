"""Which rank failed first, and what is told about it."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from shardwise.launch.failure import Failure, ShutdownResult, first_failure, last_traceback, troubles
from shardwise.launch.output import OutputChannel, Terminal
from shardwise.launch.processes import Exit

BUG = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: bad batch
"""
LOST = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(x)
RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4
"""


def _error(text: str = "", at: float | None = None) -> OutputChannel:
    channel = OutputChannel(0, Terminal(io.BytesIO()))
    channel.feed(text.encode())
    if at is not None:
        channel.traceback_at = at
    return channel


def _first(
    exits: list[Exit],
    errors: dict[int, OutputChannel],
    files: dict[int, Path] | None = None,
    frozen: tuple[int, ...] = (),
) -> Failure:
    found = {end.rank: end for end in exits}
    nowhere = dict.fromkeys(found, Path("/nonexistent"))
    channels = {rank: errors.get(rank) or _error() for rank in found}
    failed = troubles(found, channels, {**nowhere, **(files or {})}, stop_began=110.0)
    return first_failure(failed, found, started=100.0, frozen=frozen)


def test_the_earliest_exit() -> None:
    failure = _first([Exit(0, 10, 5, 109.0, False), Exit(1, 11, 6, 108.0, False), Exit(2, 12, 0, 107.0, False)], {})
    assert (failure.exit.rank, failure.exit_code, failure.failed, failure.world_size) == (1, 6, 2, 3)
    assert failure.elapsed == pytest.approx(8.0)


def test_a_traceback_counts_before_the_exit() -> None:
    # Rank 1 raised first but took long to end: rank 0 had ended, and rank 1 was stopped by the launcher.
    exits = [Exit(0, 10, 1, 109.0, False), Exit(1, 11, -15, 112.0, True)]
    assert _first(exits, {0: _error(BUG, 108.9)}).exit.rank == 0
    exits = [Exit(0, 10, 1, 109.0, False), Exit(1, 11, 1, 112.0, True)]
    assert _first(exits, {0: _error(BUG, 108.9), 1: _error(BUG, 104.0)}).exit.rank == 1


def test_one_that_raised_and_was_stopped_has_the_code_of_an_exception(tmp_path) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"extraInfo": {"py_callstack": BUG}}}))
    os.utime(file, (104.5, 104.5))
    failure = _first([Exit(0, 10, -15, 112.0, True), Exit(1, 11, -15, 112.0, True)], {}, {0: file})
    assert (failure.exit.rank, failure.exit_code, failure.failed) == (0, 1, 1)


WAITED = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
shardwise.errors.PeerLostError: rank 0 of 3 has waited 30.0 s for rank 1 in all_gather 'w' #2
"""


GONE = f"""{LOST}
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
shardwise.errors.PeerLostError: rank 0 of 3 has lost rank 1 in exchange 'checkpoint' #73, after 0.0 s.
Rank 1: it has ended or lost its connection. If it ended without an error, did it get fewer batches?
"""


STORE = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.
"""


@pytest.mark.parametrize("text", [LOST, GONE, WAITED, STORE])
def test_a_lost_peer_is_a_consequence(text: str) -> None:
    # The kernel had closed rank 1's connections before it reported its end.
    exits = [Exit(0, 10, 1, 108.0, False), Exit(1, 11, -9, 109.0, False)]
    failure = _first(exits, {0: _error(text, 107.9)})
    assert (failure.exit.rank, failure.exit_code) == (1, 137)
    # Where nobody else failed, it is the cause.
    assert _first(exits[:1], {0: _error(text, 107.9)}).exit.rank == 0


def test_the_rank_that_the_others_waited_for_is_named() -> None:
    waited = {0: _error(WAITED, 107.9)}
    failed, stopped = Exit(0, 10, 1, 108.0, False), Exit(1, 11, -9, 115.0, True)
    # Its process was stopped; it had ended without an error; nothing else is known than that it has not answered.
    found = _first([failed, stopped], waited, frozen=(1,))
    assert (found.rank, found.exit.rank, found.exit_code) == (1, 0, 1)
    assert "rank 1 stands still: its process, pid 11, was stopped" in found.message()
    assert "Without it rank 0 failed: exit code 1" in found.message()
    found = _first([failed, Exit(1, 11, 0, 104.0, False)], waited)
    assert "rank 1 ended with exit code 0 4.0 s after the start, before the others" in found.message()
    assert "rank 1 did not answer. Without it rank 0 failed" in _first([failed, stopped], waited).message()
    # An exception of its own is its own.
    found = _first([failed, Exit(1, 11, 0, 104.0, False)], {0: _error(BUG, 107.9)})
    assert found.message().startswith("shardwise run: rank 0 failed first: ")


def test_the_rank_whose_disk_has_failed_is_named_whichever_ends_first() -> None:
    """All ranks raise together."""
    own = "Traceback (most recent call last):\nshardwise.errors.OffloadError: /disk: No space left on device\n"
    others = own.replace("/disk", "engine.step(): on rank 1: /disk")
    exits = [Exit(0, 10, 1, 108.0, False), Exit(1, 11, 1, 109.0, False)]
    found = _first(exits, {0: _error(others, 107.9), 1: _error(own, 107.9)})
    assert (found.rank, found.exit.rank) == (1, 1) and found.report == own.rstrip()
    # It may not have failed itself, as when a process that writes for it has.
    save = others.replace("engine.step(): on", "saving checkpoint 'a': failed on")
    found = _first([exits[0], Exit(1, 11, -15, 115.0, True)], {0: _error(save, 107.9)})
    assert found.message().startswith("shardwise run: rank 1 has failed, as the other ranks say. Without it rank 0")


def test_without_a_traceback_the_last_lines() -> None:
    text, found = last_traceback("\n".join(map(str, range(100))))
    assert (text.splitlines()[0], text.splitlines()[-1], found) == ("80", "99", False)
    crash = "noise\n" * 50 + "Fatal Python error: Segmentation fault\n\nCurrent thread\n" + "  File x\n" * 30
    text, found = last_traceback(crash)
    assert text.startswith("Fatal Python error") and not found


def test_the_end_of_a_job_that_was_asked_to_end() -> None:
    exits = {0: Exit(0, 10, 143, 109.0, True), 1: Exit(1, 11, -15, 109.0, True)}
    ending = ShutdownResult(signal.SIGTERM, exits, {}, 60.0)
    assert (ending.exit_code, ending.message()) == (143, "received SIGTERM; all processes have ended.")
    killed = {**exits, 1: Exit(1, 11, -9, 119.0, True)}
    ending = ShutdownResult(signal.SIGTERM, killed, {1: "stopped"}, 15.0)
    assert ending.exit_code == 137
    assert "rank 1 did not end within 15 s and had to be killed, so nothing more was saved there" in ending.message()
    assert "rank 1 stood still" in ending.message()
    assert ShutdownResult(signal.SIGINT, killed, {1: "S"}, 5.0).exit_code == 130
    failed = {**exits, 0: Exit(0, 10, 1, 109.0, True)}
    ending = ShutdownResult(signal.SIGTERM, failed, {}, 60.0)
    assert ending.exit_code == 1 and "not in order ended rank 0 with exit code 1" in ending.message()
    assert ShutdownResult(signal.SIGINT, failed, {}, 5.0).message() == "received SIGINT; all processes have ended."
