"""`shardwise hosts` on machines with real ssh servers."""

from __future__ import annotations

import os
import sys
from subprocess import CompletedProcess

import pytest

from tests.machines.lab import Lab
from tests.machines.test_ssh import nothing_left

pytestmark = pytest.mark.limit(120)


def hosts(lab: Lab, *arguments: str, **variables: str) -> CompletedProcess[str]:
    """Run `shardwise hosts` on machine 0."""
    command = [sys.executable, "-m", "shardwise.launch", "hosts", *arguments]
    process = lab.start(0, command, env={**os.environ, **variables})
    out, err = process.communicate(timeout=60)
    return CompletedProcess(command, process.returncode, out, err)


def test_a_command_runs_on_all_machines_and_those_that_are_down_are_named(lab: Lab) -> None:
    common = ["run", "-H", str(lab.hostfile(1)), "--launcher-args", " ".join(lab.ssh)]
    done = hosts(lab, *common, "echo up on $(hostname); pwd")
    expected = [f"[m{n}] {line}" for n in (1, 2, 3) for line in ("/root", f"up on m{n}")]
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == expected, done.stderr
    assert hosts(lab, *common, "-e", "m1", "--", "test", "$HOME", "=", "$HOME").returncode == 0
    lab.link(2, False)
    try:
        done = hosts(lab, *common, "test $(hostname) = m1")
    finally:
        lab.link(2, True)
    assert done.returncode == 255 and "hosts run: m2: not reached: ssh: connect to host m2 port 22: " in done.stderr
    assert "hosts run: m3: exit code 1.\n" in done.stderr and "hosts run: m1" not in done.stderr
    assert nothing_left(lab)
