"""MLflow backend: metrics of one run, on a server or in a directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from .service import Event, Service

_LONGEST = 250  # maximum characters of a name
_MOST = 1000  # maximum metrics of a server request


def allowed(name: str) -> str:
    """Return a valid MLflow name; one invalid name makes MLflow reject all metrics of a request.

    >>> allowed("Eval/f1 (macro)"), allowed("../loss")
    ('Eval/f1 _macro_', 'loss')
    """
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_LONGEST] or "_"


class MLflow(Service[Event]):
    """Service of the section `mlflow`."""

    def __init__(self, section: Any) -> None:
        self._section = section
        self._client: Any = None
        self._run: str | None = None

    def open(self) -> None:
        """Start a run unless one is open; create the experiment if missing."""
        if self._run is not None:
            return
        self._client = client = MlflowClient(tracking_uri=self._section.tracking_uri)
        name = self._section.experiment
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        self._run = client.create_run(experiment, run_name=self._section.run_name).info.run_id

    def log(self, events: Sequence[Event]) -> None:
        """Send one metric for each event."""
        metrics = [Metric(allowed(event.name), event.value, int(1000 * event.time), event.step) for event in events]
        for begin in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MOST])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)
