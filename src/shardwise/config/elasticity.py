"""Elastic batch sizes: a global batch size that stays equal when the number of ranks changes.

Candidates are the micro-batch sizes and their least common multiple, each times the largest highly composite number
that keeps the product acceptable. The candidate with the most valid numbers of ranks is chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ElasticConfigError, ElasticWorldSizeError

from .batch import MICRO, STEPS, TRAIN, ResolvedBatch
from .normalize import Scan
from .problems import LISTED, Problem, dotted
from .schema.elasticity import Elasticity
from .schema.root import Config

SCHEDULED = "DEEPSPEED_ELASTICITY_CONFIG"
"""Environment variable in which a scheduler gives the section that it counts on, as JSON."""

IMMUTABLE = ("max_train_batch_size", "micro_batch_sizes", "version")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@dataclass(frozen=True)
class ElasticBatch:
    """A global batch size, and the numbers of ranks that can keep it, ascending."""

    train: int
    world_sizes: tuple[int, ...]


def elastic_batch(section: Elasticity) -> ElasticBatch:
    """Return the batch size of a section without contradictions. Raises ElasticConfigError if no number of ranks fits.

    >>> found = elastic_batch(Elasticity(enabled=True, max_train_batch_size=64, micro_batch_sizes=[4, 8], max_gpus=16))
    >>> found.train, found.world_sizes
    (48, (1, 2, 3, 4, 6, 12))
    """
    node, copies = 1, 1
    if section.version == 0.2:
        node, copies = section.num_gpus_per_node, section.num_gpus_per_node // section.model_parallel_size
    fewest, most = -(-section.min_gpus // node), section.max_gpus // node
    assert section.max_train_batch_size is not None and section.micro_batch_sizes
    micros, limit = sorted(set(section.micro_batch_sizes)), section.max_train_batch_size // copies
    best: tuple[tuple[int, int], int, list[int]] | None = None
    for base in {*micros, math.lcm(*micros)}:
        if base <= limit:
            size = base * max(_highly_composite(limit // base))
            counts = _divisors(size, micros, fewest, most)
            rank = (len(counts), size if section.prefer_larger_batch else -size)
            if best is None or rank > best[0]:
                best = rank, size, counts
    if best is None or not best[2]:
        whole = f" in whole nodes of {node}" if node > 1 else ""
        raise ElasticConfigError(
            f"elasticity: no batch size up to {section.max_train_batch_size} fits micro-batches of {micros} and a "
            f"number of ranks from {section.min_gpus} to {section.max_gpus}{whole}; raise max_train_batch_size or "
            "max_gpus, or lower min_gpus"
        )
    _, size, counts = best
    return ElasticBatch(size * copies, tuple(count * node for count in counts))


def micro_batch(section: Elasticity, batch: ElasticBatch, world_size: int) -> int:
    """Return the largest micro-batch size of a number of ranks. Raises ElasticWorldSizeError for an invalid number."""
    if world_size not in batch.world_sizes:
        valid = batch.world_sizes
        near = sorted(sorted(valid, key=lambda size: abs(size - world_size))[:LISTED])
        kind = "valid" if len(near) == len(valid) else f"{len(valid)} are valid; the nearest"
        raise ElasticWorldSizeError(
            f"elasticity: {world_size} ranks cannot keep the global batch of {batch.train} samples; start another "
            f"number ({kind}: {', '.join(map(str, near))})"
        )
    shared = section.model_parallel_size if section.version == 0.2 else 1
    share = batch.train // (world_size // shared)
    assert section.micro_batch_sizes
    return max(micro for micro in section.micro_batch_sizes if share % micro == 0)


def solve_elastic(
    config: Config, world_size: int, copies: int, found: Scan, environment: Mapping[str, str]
) -> ResolvedBatch | Problem:
    """Return the batch sizes of the section (which is on and has no contradictions), or the problem; `copies` is the
    number of data-parallel groups.
    """
    section = config.elasticity
    given = [key for key in (TRAIN, MICRO, STEPS) if getattr(config, key) is not None]
    if given and not section.ignore_non_elastic_batch_info:
        message = (
            "is given, but `elasticity.enabled` chooses the batch sizes; remove the key, or set "
            "`elasticity.ignore_non_elastic_batch_info` to true"
        )
        return Problem(dotted(found.given.get((given[0],), (given[0],))), message, ElasticConfigError)
    shared = world_size // copies
    wanted = section.model_parallel_size
    if shared != wanted:
        message = (
            f"is {wanted}, but {shared} ranks share a copy of the model or a sequence; write "
            f'"version": 0.2, "model_parallel_size": {shared}'
        )
        return Problem("elasticity.model_parallel_size", message, ElasticConfigError)
    try:
        check_scheduled(section, environment)
        batch = elastic_batch(section)
        micro = micro_batch(section, batch, world_size)
    except (ElasticConfigError, ElasticWorldSizeError) as error:
        return Problem("elasticity.enabled", str(error).removeprefix("elasticity: "), type(error))
    steps = batch.train // copies // micro
    if not config.managed_gradient_accumulation and steps > 1:
        message = f"is false, but `elasticity` needs {steps} micro-batches in a step of {world_size} ranks; remove it"
        return Problem("managed_gradient_accumulation", message, ElasticConfigError)
    sizes = batch.world_sizes
    shown = sizes if len(sizes) <= LISTED else (*sizes[:LISTED], "...", sizes[-1])
    reasons = {
        TRAIN: f"elasticity: it fits {len(sizes)} numbers of ranks: {', '.join(map(str, shown))}",
        MICRO: f"elasticity: the largest that divides {batch.train // copies} samples of a rank",
        STEPS: f"elasticity: {batch.train} = {micro} x {steps} x {copies} ranks",
    }
    return ResolvedBatch(batch.train, micro, steps, reasons)


def check_scheduled(section: Elasticity, environment: Mapping[str, str]) -> None:
    """Raise ElasticConfigError if a scheduler counts on another section, because it would start other numbers of
    ranks.
    """
    text = environment.get(SCHEDULED)
    if text is None:
        return
    try:
        theirs = Elasticity.model_validate(json.loads(text))
    except ValueError as error:
        raise ElasticConfigError(f"elasticity: {SCHEDULED} of the environment is no such section: {error}") from error
    for name in IMMUTABLE:
        here, there = getattr(section, name), getattr(theirs, name)
        if here != there:
            raise ElasticConfigError(
                f"elasticity: the scheduler counts on {name} = {there!r} ({SCHEDULED}), and the configuration has "
                f"{here!r}; a running job keeps them, so make them equal"
            )


def _divisors(size: int, micros: list[int], fewest: int, most: int) -> list[int]:
    """Return the numbers of ranks that divide a batch into whole micro-batches of one of the sizes."""
    found: set[int] = set()
    for micro in micros:
        if size % micro == 0:
            count = size // micro
            small = [number for number in range(1, math.isqrt(count) + 1) if count % number == 0]
            found.update(small, (count // number for number in small))
    return sorted(number for number in found if fewest <= number <= most)


def _highly_composite(limit: int) -> Iterator[int]:
    """Yield the numbers up to `limit` that have more divisors than every smaller number."""
    most = 0
    for number, divisors in sorted(_products(limit, 0, 63)):
        if divisors > most:
            most = divisors
            yield number


def _products(limit: int, index: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (product, number of its divisors) of powers of the first primes, with exponents that do not rise."""
    yield 1, 1
    power = 1
    for exponent in range(1, most + 1):
        power *= _PRIMES[index]
        if power > limit:
            return
        for product, divisors in _products(limit // power, index + 1, exponent):
            yield power * product, (exponent + 1) * divisors


def section_of(values: Mapping[str, Any]) -> Elasticity:
    """Return the section of these values. Raises ElasticConfigError if they are wrong or contradict each other."""
    try:
        section = Elasticity.model_validate({**values, "enabled": True})
    except ValueError as error:
        raise ElasticConfigError(f"elasticity: {error}") from error
    for path, message, kind in section.contradictions(lambda name: f"`elasticity.{name}`"):
        raise kind(f"elasticity.{path}: {message}")
    return section
