"""The files of a run directory: what a run log writes, and `shardwise report` reads.

`run.json` says what is run; each rank appends to a file of steps and to one of warnings, a JSON object a line. Of the
same step the last row counts: a job that goes on from a checkpoint appends to the same files.
"""

from __future__ import annotations

import re

FORMAT = 1
"""Version of what is in the files."""
RUN = "run.json"
TIMELINES = "timeline-*.json"
_OF_RANK = re.compile(r"(steps|events)-(\d{5,})\.jsonl")


def steps_file(rank: int) -> str:
    """Return the name of a rank's file with a row for each step.

    >>> steps_file(3)
    'steps-00003.jsonl'
    """
    return f"steps-{rank:05d}.jsonl"


def events_file(rank: int) -> str:
    """Return the name of a rank's file with a row for each warning."""
    return f"events-{rank:05d}.jsonl"


def kind_and_rank(name: str) -> tuple[str, int] | None:
    """Return what a file of a rank has, "steps" or "events", and of which rank; None: it is another file.

    >>> kind_and_rank("events-00012.jsonl"), kind_and_rank("run.json")
    (('events', 12), None)
    """
    found = _OF_RANK.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))
