"""Report of a load: loaded tensors, and differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.checkpoint.manifest import outline


class WrongShape(NamedTuple):
    """A tensor with different shapes in checkpoint and model."""

    name: str
    checkpoint: tuple[int, ...]
    model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (checkpoint {list(self.checkpoint)}, model {list(self.model)})"


@dataclass(frozen=True)
class LoadReport:
    """Result of `engine.load_checkpoint`, in names of the model; the same on every rank.

    Attributes:
        loaded: parameters, buffers and extra state that were read (or passed to `custom_load_fn`).
        missing: in the model only; they keep their values.
        unexpected: in the checkpoint only.
        wrong_shape: in both, with different shapes. Nothing is loaded then; the error has the report.
        skipped: not loaded because of `include` and `exclude`.
        left_out: frozen parameters without which the checkpoint was saved; they keep their values.
        renamed: name in the model by name in the checkpoint, where they differ.
        unused: patterns and rules without a match.
        optimizer: whether optimizer state was loaded.
        passed_over: checkpoints that should have been loaded, and why they were not.
        notes: other state that could not be loaded.
    """

    path: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shape: tuple[WrongShape, ...] = ()
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    optimizer: bool = False
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether model and checkpoint differ in more than was requested."""
        return bool(self.missing or self.unexpected or self.wrong_shape or self.unused)

    def differences(self, *, strict: bool = True) -> list[str]:
        """Describe the mismatches; without `strict` only those that are never allowed."""
        found = []
        if strict and self.missing:
            found.append(f"missing in the checkpoint: {outline(self.missing)}")
        if strict and self.unexpected:
            found.append(f"not in the model: {outline(self.unexpected)}")
        if self.wrong_shape:
            found.append(f"of another shape: {outline([str(wrong) for wrong in self.wrong_shape])}")
        if strict and self.unused:
            found.append(f"no name is matched by: {outline(self.unused)}")
        return found

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} parameters and buffers loaded"]
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped by include and exclude")
        if self.left_out:
            parts.append(f"{len(self.left_out)} frozen ones, which the checkpoint was saved without, left as they were")
        if self.renamed:
            parts.append(f"{len(self.renamed)} renamed")
        return f"{self.path}: {'; '.join([', '.join(parts), *self.differences(), *self.notes])}"
