"""Run log and progress display: location of the log, its description of the run, and display mode."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise._version import __version__
from shardwise.comm.environment import PROGRESS
from shardwise.config.export import effective
from shardwise.memory.report import MemoryReport
from shardwise.monitor.progress import Mode, Progress, mode_of

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config, Resolution
    from shardwise.engine.engine import Engine
    from shardwise.engine.memory import MemoryReporting
    from shardwise.engine.step import TrainStep
    from shardwise.monitor.runlog import RunLog


def log_of(config: Config, job: Communicator, step: TrainStep) -> tuple[RunLog, list[Any]] | None:
    """Return this rank's run log, and host and process of each rank (all ranks call); None if disabled."""
    section = config.run_log
    if not section.enabled:
        return None
    from shardwise.monitor.runlog import RunLog

    own = {"host": socket.gethostname(), "process": os.getpid(), "path": section.path or _new_directory()}
    ranks = job.exchange(own, "run_log")
    path = Path(ranks[0]["path"]).expanduser()
    return RunLog(path, job.rank, lambda: step.global_steps), [
        {"host": each["host"], "process": each["process"]} for each in ranks
    ]


def _new_directory() -> str:
    named = f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    names = [named, *(f"{named}-{number}" for number in range(2, 100))]
    return next((name for name in names if not os.path.lexists(name)), named)


def describe(
    engine: Engine, resolution: Resolution, memory: MemoryReporting, log: RunLog, ranks: Sequence[Any]
) -> None:
    """Write the description of the run on rank 0; `ranks` are host and process of each rank."""
    if engine.job.rank != 0:
        return
    settings = resolution.config
    log.write_run(
        {
            "time": time.time(),
            "step": engine.global_steps,
            "world": engine.job.world,
            "ranks": ranks,
            "versions": {"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "device": _device(engine.device),
            "waits_on_host": engine.job.waits_on_host,
            "model": type(engine.module).__name__,
            "parameters": sum(tensor.numel for tensor in engine.sharded.registry),
            "optimizer": None if engine.optimizer is None else type(engine.optimizer).__name__,
            "stage": engine.sharded.plan.stage,
            "precision": engine.precision_in_words(),
            "batch": dict(zip(("total", "micro", "accumulation"), engine.get_batch_info(), strict=True)),
            "total_steps": total_steps(settings),
            "limits": {
                name: limit
                for name in ("device", "host", "disk")
                if (limit := getattr(settings.memory_limits, name)) is not None
            },
            "plan": _planned(memory.memory_report()) if settings.run_log.plan else None,
            "warnings": [str(warning) for warning in resolution.warnings],
            "configuration": effective(resolution),
        }
    )


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _planned(report: MemoryReport) -> dict[str, Any] | None:
    if report.total.planned is None:
        return None
    tiers = {"device": report.total.planned, **{row.name: row.planned for row in report.elsewhere}}
    return {
        "tiers": {name: size for name, size in tiers.items() if size is not None},
        "categories": {row.name: row.planned for row in report.rows if row.planned is not None},
    }


# -- progress ----------------------------------------------------------------------------------------------------------


def shown_as(config: Config) -> Mode:
    """Return the mode of rank 0's progress display: scripts and frameworks for DeepSpeed print their own progress."""
    return mode_of(
        config.progress.mode,
        os.environ.get(PROGRESS, ""),
        own_output="deepspeed" in sys.modules,
        terminal=sys.stderr.isatty(),
    )


def shows(config: Config) -> bool:
    """Whether rank 0 displays progress."""
    return shown_as(config) != "off"


def display_of(config: Config, rank: int) -> Progress | None:
    """Return the progress display of a rank, or None."""
    mode = shown_as(config)
    if rank != 0 or mode == "off":
        return None
    return Progress(mode, total_steps(config), config.progress.interval)


def device_limit(config: Config, device: torch.device) -> int | None:
    """Return the most bytes that a rank may hold on its device, for display; None if unknown."""
    if config.memory_limits.device is not None:
        return config.memory_limits.device
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def total_steps(config: Config) -> int | None:
    """Return the number of steps of the run, if known."""
    given = config.progress.total_steps
    scheduled = config.scheduler.params.get("total_num_steps")
    if given is not None:
        return given
    return int(scheduled) if isinstance(scheduled, int | float) and scheduled >= 1 else None
