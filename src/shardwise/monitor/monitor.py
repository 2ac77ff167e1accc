"""The engine's monitor, which passes events to all enabled services."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any

from .pending import Pending
from .registry import make, switched_on
from .worker import CLOSE_S, Worker


class Monitor:
    """Writes events to the enabled services, on the first rank only.

    Args:
        config: may have the sections `tensorboard`, `wandb`, `csv_monitor`, `comet`, `mlflow` and `jsonl_monitor`.
        rank: this process in the job.

    Attributes:
        enabled: True if a service is enabled; the same on all ranks, because collectives may depend on it.

    Raises:
        ConfigError: the package of a service cannot be imported.
    """

    def __init__(self, config: Any, rank: int = 0) -> None:
        sections = switched_on(config)
        self.enabled = bool(sections)
        services = {name: make(name, section) for name, section in sections.items()} if rank == 0 else {}
        self._workers = [Worker(name, service) for name, service in services.items()]
        self.writes = bool(self._workers)

    def write_events(self, event_list: Iterable[Any]) -> None:
        """Write events to all services.

        The call returns at once: services write on their own threads, and values on a device are read later. After
        `Engine.destroy` nothing is written.

        Args:
            event_list: (name, value, step) each. A name has parts separated by "/"; a value is a number or a tensor of
                one element; the step is an integer, the place on the x axis.

        Raises:
            UsageError: an element is invalid. Not checked if no service is enabled or this rank does not write.

        Example:
            >>> import shardwise, tempfile, pathlib, torch
            >>> runs = tempfile.mkdtemp()
            >>> engine, *_ = shardwise.initialize(
            ...     model=torch.nn.Linear(4, 1),
            ...     config={
            ...         "train_batch_size": 2,
            ...         "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            ...         "csv_monitor": {"enabled": True, "output_path": runs, "job_name": "first"},
            ...     },
            ... )
            >>> engine.monitor.write_events([("Eval/accuracy", 0.5, engine.global_samples)])
            >>> engine.destroy()
            >>> pathlib.Path(runs, "first", "Eval_accuracy.csv").read_text().split()
            ['step,accuracy', '0,0.5']
        """
        if not self.writes:
            return
        events = Pending(event_list)
        if len(events):
            for worker in self._workers:
                worker.put(events)

    def flush(self, limit: float = CLOSE_S) -> bool:
        """Wait up to `limit` seconds until the services have written all events; return True if they have."""
        until = monotonic() + limit
        for worker in self._workers:
            worker.flush_soon()
        return all([worker.flush(max(0.0, until - monotonic())) for worker in self._workers])

    def end(self) -> None:
        """Refuse new events, and end the services after the pending ones, without waiting."""
        for worker in self._workers:
            worker.end()

    def close(self, limit: float = CLOSE_S) -> None:
        """Write pending events and close the services, within `limit` seconds in total. A second call does nothing."""
        until = monotonic() + limit
        self.end()
        for worker in self._workers:
            worker.close(until - monotonic())
        self._workers = []
        self.writes = False
