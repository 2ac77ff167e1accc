"""Recovery time of a job: from the exit of the failed rank to the first step after the restart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recovery:
    """One restart, in seconds since the epoch: failed rank, time of its exit, of the launcher's notice and of the new
    start, and the recovery report (`file`) of the first new rank.
    """

    rank: int
    failed: float
    noticed: float
    started: float
    file: Path

    def describe(self) -> str | None:
        """Return the log line once the first step has been taken; None before."""
        try:
            record = json.loads(self.file.read_text(encoding="utf-8"))
            ready, restored, stepped = record["ready"], record["restored"], record["stepped"]
            step, source = int(record["steps"]), record["source"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if restored is None:
            state = f"training went on at step {step} without engine.resume()"
            if record.get("asked"):
                state = f"engine.resume() found no state, and training began at step {step}"
        else:
            state = f"state of step {step} back from {source} after {restored - self.failed:.2f} s"
        beyond = (self.started - self.failed) + (stepped - ready)
        return (
            f"recovered from the failure of rank {self.rank} in {stepped - self.failed:.2f} s: noticed after "
            f"{self.noticed - self.failed:.2f} s, processes started again after {self.started - self.failed:.2f} s and "
            f"ready (interpreter, imports, data) after {ready - self.failed:.2f} s, {state}, first step done; "
            f"{beyond:.2f} s beyond the start of processes"
        )
