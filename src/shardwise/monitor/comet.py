"""Comet backend, online or offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comet_ml

from shardwise.config.schema.base import MASK

from .service import Event, Service


class Comet(Service[Event]):
    """Service of the section `comet`."""

    def __init__(self, section: Any) -> None:
        self._section = section
        self._experiment: Any = None
        self._last: dict[str, int] = {}

    def open(self) -> None:
        """Start an experiment, or continue the configured one; do nothing if it is open."""
        if self._experiment is not None:
            return
        section = self._section
        self._experiment = comet_ml.start(
            api_key=None if section.api_key == MASK else section.api_key,
            workspace=section.workspace,
            project=section.project,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
        )
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)

    def log(self, events: Sequence[Event]) -> None:
        """Send a metric for each event at least `samples_log_interval` after the last of its name."""
        for event in events:
            last = self._last.get(event.name)
            if last is None or abs(event.step - last) >= self._section.samples_log_interval:
                self._experiment.log_metric(event.name, event.value, step=event.step)
                self._last[event.name] = event.step

    def close(self) -> None:
        """Send pending metrics and end the experiment."""
        self._experiment.end()
