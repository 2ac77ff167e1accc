"""Training over machines: the bits of one machine, and recovery from copies in the memory of another machine."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.machines.conftest import Run, Start
from tests.machines.lab import Lab
from tests.machines.losses import STEPS, lose_machines, one_machine, steps_of
from tests.machines.test_ssh import nothing_left

pytestmark = pytest.mark.limit(250)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_machines_train_with_the_bits_of_one(lab: Lab, run: Run, stage: int) -> None:
    several = run(["-H", str(lab.hostfile(2, [1, 2]))], str(stage), "5", "0", script=STEPS)
    assert several.returncode == 0, several.stderr
    found = steps_of(several.stdout)
    assert len(found) == 5 and found == one_machine(4, stage, 5)


def test_a_lost_machines_part_comes_from_the_memory_of_another(lab: Lab, start: Start, tmp_path: Path) -> None:
    """Three ranks go on as two; up to rounding the steps are those of a run that was not interrupted."""
    options = ["-H", str(lab.hostfile(1)), "--max-restarts", "1", "--nnodes", "2:"]
    process = start(options, "3", "12", "0.5", str(tmp_path / "none"), script=STEPS)
    assert process.stdout is not None
    before = ""
    while "step 4" not in before:
        before += process.stdout.readline()
    lab.link(2, False)
    out, err = process.communicate(timeout=120)
    lab.link(2, True)
    assert process.returncode == 0, err
    found = re.search(r"state of step (\d+) back from .*memory", err)
    assert found is not None and int(found[1]) >= 4, err
    both, expected = steps_of(before + out), one_machine(3, 3, 12)
    assert both.keys() == expected.keys() == set(range(12))
    assert all(both[step] == pytest.approx(expected[step], rel=1e-4) for step in both)
    assert nothing_left(lab)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.thorough, pytest.mark.limit(1800)])])
def test_machines_are_lost_and_return_again_and_again(lab: Lab, tmp_path: Path, rounds: int) -> None:
    """No step is lost or trained twice: up to rounding all steps are those of a run that was not interrupted."""
    lose_machines(lab, rounds, tmp_path).check(rounds)
    assert nothing_left(lab)


def test_a_machine_without_a_network_for_30_s_is_left_out_and_taken_in_again(
    lab: Lab, start: Start, tmp_path: Path
) -> None:
    process = start(
        ["-H", str(lab.hostfile(1)), "--nnodes", "2:3"], "3", "260", "0.2", str(tmp_path / "none"), script=STEPS
    )
    assert process.stdout is not None
    before = ""
    while "step 4" not in before:
        before += process.stdout.readline()
    lab.link(2, False)
    time.sleep(30)
    lab.link(2, True)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "machine m2 (rank 1) is lost: no message for 6 s; starting all 2 processes again on 2 machines" in err
    assert "machine m2 has come; starting all 3 processes again" in err
    both, expected = steps_of(before + out), one_machine(3, 3, 260)
    assert both.keys() == expected.keys()
    assert all(both[step] == pytest.approx(expected[step], rel=1e-3) for step in both)
    assert nothing_left(lab)


@pytest.mark.skipif(shutil.which("iptables") is None, reason="there is no iptables (apt-get install iptables)")
def test_a_network_that_loses_packets_changes_nothing(lab: Lab, run: Run) -> None:
    for number in range(3):
        lab.drop(number, 0.05)
    try:
        done = run(["-H", str(lab.hostfile(2, [1, 2]))], "3", "5", "0", script=STEPS, timeout=150)
    finally:
        for number in range(3):
            lab.drop(number, 0)
    assert done.returncode == 0, done.stderr
    assert steps_of(done.stdout) == one_machine(4, 3, 5)


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there is no /dev/net/tun")
def test_a_network_that_is_far_changes_nothing(lab: Lab, run: Run) -> None:
    for number in range(3):
        lab.delay(number, 0.005)
    try:
        done = run(["-H", str(lab.hostfile(2, [1, 2]))], "3", "5", "0", script=STEPS, timeout=150)
    finally:
        for number in range(3):
            lab.delay(number, 0)
    assert done.returncode == 0, done.stderr
    assert steps_of(done.stdout) == one_machine(4, 3, 5)
