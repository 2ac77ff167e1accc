"""The monitor of an engine: hands events to every service that the configuration switches on."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any

from .pending import Pending
from .registry import make, switched_on
from .worker import CLOSE_S, Worker


class Monitor:
    """Writes events to the services that are switched on. The first rank writes; on the others nothing happens.

    Args:
        config: has the sections `tensorboard`, `wandb`, `csv_monitor`, `comet`, `mlflow` and `jsonl_monitor` as
            attributes, not necessarily all.
        rank: this process in the job.

    Attributes:
        enabled: a service is switched on; the same on all ranks, so that what depends on it may be a collective.
        writes: this rank writes to it.

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

        It returns at once: services write on threads of their own, and for values on a device nobody waits here.
        After the end (`Engine.destroy`) nothing is written.

        Args:
            event_list: (name, value, step) each. A name has parts separated by "/"; a value is a number or a tensor of
                one element; the step is an integer, the place on the x axis.

        Raises:
            UsageError: something else is among them. Not looked for where nothing is switched on, or written.

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
        """Wait until the services have taken everything that was written, but not longer than so many seconds.

        Returns:
            Whether they have.
        """
        until = monotonic() + limit
        for worker in self._workers:
            worker.hurry()
        return all([worker.flush(max(0.0, until - monotonic())) for worker in self._workers])

    def close(self, limit: float = CLOSE_S) -> None:
        """Write what is left, and end the services; waits for all of them together not longer than so many seconds.

        Called at the end of an engine, and of the process. Closing twice does nothing.
        """
        until = monotonic() + limit
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.close(until - monotonic())
        self._workers = []
        self.writes = False
