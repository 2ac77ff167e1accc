"""Checks of `optimizer` and `scheduler`: name, arguments and values."""

from __future__ import annotations

from typing import get_args

from . import names
from .argument_models import check
from .normalize import Scan
from .problems import Problem, dotted
from .schema.root import Config


def check_params(section: names.Section, config: Config, found: Scan) -> list[Problem]:
    """Return the problems of the name and arguments of the optimizer or the schedule."""
    name, params = getattr(config, section).type, getattr(config, section).params
    if name is None:
        fix = f'add one, such as "type": "{"AdamW" if section == "optimizer" else "WarmupLR"}"'
        return [Problem(f"{section}.params", f"the {section} has no `type`; {fix}")] if params else []
    here = dotted(found.given.get((section, "type"), (section, "type")))
    if section == "optimizer" and (canonical := names.canonical_optimizer(name)) in names.UNUSABLE_OPTIMIZERS:
        return [Problem(here, f"torch.optim.{name} cannot be used: {names.UNUSABLE_OPTIMIZERS[canonical]}")]
    if section == "scheduler" and name in names.UNUSABLE_SCHEDULES:
        return [Problem(here, f"{name} cannot be used in a configuration: {names.UNUSABLE_SCHEDULES[name]}")]
    model = names.model_of(section, name)
    if model is None:
        return [Problem(here, names.unknown(section, name))]
    # Required arguments of a schedule may be "auto"; no optimizer has any.
    later = {str(path[-1]) for path in found.autos if path[:2] == (section, "params")}
    checked = check(model, params, f"{section}.params.{{}}", name, later)
    return checked if isinstance(checked, list) else []


def settle(config: Config) -> None:
    """Convert 1 to true where the argument is a flag, and 1e3 to 1000 where it is an integer."""
    for name in get_args(names.Section):
        section = getattr(config, name)
        model = names.model_of(name, section.type) if section.type is not None else None
        if model is not None:
            found = model.model_validate(section.params)
            read = {key: getattr(found, key) for key, value in section.params.items() if isinstance(value, int | float)}
            section.params.update({key: value for key, value in read.items() if isinstance(value, int)})
