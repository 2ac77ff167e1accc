"""Checks of `optimizer` and `scheduler`: name, arguments and values."""

from __future__ import annotations

from typing import Any

from . import names
from .argument_models import check
from .normalize import Scan
from .problems import Problem, dotted
from .schema.base import Arguments
from .schema.root import Config


def check_optimizer(config: Config, found: Scan) -> list[Problem]:
    """Return the problems of the optimizer's name and arguments."""
    name, params = config.optimizer.type, config.optimizer.params
    if name is None:
        if params:
            return [Problem("optimizer.params", 'the optimizer has no `type`; add one, such as "type": "AdamW"')]
        return []
    here = dotted(found.given.get(("optimizer", "type"), ("optimizer", "type")))
    canonical = names.canonical_optimizer(name)
    if canonical in names.UNUSABLE_OPTIMIZERS:
        return [Problem(here, f"torch.optim.{name} cannot be used: {names.UNUSABLE_OPTIMIZERS[canonical]}")]
    model = names.optimizer_model(name)
    if model is None:
        return [Problem(here, names.unknown_optimizer(name))]
    return _check("optimizer", model, name, params, set())


def check_scheduler(config: Config, found: Scan) -> list[Problem]:
    """Return the problems of the schedule's name and arguments."""
    name, params = config.scheduler.type, config.scheduler.params
    if name is None:
        if params:
            return [Problem("scheduler.params", 'the scheduler has no `type`; add one, such as "type": "WarmupLR"')]
        return []
    here = dotted(found.given.get(("scheduler", "type"), ("scheduler", "type")))
    if name in names.UNUSABLE_SCHEDULES:
        return [Problem(here, f"{name} cannot be used in a configuration: {names.UNUSABLE_SCHEDULES[name]}")]
    model = names.schedule_model(name)
    if model is None:
        return [Problem(here, names.unknown_schedule(name))]
    autos = {str(path[-1]) for path in found.autos if path[:2] == ("scheduler", "params")}
    return _check("scheduler", model, name, params, autos)


def settle(config: Config) -> None:
    """Convert 1 to true where the argument is a flag, and 1e3 to 1000 where it is an integer."""
    for section, model_of in ((config.optimizer, names.optimizer_model), (config.scheduler, names.schedule_model)):
        model = model_of(section.type) if section.type is not None else None
        if model is not None:
            found = model.model_validate(section.params)
            read = {
                name: getattr(found, name) for name, value in section.params.items() if isinstance(value, int | float)
            }
            section.params.update({name: value for name, value in read.items() if isinstance(value, int)})


def _check(section: str, model: type[Arguments], name: str, params: dict[str, Any], later: set[str]) -> list[Problem]:
    found = check(model, params, f"{section}.params.{{}}", name, later)
    return found if isinstance(found, list) else []
