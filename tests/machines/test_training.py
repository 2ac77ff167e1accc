"""Training over machines: the bits of one machine, and recovery from copies in the memory of another machine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.machines.conftest import Run, Start
from tests.machines.lab import Lab
from tests.machines.test_ssh import nothing_left

pytestmark = pytest.mark.limit(250)

SCRIPT = """
import sys, time, torch, shardwise
from torch import nn

stage, steps, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
config = {
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": stage},
    "gradient_clipping": 0.1,
    "checkpoint": {"memory_copies": {"every": 1}} if pause else {},
}
engine = shardwise.initialize(model, config=config).engine
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
if pause:
    engine.resume(sys.argv[4])
for step in range(engine.global_steps, steps):
    rows = torch.randn(12, 32, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = engine(rows).square().mean()
    engine.backward(loss)
    engine.step()
    print("step", step, float(engine.get_global_grad_norm()).hex(), flush=True)
    time.sleep(pause)  # ranks end here when a machine is lost: what is in the copies has also been printed
engine.destroy()
"""


def steps(text: str) -> dict[int, float]:
    """Return the norms of the steps; the last of each if there are several."""
    return {int(step): float.fromhex(norm) for step, norm in re.findall(r"step (\d+) (\S+)", text)}


@pytest.fixture
def script(lab: Lab) -> str:
    """The path of the script."""
    path: Path = lab.folder / "steps.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_machines_train_with_the_bits_of_one(lab: Lab, run: Run, script: str, stage: int) -> None:
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "4", script, str(stage), "5", "0"]
    one = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    several = run(["-H", str(lab.hostfile(2, [1, 2]))], str(stage), "5", "0", script=script)
    assert one.returncode == 0 and several.returncode == 0, one.stderr + several.stderr
    assert len(steps(one.stdout)) == 5 and steps(one.stdout) == steps(several.stdout)


def test_a_lost_machines_part_comes_from_the_memory_of_another(
    lab: Lab, start: Start, script: str, tmp_path: Path
) -> None:
    """Three ranks go on as two; up to rounding the steps are those of a run that was not interrupted."""
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "3", script, "3", "12", "0"]
    whole = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    options = ["-H", str(lab.hostfile(1)), "--max-restarts", "1", "--nnodes", "2:"]
    process = start(options, "3", "12", "0.5", str(tmp_path / "none"), script=script)
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
    both, expected = steps(before + out), steps(whole.stdout)
    assert both.keys() == expected.keys() == set(range(12))
    assert all(both[step] == pytest.approx(expected[step], rel=1e-4) for step in both)
    assert nothing_left(lab)


def _kill(lab: Lab, number: int) -> None:
    """Kill the agent and the ranks of a machine, as a machine does that is switched off and on."""
    for pid in lab.processes(number):
        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            if any("python" in part for part in process.cmdline()[:1]):
                process.kill()


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.thorough, pytest.mark.limit(1800)])])
def test_machines_are_lost_and_return_again_and_again(
    lab: Lab, start: Start, script: str, tmp_path: Path, rounds: int
) -> None:
    """No step is lost or trained twice: up to rounding all steps are those of a run that was not interrupted."""
    count = 60 * rounds
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "3", script, "3", str(count), "0"]
    whole = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    process = start(
        ["-H", str(lab.hostfile(1)), "--nnodes", "2:3"], "3", str(count), "0.2", str(tmp_path / "none"), script=script
    )
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
            assert time.monotonic() < deadline and process.poll() is None, "".join(err[-30:])
            time.sleep(0.05)

    until(out, "step 4 ", 1)
    for number in range(rounds):
        _kill(lab, 1 + number % 3)
        until(err, "has come; starting all 3 processes again", number + 1)
        until(err, "recovered from a change of machines", number + 1)
    process.wait(timeout=300)
    for reader in readers:
        reader.join()
    assert process.returncode == 0, "".join(err[-30:])
    text = "".join(err)
    assert text.count("is lost: connection closed; starting all 2 processes again on 2 machines") == rounds
    found, expected = steps("".join(out)), steps(whole.stdout)
    assert found.keys() == expected.keys() == set(range(count))
    assert all(found[step] == pytest.approx(expected[step], rel=1e-3) for step in found)
    assert nothing_left(lab)
