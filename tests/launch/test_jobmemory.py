"""The directory in memory of a job, and what is said about a recovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from shardwise.launch.jobmemory import JobDirectory
from shardwise.launch.recovery import describe_recovery, read_recovery
from tests.harness.jobs import environment

HOLD = """
import sys, time
from pathlib import Path
from shardwise.launch.jobmemory import JobDirectory
with JobDirectory(Path(sys.argv[1])) as memory:
    (memory.path / "copy").write_text("state")
    print(memory.path, flush=True)
    time.sleep(600)
"""


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with JobDirectory(tmp_path) as memory, JobDirectory(tmp_path) as another:
        assert memory.path is not None and another.path is not None and memory.path != another.path
        assert memory.path.stat().st_mode & 0o777 == 0o700
        (memory.path / "engine0").mkdir()
        (memory.path / "engine0" / "copy").write_text("state")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    other = tmp_path / f"shardwise-{os.getuid()}-strange"  # not marked: perhaps one that is being made
    other.mkdir()
    with JobDirectory(tmp_path):
        assert (held / "copy").exists()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with JobDirectory(tmp_path):
        assert not held.exists() and other.exists()


def test_a_machine_without_such_memory(tmp_path: Path) -> None:
    with JobDirectory(tmp_path / "none") as memory:
        assert memory.path is None


def test_what_is_said_about_a_recovery(tmp_path: Path) -> None:
    file = tmp_path / "recovered.json"

    def described() -> str:
        record = read_recovery(file)
        assert record is not None
        return describe_recovery(record, cause="the failure of rank 1", failed=100.0, noticed=100.05, started=100.25)

    assert read_recovery(file) is None
    file.write_text("{")
    assert read_recovery(file) is None
    said = {"ready": 102.0, "restored": 102.5, "source": "memory", "steps": 40, "stepped": 102.75}
    file.write_text(json.dumps(said))
    assert described() == (
        "recovered from the failure of rank 1 in 2.75 s: noticed after 0.05 s, processes started again after 0.25 s "
        "and ready (interpreter, imports, data) after 2.00 s, state of step 40 back from memory after 2.50 s, "
        "first step done; 1.00 s beyond the start of processes"
    )
    file.write_text(json.dumps({**said, "restored": None, "source": None}))
    assert "training went on at step 40 without engine.resume()" in described()
    file.write_text(json.dumps({**said, "restored": None, "source": None, "steps": 0, "asked": True}))
    assert "engine.resume() found no state, and training began at step 0" in described()
