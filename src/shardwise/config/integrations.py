"""Client libraries of a configuration: the values they write for "auto", and the keys they read.

The Trainer (transformers), Accelerate, Lightning and TRL share the file with the engine. A key without effect on the
engine may control one of them, and is not called harmless. `assume` fills in a configuration for a check without its
trainer: the Trainer's defaults replace "auto", or a placeholder where the Trainer has no default and the check needs a
value. A note lists each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .batch import MICRO, TRAIN
from .normalize import Scan, scan
from .problems import Note, dotted
from .read import read
from .runtime_facts import Facts
from .schema.tables import table


class Fill(NamedTuple):
    """A value that clients write in the place of an "auto" (None: it depends on the model or the data), and who."""

    value: Any
    source: str


FILLS = {path: Fill(row.get("value"), row["source"]) for path, row in table("clients.toml")["fills"].items()}
READ: dict[str, str] = table("clients.toml")["read"]


def read_by_clients(found: Scan) -> dict[str, str]:
    """Return the keys of a configuration that clients act upon, by canonical path, with the clients' action."""
    given = {dotted(path) for path in found.given}
    return {path: source for path, source in READ.items() if path in given}


def fills(found: Scan) -> list[Note]:
    """Return a note on each "auto" that clients replace, with the Trainer's default."""
    return [
        Note(dotted(found.given[path]), fill.value, f"filled by the client. {fill.source}")
        for path in found.autos
        if (fill := FILLS.get(dotted(path))) is not None
    ]


# -- placeholders ------------------------------------------------------------------------------------------------------

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
