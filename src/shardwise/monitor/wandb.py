"""Weights & Biases backend, online or offline (`WANDB_MODE=offline`, `wandb sync` later)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import wandb

from .service import Event, Service

# The x axis, because W&B's own step counts calls and only increases; events come in any order and from other code.
STEP = "events/step"


class WandB(Service[Event]):
    """Service of the section `wandb`. A run that the script has started is used and left open."""

    def __init__(self, section: Any) -> None:
        self._section = section
        self._run: Any = None
        self._own = False
        self._known: set[str] = set()

    def open(self) -> None:
        """Start a run unless one is active; after another owner has finished it, too."""
        if self._run is not None and wandb.run is not self._run:
            self._run, self._own = None, False
            self._known.clear()
        if self._run is None and wandb.run is not None:
            self._run = wandb.run
        elif self._run is None:
            section = self._section
            self._run = wandb.init(project=section.project, group=section.group, entity=section.team)
            self._own = True

    def log(self, events: Sequence[Event]) -> None:
        """Log events of the same step together."""
        for event in events:
            if event.name not in self._known:
                self._run.define_metric(event.name, step_metric=STEP)
                self._known.add(event.name)
        for step, together in groupby(events, key=lambda event: event.step):
            self._run.log({**{event.name: event.value for event in together}, STEP: step})

    def close(self) -> None:
        """Finish the run if this service started it."""
        if self._own:
            self._run.finish()
