"""Files of a run directory, written by a run log and read by `shardwise report`.

`run.json` describes the run; each rank appends to a file of steps and to one of warnings, a JSON object a line. The
last row of a step counts, because a job resumed from a checkpoint appends to the same files.
"""

from __future__ import annotations

import re

FORMAT = 1  # version of the files' content
RUN = "run.json"
TIMELINES = "timeline-*.json"
_OF_RANK = re.compile(r"(steps|events)-(\d{5,})\.jsonl")


def steps_file(rank: int) -> str:
    """Return the name of a rank's file with a row for each step."""
    return f"steps-{rank:05d}.jsonl"


def events_file(rank: int) -> str:
    """Return the name of a rank's file with a row for each warning."""
    return f"events-{rank:05d}.jsonl"


def kind_and_rank(name: str) -> tuple[str, int] | None:
    """Return the kind of a rank's file, "steps" or "events", and the rank; None for other files.

    >>> kind_and_rank("events-00012.jsonl"), kind_and_rank("run.json")
    (('events', 12), None)
    """
    found = _OF_RANK.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))
