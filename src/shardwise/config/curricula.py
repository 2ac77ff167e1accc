"""Metrics of a curriculum by samples: checks of `data_efficiency.data_sampling.curriculum_learning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from shardwise.errors import ConfigError

from .argument_models import check
from .problems import Problem, raise_problems
from .schema.data import CurriculumMetric, DataEfficiency, DifficultySchedule, SampledCurriculum
from .schema.root import Config

AT = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{}.{{}}"


class Metric(NamedTuple):
    """Settings of a metric, and of its schedule."""

    settings: CurriculumMetric
    schedule: DifficultySchedule


def _read(name: str, given: Mapping[str, Any]) -> Metric | list[Problem]:
    at = AT.format(name)
    values = dict(given)
    steps = values.pop("schedule_config", {})
    if not isinstance(steps, dict):
        return [Problem(at.format("schedule_config"), f"expected an object {{...}}, found {steps!r}")]
    settings = check(CurriculumMetric, values, at, f"the metric {name!r}")
    schedule = check(DifficultySchedule, steps, at.format("schedule_config.{}"), f"the schedule of {name!r}")
    if isinstance(settings, CurriculumMetric) and isinstance(schedule, DifficultySchedule):
        unfit = settings.incomplete(schedule, lambda key: f"`{at.format(key)}`")
        found = [Problem(at.format(key), text, kind) for key, text, kind in unfit]
        return found or Metric(settings, schedule)
    return [problem for found in (settings, schedule) if isinstance(found, list) for problem in found]


def metrics_of(curriculum: SampledCurriculum) -> dict[str, Metric]:
    """Return the metrics of a checked curriculum by name."""
    found = {name: _read(name, given) for name, given in curriculum.curriculum_metrics.items()}
    return {name: metric for name, metric in found.items() if isinstance(metric, Metric)}


def check_metrics(config: Config) -> list[Problem]:
    """Return the problems of the metrics of an enabled curriculum."""
    return _problems(config.data_efficiency)


def _problems(section: DataEfficiency) -> list[Problem]:
    if section.curriculum is None:
        return []
    found = [_read(name, given) for name, given in section.curriculum.curriculum_metrics.items()]
    return [problem for one in found if isinstance(one, list) for problem in one]


def check_samples(given: DataEfficiency | Mapping[str, Any]) -> DataEfficiency:
    """Return a section `data_efficiency` with an enabled curriculum, as a sampler of a script gets it.

    Raises ConfigError if it has no enabled curriculum, or has problems.
    """
    try:
        section = given if isinstance(given, DataEfficiency) else DataEfficiency.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(("data_efficiency", *map(str, first["loc"])))
        raise ConfigError(f"{where}: {first['msg']}, found {first['input']!r}") from error
    if section.curriculum is None:
        raise ConfigError(
            "data_efficiency: a curriculum needs `enabled` true here, in data_sampling and in its curriculum_learning"
        )
    raise_problems(_problems(section), "the section data_efficiency")
    return section
