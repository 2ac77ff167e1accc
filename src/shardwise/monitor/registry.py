"""Registry of monitor services by configuration section, with their required packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError

from .service import Event, Service


@dataclass(frozen=True)
class Known:
    """One service: its `module:class`, the module to import (None: always available), and the package to install."""

    where: str
    module: str | None = None
    package: str = ""


# configuration section -> service
SERVICES: dict[str, Known] = {
    "tensorboard": Known("shardwise.monitor.tensorboard:TensorBoard", "tensorboard", "tensorboard"),
    "wandb": Known("shardwise.monitor.wandb:WandB", "wandb", "wandb"),
    "csv_monitor": Known("shardwise.monitor.files:CSVFiles"),
    "comet": Known("shardwise.monitor.comet:Comet", "comet_ml", "comet_ml"),
    "mlflow": Known("shardwise.monitor.mlflow:MLflow", "mlflow", "mlflow-skinny"),
    "jsonl_monitor": Known("shardwise.monitor.files:JSONLines"),
}


def switched_on(config: Any) -> dict[str, Any]:
    """Return the enabled sections of a configuration, which may lack some of them."""
    sections = {name: getattr(config, name, None) for name in SERVICES}
    return {name: section for name, section in sections.items() if section is not None and section.enabled}


def check_packages(config: Any) -> None:
    """Raise a ConfigError that names the missing packages of enabled services."""
    # All ranks check and raise, because after a restart any rank may be the writer.
    missing = []
    for name in switched_on(config):
        known = SERVICES[name]
        if known.module is not None and not _is_there(known.module):
            missing.append(
                f'{name}.enabled: the package "{known.package}" is not installed; '
                f'`pip install "shardwise[{name}]"`, or switch {name} off'
            )
    if missing:
        raise ConfigError("\n".join(missing))


def _is_there(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def make(name: str, section: Any) -> Service[Event]:
    """Return the service of a section; raises a ConfigError if its package cannot be imported."""
    known = SERVICES[name]
    home, _, attribute = known.where.partition(":")
    if known.module is not None:
        try:
            importlib.import_module(known.module)
        except Exception as error:
            raise ConfigError(
                f'{name}.enabled: the package "{known.package}" is installed and cannot be imported '
                f"({type(error).__name__}: {error}); repair it, or switch {name} off"
            ) from error
    service: Service[Event] = getattr(importlib.import_module(home), attribute)(section)
    return service
