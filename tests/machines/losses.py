"""Machines are lost and return, again and again, while a job trains on three of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
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
    """What a job of three machines has printed, its exit code, and the seconds from each loss until it trains again
    with all machines.
    """

    code: int
    out: str
    err: str
    seconds: list[float]

    def check(self, rounds: int) -> None:
        """Raise AssertionError if a step is missing, or is not that of a job on one machine, up to rounding."""
        assert self.code == 0, self.err[-3000:]
        assert "found no state" not in self.err
        assert self.err.count("is lost: connection closed; starting all 2 processes again on 2 machines") == rounds
        found, expected = steps_of(self.out), one_machine(3, 3, BETWEEN * rounds)
        assert found.keys() == expected.keys() == set(range(BETWEEN * rounds))
        wrong = [step for step in found if abs(found[step] - expected[step]) > 1e-3 * expected[step]]
        assert not wrong, wrong


def one_machine(ranks: int, stage: int, steps: int) -> dict[int, float]:
    """Return the norms of the steps of a job on one machine."""
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(ranks), STEPS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(stage), str(steps), "0"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return steps_of(done.stdout)


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
    seconds: list[float] = []
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
            began = time.monotonic()
            kill(lab, 1 + number % 3)
            until(err, "has come; starting all 3 processes again", number + 1)
            until(err, "recovered from a change of machines", number + 1)
            seconds.append(time.monotonic() - began)
        process.wait(timeout=60 + 2 * BETWEEN * rounds)
    finally:
        process.kill()
    for reader in readers:
        reader.join()
    return Trial(process.returncode, "".join(out), "".join(err), seconds)
