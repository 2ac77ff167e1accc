"""The registry of logical tensors; see the package docstring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter as the user knows it.

    Attributes:
        index: place in registration order (`model.named_parameters()`).
        name: first name in registration order.
        aliases: further names of the same (tied) parameter.
        shape: global shape.
        source_dtype: dtype the user's model had.
        dtype: dtype in which the module computes with it.
        trainable: whether it receives a gradient.
        group: index of its optimizer parameter group, or None when no optimizer owns it.
        wire_dtype: dtype in which its gradient travels, or None for the one in which it was computed.
    """

    index: int
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    source_dtype: torch.dtype
    dtype: torch.dtype
    trainable: bool
    group: int | None
    wire_dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Registry:
    """All logical tensors of a model, in registration order, found by index or parameter identity."""

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

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        groups: dict[int, int] | None = None,
        wires: Mapping[int, torch.dtype] | None = None,
    ) -> Registry:
        """Build the registry of a module.

        Args:
            module: the user's model. Shared parameters are recorded once with all their names.
            compute_dtype: dtype of floating parameters inside the modules, or None to keep their own.
            groups: `id(parameter)` to optimizer parameter group. Parameters without one count as not trainable,
                whether or not they require a gradient.
            wires: `id(parameter)` to the dtype in which its gradient travels, where that is not its own.
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
            cast = compute_dtype is not None and dtype.is_floating_point
            group = None if groups is None else groups.get(key)
            tensors.append(
                LogicalTensor(
                    index=index,
                    name=known_as[0],
                    aliases=tuple(known_as[1:]),
                    shape=tuple(parameter.shape),
                    source_dtype=dtype,
                    dtype=compute_dtype if cast and compute_dtype is not None else dtype,
                    trainable=parameter.requires_grad and group is not None,
                    group=group,
                    wire_dtype=None if wires is None else wires.get(key),
                )
            )
        return cls(tensors, [objects[key] for key in names])
