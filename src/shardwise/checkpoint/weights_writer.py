"""The protocol of writers of unsharded weights and optimizer state. A format is one class with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.errors import CheckpointError

Pieces = Iterable[tuple[int, torch.Tensor]]
"""(first element, 1-D values) of a flattened tensor, in order; a value is valid until the next iteration."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, dtype and shape in the files. Formats that cannot write one tensor under
    several names note `aliases`, if they can.
    """

    name: str
    spec: Spec
    aliases: tuple[str, ...] = ()


class WeightsWriter(Protocol):
    """Writes announced tensors. Nothing is visible to readers before `finish`."""

    def write(self, name: str, pieces: Pieces) -> None:
        """Write a tensor. A writer may read `pieces` in `finish`. Raises OSError."""

    def finish(self) -> list[str]:
        """Publish the files; return their names. Raises OSError if that fails."""

    def abandon(self) -> None:
        """Remove everything written; after `finish` nothing."""


@contextlib.contextmanager
def writing(path: str, needed: str = "") -> Iterator[contextlib.ExitStack]:
    """Close what the block enters or calls back (`WeightsWriter.abandon`), and turn OSError into CheckpointError.

    `needed` describes what writing to `path` needs.
    """
    try:
        with contextlib.ExitStack() as closing:
            yield closing
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be written: {error.strerror} (errno {error.errno}); {needed}what was "
            "there before is unchanged"
        ) from error
