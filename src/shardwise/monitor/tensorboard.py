"""TensorBoard backend: event files of torch's writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .service import Event, Service


class TensorBoard(Service[Event]):
    """Service of the section `tensorboard`."""

    def __init__(self, section: Any) -> None:
        # Imported early, because the import takes a second and starts threads, which a terminating process cannot do.
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._directory = Path(section.output_path) / section.job_name
        self._writer: Any = None

    def open(self) -> None:
        """Start a file. After a failure this is a new file, because torch's writer does not recover."""
        self._writer = self._make(log_dir=str(self._directory))

    def log(self, events: Sequence[Event]) -> None:
        """Add one scalar for each event."""
        for event in events:
            self._writer.add_scalar(event.name, event.value, global_step=event.step, walltime=event.time)

    def flush(self) -> None:
        """Write buffered events."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
