"""The batch equation: train_batch_size = micro-batch x accumulation steps x data-parallel ranks. Any sufficient subset
determines the rest. Contradictions are refused, with a proposal; nothing is rounded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardwise.errors import BatchSizeError, ConflictError

from .normalize import Scan
from .problems import LISTED, Problem
from .read import Document
from .runtime_facts import Facts
from .schema.root import Config

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
FIRST_RUN = "autotuning.min_train_micro_batch_size_per_gpu"
"""Source of the micro-batch size of the autotuner's first run, where nothing else gives one."""


@dataclass(frozen=True)
class ResolvedBatch:
    """A solved batch equation; `reasons` has the source of each number that the user did not write."""

    train: int
    micro: int
    steps: int
    reasons: dict[str, str]


def solve(config: Config, world_size: int, facts: Facts, found: Scan, document: Document) -> ResolvedBatch | Problem:
    """Fill in the missing batch keys, or return the problem; `facts` has the caller's numbers for absent keys."""
    train, micro, steps = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    given = {TRAIN: train, MICRO: micro, STEPS: steps}
    sources = {name: document.origin for name, value in given.items() if value is not None}
    # The caller's numbers only replace absent keys and never overrule the configuration.
    open_steps = steps is None and (STEPS,) in found.autos and (train is None or micro is None)
    if open_steps and facts.gradient_accumulation_steps is not None:
        steps, sources[STEPS] = facts.gradient_accumulation_steps, "the caller"
    open_micro = micro is None and (train is None or ((MICRO,) in found.autos and steps is None))
    if open_micro and facts.micro_batch_size is not None:
        micro, sources[MICRO] = facts.micro_batch_size, "the caller"
    tuning = config.autotuning
    if train is None and micro is None and tuning.enabled and tuning.model_info.profile:
        micro, sources[MICRO] = tuning.min_train_micro_batch_size_per_gpu, FIRST_RUN
    if train is None and micro is None:
        return Problem(TRAIN, _nothing_given(found, document), BatchSizeError)
    solved = _fill(train, micro, steps, world_size)
    if solved is None or min(solved) < 1 or solved[0] != solved[1] * solved[2] * world_size:
        return Problem(TRAIN, _contradiction(train, micro, steps, world_size, sources), BatchSizeError)
    if not config.managed_gradient_accumulation and solved[2] > 1:
        return Problem("managed_gradient_accumulation", _unmanaged(solved, world_size, sources), ConflictError)
    values = dict(zip((TRAIN, MICRO, STEPS), solved, strict=True))
    equation = f"{solved[0]} = {solved[1]} x {solved[2]} x {world_size} ranks"
    reasons = {
        name: f"given by {sources[name]}" if name in sources else f"derived: {equation}"
        for name in values
        if sources.get(name, FIRST_RUN) in ("the caller", FIRST_RUN)
    }
    return ResolvedBatch(*solved, reasons)


def _fill(train: int | None, micro: int | None, steps: int | None, world: int) -> tuple[int, int, int] | None:
    """Solve for None values; the caller checks the equation."""
    if train is None:
        if micro is None:
            return None
        steps = steps or 1
        return micro * steps * world, micro, steps
    if micro is None:
        steps = steps or 1
        return train, train // (world * steps), steps
    if steps is None:
        return train, micro, train // (micro * world)
    return train, micro, steps


def _unmanaged(solved: tuple[int, int, int], world: int, sources: dict[str, str]) -> str:
    train, micro, steps = solved
    given = f"given by {sources[STEPS]}" if STEPS in sources else f"{train} = {micro} x {steps} x {world} ranks"
    return (
        f"is false, so every engine.step() ends a window, but `{STEPS}` = {steps} ({given}) has the engine count "
        f"micro-batches and divide by their number. Let the script count: {STEPS} = 1 and {TRAIN} = {micro * world} "
        "(or leave them out), and divide the losses there; or remove managed_gradient_accumulation"
    )


def _nothing_given(found: Scan, document: Document) -> str:
    autos = [name for name in (TRAIN, MICRO) if (name,) in found.autos]
    which = (
        f'{" and ".join(f"`{name}`" for name in autos)} left to "auto"'
        if autos
        else f"neither `{TRAIN}` nor `{MICRO}` given"
    )
    return (
        f"the batch size is unknown: {which}, and the caller gave no micro-batch size. The Trainer "
        'and Accelerate write it in the place of "auto"; Lightning and mmengine add the key. '
        f'In a script of your own write for example "{MICRO}": 1'
    ) + _left_out(document)


def _left_out(document: Document) -> str:
    """Return a message that names keys without effect, because one of them may be a misspelled batch key."""
    names = [f"`{note.path}`" for note in document.ignored]
    shown = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f". Keys without effect in {document.origin}: {shown}" if names else ""


def _contradiction(train: int | None, micro: int | None, steps: int | None, world: int, sources: dict[str, str]) -> str:
    known = {TRAIN: train, MICRO: micro, STEPS: steps}
    numbers = [f"{name} = {value} ({sources[name]})" for name, value in known.items() if value is not None]
    lines = [
        f"the batch related parameters do not fit: it must equal {MICRO} x {STEPS} x data-parallel ranks, "
        f"but {_equation(train, micro, steps, world)}, with {', '.join([*numbers, _world(world)])}."
    ]
    lines.append("Fix: " + "; or ".join(_proposals(train, micro, steps, world)) + ".")
    if world == 1 and _world_from_environment() is None:
        lines.append("With 1 rank: was the script started without a launcher (WORLD_SIZE is not set)?")
    if world > 1 and micro is not None and steps is not None and train == micro * steps:
        lines.append(
            'These numbers fit 1 rank: a library that has filled them in for "auto" counts 1 process. Then no number '
            f"is wrong, but every rank would get the data of all {world}; see docs/frameworks.md, On CPU ranks."
        )
    return " ".join(lines)


def _equation(train: int | None, micro: int | None, steps: int | None, world: int) -> str:
    if micro is not None and steps is not None:
        return f"{train} != {micro} x {steps} x {world} = {micro * steps * world}"
    rest = micro or steps or 1
    return f"{train} is not a multiple of {rest} x {world} = {rest * world}"


def _proposals(train: int | None, micro: int | None, steps: int | None, world: int) -> list[str]:
    proposals = []
    assert train is not None
    if micro is not None and steps is not None:
        proposals.append(f"{TRAIN} = {micro * steps * world}")
        if train % (micro * world) == 0:
            proposals.append(f"{STEPS} = {train // (micro * world)}")
        if train % (steps * world) == 0:
            proposals.append(f"{MICRO} = {train // (steps * world)}")
        return proposals
    unit = (micro or steps or 1) * world
    lower, upper = train // unit * unit, (train // unit + 1) * unit
    return [f"{TRAIN} = {value}" for value in (lower, upper) if value > 0]


def _world_from_environment() -> str | None:
    return os.environ.get("WORLD_SIZE")


def _world(world: int) -> str:
    source = "WORLD_SIZE from the launcher" if _world_from_environment() == str(world) else "the world_size argument"
    return f"{world} data-parallel rank{'s' if world != 1 else ''} ({source})"
