"""The neutral form of DeepSpeed's files: pieces of values by name and kind, as in the universal format.

Each kind of files is converted to a `Content`. Contents of pipeline stages and of model-parallel ranks are merged, and
the result becomes the manifest of one checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.checkpoint.manifest import OPTIMIZER, PARAMETER, Slice, StoredTensor, name_of
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flattened tensor: 1-D values in the mapped `file` of the checkpoint."""

    start: int
    stop: int
    values: torch.Tensor
    file: str


Views = dict[tuple[str, str], torch.Tensor]
"""Mapped values by file and key, as slices of stored tensors name them."""


@dataclass
class Content:
    """Content of a part of a checkpoint.

    Attributes:
        views: mapped values of all parts.
        world: number of ranks that saved the part.
        shapes, group: shape and parameter group of each trained parameter.
        pieces: master weights (`parameter`) and optimizer state (`optimizer/<entry>`) of trained parameters.
        values: entries of optimizer state with one value, such as step counts, by parameter.
        settings: those of each parameter group.
        dropped: descriptions of optimizer state that cannot be loaded.
        refused: reason why optimizer state cannot be loaded, or None.
        tensors: the described tensors by name, kind and rank (of buffers that differ between ranks).
        extra: extra state of modules.
    """

    views: Views
    world: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    group: dict[str, int] = field(default_factory=dict)
    pieces: dict[tuple[str, str], list[Piece]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    refused: str | None = None
    tensors: dict[tuple[str, str, int | None], StoredTensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def entries(self) -> set[str]:
        """Names of the elementwise optimizer state."""
        return {kind.removeprefix(OPTIMIZER) for _, kind, _ in self.tensors if kind.startswith(OPTIMIZER)}

    def add(self, name: str, kind: str, piece: Piece) -> None:
        """Append a piece of a trained parameter or its state."""
        if piece.values.numel() != piece.stop - piece.start:
            raise CheckpointError(
                f"{piece.file}: {kind} {name!r}: expected {piece.stop - piece.start} elements, found "
                f"{piece.values.numel()}"
            )
        if piece.stop > piece.start:
            self.pieces.setdefault((name, kind), []).append(piece)

    def set_value(self, name: str, entry: str, value: Any, where: str) -> None:
        """Set an entry with one value. Raises CheckpointError if it is there with another one."""
        value = as_scalar(value)
        known = self.values.setdefault(name, {}).setdefault(entry, value)
        if not same(known, value):
            raise CheckpointError(
                f"{where}: optimizer state {entry!r} of {name!r} is {value!r}, in other files {known!r}: files of "
                "several checkpoints"
            )

    def store(self, tensor: StoredTensor, pieces: Sequence[Piece]) -> None:
        """Describe a tensor with its pieces, in order. Raises ValueError if elements are missing."""
        slices = []
        for piece in pieces:
            key = f"{tensor.kind}/{tensor.name}[{piece.start}:{piece.stop}]"
            self.views[piece.file, key] = piece.values
            slices.append(Slice(piece.file, key, piece.start, piece.stop))
        tensor = replace(tensor, slices=tuple(slices))
        if tensor.numel and slices:
            tensor.check_cover()
        self.keep(tensor)

    def keep(self, tensor: StoredTensor) -> None:
        """Add a described tensor."""
        self.tensors[tensor.name, tensor.kind, tensor.rank] = tensor

    def store_trained(self) -> None:
        """Describe master weights and optimizer state. The module's parameters must be described before."""
        for name, shape in self.shapes.items():
            known = self.tensors.get((name, PARAMETER, None))
            if known is None:
                raise CheckpointError(f"{name!r}: a parameter of the optimizer that is not in the module")
            pieces = self.pieces.get((name, PARAMETER), [])
            known = replace(known, shape=shape, trainable=True, group=self.group[name])
            if not pieces and known.numel and not known.slices:
                raise CheckpointError(f"parameter {name!r}: its fp32 values are in no file of the checkpoint")
            if pieces:
                self.store(replace(known, dtype=name_of(pieces[0].values.dtype)), pieces)
            else:  # empty, or unsharded in the module
                self.keep(known)
        for (name, kind), pieces in self.pieces.items():
            if kind != PARAMETER:
                self.store(StoredTensor(name, kind, self.shapes[name], name_of(pieces[0].values.dtype), ()), pieces)
                count = self.settings[self.group[name]].get("step")  # where an optimizer counts by group
                if isinstance(count, (int, torch.Tensor)) and "step" not in self.values.get(name, {}):
                    self.set_value(name, "step", count, pieces[0].file)

    def refuse(self, reason: str) -> None:
        """Drop all optimizer state."""
        self.refused = reason
        for held in (self.shapes, self.group, self.pieces, self.values, self.settings, self.dropped):
            held.clear()

    def renamed(self, rename: Callable[[str], str]) -> Content:
        """Return the content with other names of parameters, buffers and modules."""
        values = {rename(name): own for name, own in self.values.items()}
        extra = {rename(f"{module}._").removesuffix("._"): state for module, state in self.extra.items()}
        found = replace(self, tensors={}, values=values, extra=extra)
        for tensor in self.tensors.values():
            found.keep(replace(tensor, name=rename(tensor.name), aliases=tuple(map(rename, tensor.aliases))))
        return found


def unite(parts: Sequence[Content]) -> Content:
    """Return the content of several parts, such as pipeline stages; of a shared tensor that of the first."""
    united = replace(parts[0], tensors={}, values={}, extra={}, world=sum(part.world for part in parts))
    for number, part in enumerate(parts):
        for tensor in part.tensors.values():
            known = united.tensors.get((tensor.name, tensor.kind, tensor.rank))
            if known is None:
                united.keep(tensor)
            elif (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{tensor.kind} {tensor.name!r} is shared by stages, with shapes {list(known.shape)} and "
                    f"{list(tensor.shape)}: files of several checkpoints"
                )
        united.extra.update(part.extra)
        united.refused = united.refused or part.refused
        join_values(united, part, number)
    return united


def join_values(into: Content, part: Content, number: int) -> None:
    """Add the single values of optimizer state of another part."""
    for name, values in part.values.items():
        for entry, value in values.items():
            into.set_value(name, entry, value, f"the files of part {number}")


def as_scalar(value: Any) -> Any:
    """Return a number as a 0-d fp32 tensor, as torch's optimizers keep it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")


def same(one: Any, other: Any) -> bool:
    """Return True if two values of optimizer state are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def equal_bits(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if all tensors have the same shape, dtype and bits."""
    first, *others = tensors
    return all(
        (other.shape, other.dtype) == (first.shape, first.dtype)
        and torch.equal(other.reshape(-1).view(torch.uint8), first.reshape(-1).view(torch.uint8))
        for other in others
    )
