"""Looking at a configuration without the trainer that fills it in.

Trainers write their own numbers in the place of "auto" before an engine sees the file. Where a configuration cannot be
judged without such a number, a stand-in is taken, and said.
"""

from __future__ import annotations

from typing import Any

from .auto import Note
from .batch import MICRO, TRAIN
from .facts import Facts
from .problems import dotted
from .read import read
from .scan import scan

_BATCH = 1
_STEPS = 1000


def assume(source: Any) -> tuple[Facts, list[Note]]:
    """Return stand-ins for what the file leaves to a trainer and cannot do without, and a note on each.

    Args:
        source: anything that `load` accepts.

    Raises:
        ConfigError: it cannot be read.

    >>> assume({"train_batch_size": "auto"})[1]
    [Note(path='train_batch_size', value=1, reason='left to the trainer; 1 sample for each rank is assumed here')]
    >>> assume({"train_batch_size": 8})[1]
    []
    """
    found = scan(read(source).data)
    notes = []
    micro = total = None
    open_batch = [name for name in (TRAIN, MICRO) if (name,) in found.autos]
    if open_batch and not any(found.data.get(name) for name in (TRAIN, MICRO)):
        micro = _BATCH
        reason = f"left to the trainer; {_BATCH} sample for each rank is assumed here"
        notes.append(Note(open_batch[-1], _BATCH, reason))
    steps = ("scheduler", "params", "total_num_steps")
    if steps in found.autos:
        warmup = found.data["scheduler"]["params"].get("warmup_num_steps")
        total = max(_STEPS, int(warmup)) if isinstance(warmup, int | float) else _STEPS
        notes.append(Note(dotted(found.given[steps]), total, f"left to the trainer; {total} is assumed here"))
    return Facts(micro_batch_size=micro, total_num_steps=total), notes
