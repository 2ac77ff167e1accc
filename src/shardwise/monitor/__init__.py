"""Monitors: TensorBoard, Weights & Biases, MLflow, Comet, CSV files and JSON lines.

Each service runs on its own thread (`worker`), because its failures and delays must neither stop nor slow training.
`runlog` writes the data of `shardwise report`; `progress` shows a progress bar.
"""

from __future__ import annotations

from .monitor import Monitor
from .registry import check_packages, switched_on
from .service import Event, Service

__all__ = ["Event", "Monitor", "Service", "check_packages", "switched_on"]
