"""TensorBoard: event files, written by torch's writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .service import Event, Service


class TensorBoard(Service[Event]):
    """Section `tensorboard`.

    Args:
        section: has `output_path` and `job_name`.
    """

    def __init__(self, section: Any) -> None:
        # Before it is needed: it takes a second, and a process that is about to end can start no threads for it.
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._directory = Path(section.output_path) / section.job_name
        self._writer: Any = None

    def open(self) -> None:
        """Begin a file. One that could not be written is left: its writer does not recover."""
        self._writer = self._make(log_dir=str(self._directory))

    def log(self, events: Sequence[Event]) -> None:
        """Add a scalar for each."""
        for event in events:
            self._writer.add_scalar(event.name, event.value, global_step=event.step, walltime=event.time)

    def flush(self) -> None:
        """Write what the writer holds."""
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()
