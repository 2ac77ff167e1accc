"""Checking a configuration without the trainer that fills it in. The Trainer's defaults replace "auto", or a
placeholder where the Trainer has no default and the check needs a value. A note lists each.
"""

from __future__ import annotations

from typing import Any

from .batch import MICRO, TRAIN
from .integrations import FILLS, fills
from .normalize import scan
from .problems import Note, dotted
from .read import read
from .runtime_facts import Facts

_BATCH = 1
_STEPS = 1000


def assume(source: Any) -> tuple[Facts, list[Note]]:
    """Return placeholders for values that a trainer writes, and a note on each "auto" that a trainer replaces; its
    value is None if no check depends on it. Raises ConfigError if the source cannot be read.

    >>> facts, (note,) = assume({"train_batch_size": 8, "gradient_clipping": "auto"})
    >>> note.path, note.value, facts.max_grad_norm
    ('gradient_clipping', 1.0, 1.0)
    >>> assume({"train_batch_size": 8})[1]
    []
    """
    document = read(source)
    found = scan(document.data)
    notes = {note.path: note for note in fills(found)}
    known = {dotted(path) for path in found.autos}

    def stand_in(path: tuple[str, ...], value: Any, text: str) -> None:
        written = dotted(found.given.get(path, path))
        before = f"{notes[written].reason}; " if written in notes else ""
        notes[written] = Note(written, value, f"{before}{text} is assumed here")

    micro = total = None
    open_batch = [name for name in (TRAIN, MICRO) if (name,) in found.autos]
    if not any(found.data.get(name) for name in (TRAIN, MICRO)):
        if open_batch:
            micro = _BATCH
            stand_in((open_batch[-1],), _BATCH, f"{_BATCH} sample for each rank")
        elif document.written is not None:  # DeepSpeed itself refuses the file, which is therefore for a framework
            micro = _BATCH
            stand_in((MICRO,), _BATCH, f"absent, and filled in by Lightning or mmengine; {_BATCH} sample for each rank")
    steps = ("scheduler", "params", "total_num_steps")
    if steps in found.autos:
        warmup = found.data["scheduler"]["params"].get("warmup_num_steps")
        total = max(_STEPS, int(warmup)) if isinstance(warmup, int | float) else _STEPS
        stand_in(steps, total, str(total))

    def filled(*paths: str) -> Any:
        return next((FILLS[path].value for path in paths if path in known), None)

    betas = filled("optimizer.params.betas")
    facts = Facts(
        micro_batch_size=micro,
        total_num_steps=total,
        lr=filled("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
        betas=None if betas is None else tuple(betas),
        eps=filled("optimizer.params.eps"),
        weight_decay=filled("optimizer.params.weight_decay"),
        max_grad_norm=filled("gradient_clipping"),
        warmup_num_steps=filled("scheduler.params.warmup_num_steps"),
    )
    return facts, list(notes.values())
