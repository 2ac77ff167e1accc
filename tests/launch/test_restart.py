"""A job that is killed, preempted and asked for a checkpoint, from outside; it is the example that shows this."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from shardwise.checkpoint import verify
from shardwise.checkpoint.listing import CheckpointDirectory
from tests.harness import run_ranks
from tests.harness.jobs import launch, run_job, script

SCRIPT = Path(__file__).parents[2] / "examples" / "resumable.py"


class Job:
    """The example under `shardwise run`, and what it has said so far."""

    def __init__(self, out: Path, *options: str, steps: int = 100_000, script: Sequence[str] = ()) -> None:
        words = script or [SCRIPT, "--out", out, "--steps", steps, "--pause", 0.005]
        command = launch("--nproc", 2, "--tag-output", "always", *options, *words)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while (found := re.compile(pattern).search(self.said, after)) is None:
            assert time.monotonic() < deadline and self._reader.is_alive(), f"no {pattern!r} in:\n{self.said}"
            time.sleep(0.01)
        return found

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    variables = path.joinpath("environ").read_bytes().split(b"\0")
                    found[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = int(path.name)
            except (OSError, ValueError, StopIteration):
                continue
        return found

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return code


def test_a_job_survives_a_kill_and_is_preempted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = Job(out, "--max-restarts", "2")
    job.wait_for(r"\[rank 0\] step 20 ")
    memory = Path(job.wait_for(r"copies in memory every 10 steps in (/dev/shm/[^/]+)/engine0")[1])
    assert memory.exists()
    os.kill(job.ranks()[1], signal.SIGKILL)
    recovered = job.wait_for(r"recovered from the failure of rank 1 in .*, state of step (\d+) back from memory")
    assert int(recovered[1]) >= 20 and int(recovered[1]) % 10 == 0
    # The launcher passes on what is meant for the ranks; one rank alone is enough as well.
    job.process.send_signal(signal.SIGUSR1)
    saved = job.wait_for(rf"SIGUSR1: saved step (\d+) in {out} .*; training goes on")
    assert int(saved[1]) > int(recovered[1])
    assert verify(str(out / f"global_step{saved[1]}")).client["best"] < 1
    job.process.send_signal(signal.SIGUSR2)
    job.wait_for("received SIGUSR2, for which no rank has a handler")
    os.kill(job.ranks()[1], signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    ended = job.wait_for(r"SIGTERM: saved step (\d+) .*; the job ends with code 143")
    assert re.search(r"rank [01] was sent SIGTERM; all processes have ended", job.said)
    assert job.said.count("starting all 2 processes again") == 1
    assert CheckpointDirectory(str(out)).latest() == f"global_step{ended[1]}"
    assert not memory.exists()


IN_PHASES = """
import os, sys, time, torch, shardwise
phase, out, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

reached = set()

def at(here):
    if here == phase and here not in reached:
        reached.add(here)
        print("in", here, flush=True)
        time.sleep(1)

class Model(torch.nn.Linear):
    def forward(self, x):
        at("forward")
        return super().forward(x)
    def get_extra_state(self):
        at("save")
        return None
    def set_extra_state(self, state):
        pass

def rate(step):
    at("step") if step > 2 else None
    return 1.0

at("init")
model = Model(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"on_signal": {"save_dir": out}}}
engine, *_ = shardwise.initialize(
    model=model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, rate), config=config
)
engine.resume(out)
while engine.global_steps < last:
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with torch.no_grad():
        for _ in range(5):
            at("eval") if engine.global_steps > 2 else None
            engine(torch.ones(1, 4))
    engine.save_checkpoint(out) if engine.global_steps == last or phase == "save" else None
engine.destroy()
"""


def run_here(argv: list[str]) -> None:
    """Run a script in this process."""
    with mock.patch("sys.argv", argv):
        runpy.run_path(argv[0])


PHASES = {"init": 2, "forward": 3, "eval": 4, "save": 4, "step": 4}
"""Phase that a signal reaches, and the newest checkpoint afterwards; the older one is of step 2."""


@pytest.mark.thorough
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("everyone", [True, False])
def test_a_signal_in_any_phase(phase: str, everyone: bool, tmp_path: Path) -> None:
    """The job saves, or leaves the older checkpoint as it is; and ends within the grace period."""
    path, out = script(tmp_path, IN_PHASES), tmp_path / "out"
    run_ranks(run_here, 1, [str(path), "none", str(out), "2"])
    job = Job(out, script=[str(path), phase, str(out), "1000"])
    for rank in (0,) if phase == "save" else (0, 1):  # rank 0 saves the module's own state
        job.wait_for(rf"\[rank {rank}\] in {phase}")
    began = time.monotonic()
    if everyone:
        job.process.send_signal(signal.SIGTERM)
    else:
        os.kill(job.ranks()[0], signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM, job.said
    assert time.monotonic() - began < 30
    newest = f"global_step{PHASES[phase]}"
    assert CheckpointDirectory(str(out)).latest() == newest, job.said
    assert verify(str(out / newest)) and (phase == "init" or f"SIGTERM: saved step {PHASES[phase]}" in job.said)


FAILS_ON_SLOT_1 = """
import os, sys, time
from pathlib import Path
attempt, rank, here = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], Path(__file__).parent
print("world", os.environ["WORLD_SIZE"], "attempt", attempt, flush=True)
(here / f"{attempt}.{rank}").touch()
if rank == "1" and os.environ["WORLD_SIZE"] == "3":
    while len(list(here.glob(f"{attempt}.*"))) < 3:
        time.sleep(0.01)  # the others are ended by the failure, perhaps before they have said anything
    sys.exit(5)
time.sleep(0.5)
"""


def test_a_slot_that_fails_again_and_again_is_left_out(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS_ON_SLOT_1)
    done = run_job("--nproc", 3, "--max-restarts", 3, "--min-nproc", 2, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world 3 attempt 1") == 3 and done.stdout.count("world 2 attempt 2") == 2
    assert "slot 1 is left out from now on; starting all 2 processes again (restart 2 of 3)" in done.stderr
    done = run_job("--nproc", 3, "--max-restarts", 1, "--min-nproc", 3, path)
    assert done.returncode == 5 and "left out" not in done.stderr and "world 3 attempt 1" in done.stdout
