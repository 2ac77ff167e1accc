"""Machines are lost and return, again and again, while a job trains on three of them."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.machines.lab import Lab

STEPS = str(Path(__file__).parent / "steps.py")
BETWEEN = 20
"""Steps of the job for each loss."""


class Trial(NamedTuple):
    """What a job of three machines has printed, and its exit code."""

    code: int
    out: str
    err: str


def steps_of(text: str) -> dict[int, float]:
    """Return the norms of the steps in what `steps.py` prints; the last of each if there are several."""
    return {int(step): float.fromhex(norm) for step, norm in re.findall(r"step (\d+) (0x\S+)", text)}


def kill(lab: Lab, number: int) -> None:
    """Kill the agent and the ranks of a machine, as a machine does that is switched off and on."""
    for sig in (signal.SIGSTOP, signal.SIGKILL):  # all stand still before the first one ends
        for pid in lab.processes(number):
            with contextlib.suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                if any("python" in part for part in process.cmdline()[:1]):
                    process.send_signal(sig)


def lose_machines(lab: Lab, rounds: int, directory: Path) -> Trial:
    """Train `BETWEEN` steps for each round, and kill a machine in each. Raises AssertionError if the job does not
    recover within 90 s, with the end of what it has printed.
    """
    options = ["-H", str(lab.hostfile(1)), "--nnodes", "2:3"]
    process = lab.train(options, STEPS, "3", str(BETWEEN * rounds), "0.2", str(directory / "none"))
    out: list[str] = []
    err: list[str] = []
    readers = [
        threading.Thread(target=lines.extend, args=(stream,), daemon=True)
        for lines, stream in ((out, process.stdout), (err, process.stderr))
    ]
    for reader in readers:
        reader.start()

    def until(lines: list[str], text: str, number: int) -> None:
        deadline = time.monotonic() + 90
        while sum(text in line for line in list(lines)) < number:
            assert time.monotonic() < deadline and process.poll() is None, "".join(err[-300:])
            time.sleep(0.05)

    try:
        until(out, "step 4 ", 1)
        for number in range(rounds):
            kill(lab, 1 + number % 3)
            until(err, "has come; starting all 3 processes again", number + 1)
            until(err, "recovered from a change of machines", number + 1)
        process.wait(timeout=60 + 2 * BETWEEN * rounds)
    finally:
        process.kill()
    for reader in readers:
        reader.join()
    return Trial(process.returncode, "".join(out), "".join(err))
