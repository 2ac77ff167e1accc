"""Monitors: what a run has measured goes to TensorBoard, Weights & Biases, MLflow, Comet, CSV files or JSON lines.

`runlog` writes what `shardwise report` draws, and `progress` shows how far training is.

`Monitor` is what an engine has; `Service` is what a place to write to has to do. A service runs on a thread of its own
(`worker`), so that whatever becomes of it neither stops nor slows training.
"""

from __future__ import annotations

from .monitor import Monitor
from .registry import check_packages, switched_on
from .service import Event, Service

__all__ = ["Event", "Monitor", "Service", "check_packages", "switched_on"]
