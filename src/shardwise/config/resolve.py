"""Resolving a configuration, in passes: names find the keys, "auto" needs defaults and facts, types need the chosen
values, combinations and the batch equation need typed values. Every pass adds to one list of problems, which is raised
at the end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConflictError

from . import names
from .auto import resolve_autos
from .batch import MICRO, STEPS, TRAIN, ResolvedBatch, solve
from .checks import check_combinations, check_worth_a_warning
from .conditions import value_at
from .curricula import check_metrics
from .deepspeed import warning
from .elasticity import solve_elastic
from .gradient_compression import check_compression, doubtful_compression
from .normalize import Scan, scan
from .optimizer_params import check_params, settle
from .problems import Note, Problem, dotted, raise_problems
from .read import read
from .runtime_facts import Facts
from .schema.root import Config
from .unsupported import check_built, ignored_features
from .unused_keys import without_effect
from .validate import validate

_BATCH_KEYS = (TRAIN, MICRO, STEPS)


@dataclass
class Resolution:
    """A configuration that is ready to run, with its history.

    Attributes:
        config: validated; batch sizes solved, every "auto" replaced.
        raw: the configuration that was checked.
        written: the configuration as the user wrote it, with keys that `accept` has removed.
        notes: every value that was chosen, derived or moved from another key, with the reason.
        warnings: deprecated keys and settings that are probably not meant, one sentence each.
        ignored: keys that `accept` has removed or read as another value, and missing features, with the reason.
        no_effect: given keys that are accepted and change nothing, with the reason.
        read_by_clients: given keys that the Trainer, Accelerate or Lightning act upon, with their action.
        origin: name of the source, such as a file name.
        given: dotted paths (canonical names) of the keys that the user wrote; `autos`: those of which "auto".
        extensions: text on used extensions of standard JSON, which other readers refuse, or None.
    """

    config: Config
    raw: dict[str, Any]
    written: dict[str, Any]
    notes: list[Note] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: list[Note] = field(default_factory=list)
    no_effect: list[Note] = field(default_factory=list)
    read_by_clients: list[Note] = field(default_factory=list)
    origin: str = "the config dict"
    given: frozenset[str] = frozenset()
    autos: frozenset[str] = frozenset()
    extensions: str | None = None

    def log_messages(self) -> list[str]:
        """Return the warnings; the first lists every key without effect if `ignored` has any."""
        return [*([warning(self.origin, [*self.ignored, *self.no_effect])] if self.ignored else []), *self.warnings]


def resolve(source: Any, *, world_size: int = 1, facts: Facts | None = None) -> Resolution:
    """Check a configuration completely and fill in missing values.

    Args:
        source: anything that `load` accepts.
        world_size: number of ranks, counted once for ranks that share a sequence.
        facts: the caller's knowledge of model and training, for values that are "auto".

    Raises:
        ConfigError: unknown keys, wrong values, contradictions; all of them listed with path and fix.
        NotBuiltError: there is no other problem, but this version lacks a requested feature.
        BatchSizeError: there is no other problem, but the batch sizes contradict each other.

    >>> found = resolve({"train_batch_size": 16, "gradient_accumulation_steps": 2}, world_size=4)
    >>> found.config.train_micro_batch_size_per_gpu
    2
    >>> found.notes[0]
    Note(path='train_micro_batch_size_per_gpu', value=2, reason='derived: 16 = 2 x 2 x 4 ranks')
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, found {world_size}")
    facts = facts or Facts()
    document = read(source)
    found = scan(document.data)
    auto_notes, auto_problems = resolve_autos(found, facts)
    notes = [Note(new, value, f"forwarded from the deprecated `{old}`") for old, new, value in found.forwarded]
    notes += auto_notes
    config, value_notes, value_problems = validate(found)
    notes += value_notes
    copies, sequence_problems = _copies(config, found, world_size, facts)
    problems = [
        *found.problems,
        *auto_problems,
        *value_problems,
        *check_params("optimizer", config, found),
        *check_params("scheduler", config, found),
        *check_compression(config),
        *check_combinations(config, found, world_size),
        *check_metrics(config),
        *check_built(config, found),
        *sequence_problems,
    ]
    solved: ResolvedBatch | Problem
    if config.elasticity.enabled and not any(config.elasticity.contradictions(str)):
        solved = solve_elastic(config, world_size, copies, found, os.environ)
    else:
        solved = solve(config, copies, facts, found, document)
    if isinstance(solved, ResolvedBatch):
        notes += _fill_batch(config, solved)
    elif not _explained(problems) and not (config.elasticity.enabled and problems):
        problems.append(solved)
    raise_problems(problems, document.origin)
    notes += _settle(config)
    no_effect, read_by_clients = without_effect(config, found, world_size)
    return Resolution(
        config=config,
        raw=document.data,
        written=document.data if document.written is None else document.written,
        notes=notes,
        warnings=[
            *(f"{note.path}: {note.reason}" for note in ignored_features(config, found) if document.written is None),
            *_deprecations(found),
            *(f"{note.path} = {note.value!r}: {note.reason}" for note in found.unfolded),
            *check_worth_a_warning(config),
            *doubtful_compression(config),
        ],
        ignored=[*document.ignored, *(ignored_features(config, found) if document.written is not None else ())],
        no_effect=no_effect,
        read_by_clients=read_by_clients,
        origin=document.origin,
        given=frozenset(dotted(path) for path in found.given),
        autos=frozenset(dotted(path) for path in found.autos),
        extensions=document.extensions,
    )


