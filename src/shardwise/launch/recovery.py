"""Recovery time of a job: from the exit of the failed rank to the first step after the restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_recovery(file: Path) -> dict[str, Any] | None:
    """Return the recovery report of a restarted rank; None before its first step."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return {name: record[name] for name in ("ready", "restored", "stepped", "steps", "source")} | {
            "asked": bool(record.get("asked"))
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_recovery(record: Mapping[str, Any], cause: str, failed: float, noticed: float, started: float) -> str:
    """Return the line of the log about a restart.

    `record` is from `read_recovery`, `cause` a failure or a change of machines. Times of the cause, of the launcher's
    notice, and of the start of the new processes are in seconds since the epoch.
    """
    ready, restored, stepped = record["ready"], record["restored"], record["stepped"]
    step, source = int(record["steps"]), record["source"]
    if restored is None:
        state = f"training went on at step {step} without engine.resume()"
        if record["asked"]:
            state = f"engine.resume() found no state, and training began at step {step}"
    else:
        state = f"state of step {step} back from {source} after {restored - failed:.2f} s"
    beyond = (started - failed) + (stepped - ready)
    return (
        f"recovered from {cause} in {stepped - failed:.2f} s: noticed after "
        f"{noticed - failed:.2f} s, processes started again after {started - failed:.2f} s and "
        f"ready (interpreter, imports, data) after {ready - failed:.2f} s, {state}, first step done; "
        f"{beyond:.2f} s beyond the start of processes"
    )
