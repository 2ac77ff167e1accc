"""Registry of logical tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise import boxes
from shardwise.boxes import Patch, Region, sizes, whole
from shardwise.errors import UsageError
from shardwise.registry.parts import part_of

DomainKey = tuple[tuple[int, ...], int | None]
"""Key of a domain: its ranks, and the divisor of gradient sums over them."""


def takes_compute_dtype(tensor: torch.Tensor) -> bool:
    """Return True if a model's compute dtype replaces that of a tensor; frozen float8 values are quantized weights."""
    return tensor.is_floating_point() and (tensor.dtype.itemsize > 1 or tensor.requires_grad)


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter as the user knows it, and the part of it that this rank's parameter object holds.

    Ranks may have different tensors, each its own layers or experts. Equal names mean the same tensor. A box that
    exceeds the tensor raises a UsageError.

    Attributes:
        index: place in registration order (`model.named_parameters()`).
        name: first name in registration order; `aliases`: further names of the same (tied) parameter.
        source_dtype, dtype: dtype in the user's model, and compute dtype in the module.
        trainable: True if the parameter receives a gradient.
        group: index of its optimizer parameter group, or None without an optimizer.
        wire_dtype: communication dtype of its gradient, or None for the dtype of the computed gradient.
        box, ranks, divisor: as in `declare_part`; `box` None: the whole tensor.
    """

    index: int
    name: str
    aliases: tuple[str, ...]
    global_shape: tuple[int, ...]
    source_dtype: torch.dtype
    dtype: torch.dtype
    trainable: bool
    group: int | None
    wire_dtype: torch.dtype | None = None
    box: Region | None = None
    ranks: tuple[int, ...] | None = None
    divisor: int | None = None

    def __post_init__(self) -> None:
        if self.box is None:
            return
        outer = whole(self.global_shape)
        if not boxes.is_within(self.box, self.global_shape):
            raise UsageError(
                f"parameter {self.name!r}: expected (first, end) in each dimension of {list(self.global_shape)}, or "
                f"several of these, found the box {self.box}"
            )
        try:
            boxes.cuts(self.global_shape, [self.box])
        except ValueError as error:
            raise UsageError(f"parameter {self.name!r}: {error}") from error
        if self.box == outer:
            object.__setattr__(self, "box", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, that is, of the parameter object."""
        return self.global_shape if self.box is None else sizes(self.box)

    @property
    def numel(self) -> int:
        """Number of elements of this rank's part."""
        return math.prod(self.shape)

    @property
    def domain(self) -> DomainKey | None:
        """Key of the tensor's domain; None: the domain of all ranks."""
        return None if self.ranks is None else (self.ranks, self.divisor)

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor: a view if the part is one box, else a copy."""
        return values if self.box is None else cut(values, self.box)


@dataclass(frozen=True)
class HeldPart:
    """A part of a tensor, and the ranks (ascending) that hold it; known to all ranks. `aliases`: on the first rank."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Region
    ranks: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """True if the part is the whole tensor."""
        return self.box == whole(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return math.prod(sizes(self.box))


def cut(values: torch.Tensor, box: Region) -> torch.Tensor:
    """Return a region of a tensor: a view if it is one box, else a copy."""
    for dimension, some in enumerate(boxes.ranges(box)):
        runs = [values.narrow(dimension, first, end - first) for first, end in some]
        values = runs[0] if len(runs) == 1 else torch.cat(runs, dimension)
    return values


def paste(values: torch.Tensor, box: Region, into: torch.Tensor) -> None:
    """Copy the values of a region into a tensor, at the region's place."""
    for patch in boxes.overlap(box, 0, values.numel(), whole(into.shape), 0, into.numel()):
        target = into.as_strided(patch.shape, patch.target_strides, into.storage_offset() + patch.target)
        target.copy_(taken(values, patch))


def taken(values: torch.Tensor, patch: Patch) -> torch.Tensor:
    """Return the view of a patch in its source memory, a contiguous tensor."""
    return values.as_strided(patch.shape, patch.source_strides, values.storage_offset() + patch.source)


class Registry:
    """All logical tensors of a model, in registration order, indexed by place or parameter identity."""

    def __init__(self, tensors: Sequence[LogicalTensor], parameters: Sequence[nn.Parameter]) -> None:
        self.tensors = tuple(tensors)
        self.parameters = tuple(parameters)
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}

    def __iter__(self) -> Iterator[LogicalTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> LogicalTensor:
        return self.tensors[index]

    def find(self, parameter: torch.Tensor) -> LogicalTensor | None:
        """Return the logical tensor of a parameter object, or None if the engine does not own it."""
        index = self._index.get(id(parameter))
        return None if index is None else self.tensors[index]

    def follow(self, module: nn.Module) -> None:
        """Take over the names that parameters have in the module now. Parameters outside of it keep theirs."""
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        renamed = []
        for tensor, parameter in zip(self.tensors, self.parameters, strict=True):
            name, *aliases = names.get(id(parameter), (tensor.name, *tensor.aliases))
            renamed.append(replace(tensor, name=part_of(parameter).name or name, aliases=tuple(aliases)))
        self.tensors = tuple(renamed)

    def numel_of(self, parameter: torch.Tensor) -> int:
        """Return the number of elements of the whole tensor of a parameter object."""
        tensor = self.find(parameter)
        return parameter.numel() if tensor is None else math.prod(tensor.global_shape)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        groups: dict[int, int] | None = None,
        wires: Mapping[int, torch.dtype] | None = None,
        sources: Mapping[int, torch.dtype] | None = None,
    ) -> Registry:
        """Build the registry of a module. Shared parameters are recorded once with all their names.

        `compute_dtype` is the dtype of floating-point parameters inside the modules; None: their own. By
        `id(parameter)`, `groups` has the optimizer parameter group (other parameters count as not trainable), and
        `wires` the communication dtype of the gradient, if not its own, and `sources` the dtype in the user's model, if
        not the current one. A box that does not fit is a UsageError.
        """
        names: dict[int, list[str]] = {}
        objects: dict[int, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            objects[id(parameter)] = parameter
        tensors = []
        for index, (key, known_as) in enumerate(names.items()):
            parameter = objects[key]
            dtype = parameter.dtype
            cast = compute_dtype is not None and takes_compute_dtype(parameter)
            group = None if groups is None else groups.get(key)
            part = part_of(parameter)
            shape = tuple(parameter.shape) if part.shape is None else part.shape
            tensor = LogicalTensor(
                index=index,
                name=part.name or known_as[0],
                aliases=tuple(known_as[1:]),
                global_shape=shape,
                source_dtype=dtype if sources is None else sources.get(key, dtype),
                dtype=compute_dtype if cast and compute_dtype is not None else dtype,
                trainable=parameter.requires_grad and group is not None,
                group=group,
                wire_dtype=None if wires is None else wires.get(key),
                box=part.box,
                ranks=part.ranks,
                divisor=part.divisor,
            )
            if tensor.shape != tuple(parameter.shape):
                raise UsageError(
                    f"parameter {tensor.name!r}: has shape {list(parameter.shape)}, its box {part.box} of "
                    f"{list(shape)} has {list(tensor.shape)}"
                )
            tensors.append(tensor)
        return cls(tensors, [objects[key] for key in names])