_TENSOR = "tensor_parallel.autotp_size"
_STAGES = "pipeline.stages"


def _copies(config: Config, found: Scan, world_size: int, facts: Facts) -> tuple[int, list[Problem]]:
    """Resolve the sizes of model parallelism; return the number of data-parallel groups."""
    positions, problem = _positions(config, world_size, facts)
    if problem is not None:
        return world_size, [problem]
    world_size //= positions
    for path, now, argument in (
        ("sequence_parallel_size", config.sequence_parallel_size, facts.sequence_parallel_size),
        (_TENSOR, config.tensor_parallel.size, facts.tensor_parallel_size),
    ):
        given = tuple(path.split(".")) in found.given
        if argument is not None and given and argument != now:
            message = f"is {now}, but the arguments of initialize() give {argument}; remove one"
            return world_size, [Problem(path, message, ConflictError)]
    sequence = config.sequence_parallel_size = facts.sequence_parallel_size or config.sequence_parallel_size
    tensor = config.tensor_parallel.autotp_size = facts.tensor_parallel_size or config.tensor_parallel.size
    share = sequence * tensor
    path = "sequence_parallel_size" if tensor == 1 else _TENSOR
    if world_size % share:
        product = f" x sequence_parallel_size {sequence} = {share}" if 1 not in (tensor, sequence) else ""
        message = (
            f"is {tensor if tensor > 1 else sequence}{product}, but the number of ranks is {world_size}, not a "
            f"multiple of {share}; choose a divisor of {world_size}, or start a multiple of {share} ranks"
        )
        return world_size, [Problem(path, message, ConflictError)]
    copies, wanted = world_size // share, config.data_parallel_size
    if wanted not in (None, copies):
        share *= positions
        shared = f" ({copies * share} ranks, of which {share} share samples)" if share > 1 else ""
        message = f"is {wanted}, but the number of data-parallel ranks is {copies}{shared}; remove the key"
        return copies, [Problem("data_parallel_size", message, ConflictError)]
    return copies, []


def _positions(config: Config, world_size: int, facts: Facts) -> tuple[int, Problem | None]:
    """Resolve the number of ranks of a pipeline."""
    written: int | str = config.pipeline.stages if config.pipeline.enabled is not False else "auto"
    wanted = facts.pipeline_stages
    configured = 1 if written == "auto" else int(written)
    if written != "auto" and wanted not in (None, configured):
        message = f"is {configured}, but the PipelineModule (num_stages) or the mesh (pp) has {wanted}; remove one"
        return 1, Problem(_STAGES, message, ConflictError)
    positions = wanted or configured
    if wanted is not None:
        config.pipeline.stages = wanted
    if positions < 1 or world_size % positions:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        message = (
            f"is {positions}, but the number of ranks is {world_size}; choose a divisor of {world_size} ({divisors}), "
            f"or start a multiple of {positions} ranks"
        )
        return 1, Problem(_STAGES, message, ConflictError)
    return positions, None


def _explained(problems: list[Problem]) -> bool:
    """Return True if another problem involves a batch key, and the equation cannot be judged."""
    return any(key in problem.path or f"`{key}`" in problem.message for problem in problems for key in _BATCH_KEYS)


def _fill_batch(config: Config, batch: ResolvedBatch) -> list[Note]:
    config.train_batch_size = batch.train
    config.train_micro_batch_size_per_gpu = batch.micro
    config.gradient_accumulation_steps = batch.steps
    return [Note(path, value_at(config, path), reason) for path, reason in batch.reasons.items()]


def _settle(config: Config) -> list[Note]:
    notes: list[Note] = []
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        zero.overlap_comm = True
        notes.append(Note("zero_optimization.overlap_comm", True, "overlapping changes neither results nor memory"))
    if config.memory_budget is not None and config.memory_limits.device is None:
        config.memory_limits.device = config.memory_budget
        notes.append(Note("memory_limits.device", config.memory_budget, "memory_budget"))
    bf16 = config.bf16
    if bf16.enabled and bf16.bf16_master_weights_and_grads:
        bf16.master_weights = "none"
        notes.append(Note("bf16.master_weights", "none", "bf16.bf16_master_weights_and_grads is true"))
    if bf16.enabled and bf16.master_weights == "none" and bf16.rounding is None:
        alias = bf16.bf16_master_weights_and_grads
        bf16.rounding = "nearest" if alias else "stochastic"
        reason = "as in DeepSpeed" if alias else "to nearest, small updates would be lost"
        notes.append(Note("bf16.rounding", bf16.rounding, reason))
    written = config.optimizer.type
    if written is not None:
        config.optimizer.type = names.canonical_optimizer(written)
        if config.optimizer.type not in (written, written.lower()):
            notes.append(Note("optimizer.type", config.optimizer.type, "the name in torch.optim"))
    config.compression.type = config.compression.method
    settle(config)
    return notes


_WRITTEN_BY_CLIENTS = ("aio.thread_count", 1)
"""A deprecated key with its default, which Lightning writes into every configuration."""


def _deprecations(found: Scan) -> list[str]:
    return [
        f"{old}: this key is deprecated; write `{new}` = {value!r} instead"
        for old, new, value in found.forwarded
        if (old, value) != _WRITTEN_BY_CLIENTS
    ]
