"""The autotuner's decisions: which candidates are run, in which order, and what their results mean."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.config.read import merged
from shardwise.config.schema.tuning import Autotuning
from shardwise.plan.candidates import BUCKET, Candidate, ModelFacts

PLAN_ERROR = 0.2
"""Planned times of two settings that differ by less are not ranked: the plan's error on nine of ten settings."""

Status = Literal["measured", "out of memory", "failed", "time limit", "not as configured", "not run"]


@dataclass(frozen=True)
class Result:
    """The end of a candidate.

    Attributes:
        config: the complete configuration of its run.
        command: the command of its run; a kept result is of the same command and configuration.
        reason: of every status other than "measured".
        value: of the metric: samples per second, seconds of a step, or FLOPs per second of a rank.
        memory: counted bytes of rank 0's device; `planned`: by the plan.
        exit: code of the run; None: there was none.
        kept: from an earlier search.
    """

    name: str
    config: dict[str, Any]
    command: list[str]
    status: Status
    reason: str = ""
    value: float | None = None
    throughput: float | None = None
    latency: float | None = None
    flops: float | None = None
    memory: int | None = None
    planned: int | None = None
    exit: int | None = None
    kept: bool = False


def write(path: Path, value: Any) -> None:
    """Write a JSON file by renaming, so that no reader finds half of it."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(hidden, path)


def ordered(candidates: Sequence[Candidate], options: Autotuning) -> list[Candidate]:
    """Return candidates in the order in which they are run."""
    if options.tuner_type == "random":
        return random.Random(0).sample(candidates, len(candidates))
    if options.tuner_type == "model_based":
        # Those without a planned time come after the others, in the order of what a step communicates.
        return sorted(candidates, key=lambda one: (one.seconds is None, planned(one, options) or 0.0))
    return sorted(candidates, key=lambda one: (one.family, one.micro))


def planned(candidate: Candidate, options: Autotuning) -> float | None:
    """Return planned seconds of a sample, or of a step if the metric is the latency; None without rates."""
    if candidate.seconds is None:
        return None
    per_step = options.metric == "latency"
    return candidate.seconds if per_step else candidate.seconds / candidate.config["train_batch_size"]


def excluded(candidate: Candidate, candidates: Sequence[Candidate], options: Autotuning) -> str:
    """Return why a candidate is not run, as its plan says; empty: it is run."""
    if not candidate.possible:
        return candidate.note
    if candidate.fits is False:
        return "the plan does not fit the memory"
    own = planned(candidate, options)
    times = [(time, one.name) for one in candidates if one.fits is not False and (time := planned(one, options))]
    if own is None or not times:
        return ""
    best, name = min(times)
    if own <= best * (1 + PLAN_ERROR):
        return ""
    return f"planned to take {own / best:.1f} times as long as {name}"


def excluded_by_results(candidate: Candidate, results: Mapping[str, Result], candidates: Sequence[Candidate]) -> str:
    """Return why a candidate is not run, as smaller micro-batches show; empty: it is run."""
    for other in candidates:
        same = other.family == candidate.family and other.micro <= candidate.micro
        found = results.get(other.name)
        if same and found is not None and found.status == "out of memory":
            return f"{other.name}, with a smaller micro-batch, ran out of memory"
    return ""


def variations(best: Candidate, facts: ModelFacts, options: Autotuning) -> list[Candidate]:
    """Return variations of the best candidate in keys that seldom matter; none if `fast`."""
    if options.fast or facts.num_params <= BUCKET:
        return []
    buckets = {"zero_optimization": {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}}
    config = merged(best.config, buckets)
    return [Candidate(f"{best.name}_buckets", config, best.micro, best.accumulation, best.memory)]


def judged(
    candidate: Candidate,
    config: dict[str, Any],
    command: list[str],
    report: Mapping[str, Any],
    facts: ModelFacts,
    options: Autotuning,
) -> Result:
    """Return the result of a run that has reported: measured, unless the engine was built otherwise."""
    throughput, latency = float(report["throughput"]), float(report["latency"])
    flops = None
    if facts.flops is not None:
        flops = facts.flops * candidate.micro / facts.micro * candidate.accumulation / latency
    wrong = _differences(candidate, report, facts)
    value = {"throughput": throughput, "latency": latency, "flops": flops}[options.metric]
    if wrong or value is None:
        status: Status = "not as configured" if wrong else "failed"
        reason = wrong or "the floating-point operations of the model are unknown; tune by throughput"
        return Result(candidate.name, config, command, status, reason, planned=candidate.memory, exit=0)
    return Result(
        candidate.name,
        config,
        command,
        "measured",
        "",
        value,
        throughput,
        latency,
        flops,
        int(report["memory"]),
        candidate.memory,
        0,
    )


def _differences(candidate: Candidate, report: Mapping[str, Any], facts: ModelFacts) -> str:
    """Compare every tuned key with the engine that was built, and micro-batches with the batches of the script."""
    for path, wanted in _leaves(candidate.config):
        place: Any = report["built"]
        for name in path:
            place = place.get(name) if isinstance(place, Mapping) else None
        if place != wanted:
            return f"{'.'.join(path)} is {place!r} in the engine, and {wanted!r} in the candidate's configuration"
    rows = report.get("rows")
    if rows is not None and facts.rows is not None and rows * facts.micro != facts.rows * candidate.micro:
        return (
            f"the script's batches have {rows} rows at micro-batch size {candidate.micro}, and had {facts.rows} at "
            f"{facts.micro}. Take the size from engine.train_micro_batch_size_per_gpu(), or name its argument in "
            "autotuning.arg_mappings"
        )
    return ""


def _leaves(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in config.items():
        inner = (*path, name)
        found += _leaves(value, inner) if isinstance(value, Mapping) else [(inner, value)]
    return found


def better(options: Autotuning) -> Callable[[Result], float]:
    """Return the sort key of measured results, least first the best."""
    sign = 1 if options.metric == "latency" else -1
    return lambda result: sign * (result.value or 0.0)


def best_of(results: Sequence[Result], options: Autotuning) -> Result | None:
    """Return the best measured result."""
    return min((one for one in results if one.status == "measured"), key=better(options), default=None)


def in_words(result: Result, options: Autotuning) -> str:
    """Return the value of a measured result with its unit, else status and reason."""
    if result.status != "measured" or result.value is None:
        return f"{result.status}: {result.reason}"
    if options.metric == "latency":
        return f"{1e3 * result.value:.4g} ms a step"
    if options.metric == "flops":
        return f"{result.value / 1e12:.4g} TFLOP/s of a rank"
    return f"{result.value:.4g} samples/s"
