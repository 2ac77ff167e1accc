"""Stage 0: names of the parameters with optimizer state, which the file only numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.formats.deepspeed.experts import ExpertLayer, Experts
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """The optimizer to load into, to resolve ambiguities: for each group all names of parameters, names of settings."""

    optimizer: str
    groups: Sequence[Sequence[Sequence[str]]]
    settings: Sequence[frozenset[str]]

    def members(self, shapes: Mapping[str, Any]) -> list[list[str]]:
        """Return one name of each parameter of each group: the checkpoint's, if it has one."""
        return [[next((n for n in known if n in shapes), known[0]) for known in group] for group in self.groups]


@dataclass(frozen=True)
class Numbered:
    """The optimizer of one file of stage 0: state dict in torch's form, and fp32 masters of 16-bit parameters."""

    file: str
    state: Mapping[str, Any]
    masters: Sequence[Sequence[torch.Tensor]] | None

    @classmethod
    def of(cls, file: str, wrapped: Mapping[str, Any]) -> Numbered:
        """Return the optimizer under `optimizer` in a file. Raises KeyError for a layout that is not known."""
        if "optimizer_state_dict" in wrapped:
            return cls(file, wrapped["optimizer_state_dict"], wrapped["fp32_groups"])
        return cls(file, wrapped, None)

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Settings and numbers of each parameter group."""
        found: Sequence[Mapping[str, Any]] = self.state["param_groups"]
        return found

    def names(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        members: Sequence[Sequence[str]] | None,
        experts: Experts,
        own: Mapping[ExpertLayer, range],
    ) -> list[list[str]]:
        """Return the names of the parameters of each group. `members` are those of the engine's groups; None: unknown.
        `own` are the experts of the rank of this file, by layer.
        """
        if members is None:
            found = self._by_shapes(shapes, experts, own)
        else:
            found = experts.of_rank(members, own)
            counts = [len(group["params"]) for group in self.groups]
            if [len(group) for group in found] != counts:
                raise CheckpointError(
                    f"the optimizer's state is of groups of {counts} parameters, this engine's has "
                    f"{[len(group) for group in found]}"
                )
        for g, (group, names) in enumerate(zip(self.groups, found, strict=True)):
            for i, (key, name) in enumerate(zip(group["params"], names, strict=True)):
                shape = self._shape(g, i, key, shapes.get(name))
                if name not in shapes or shape != shapes[name]:
                    raise CheckpointError(
                        f"the optimizer's state number {key} is of shape {list(shape)}, and the parameter in its "
                        f"place, {name!r}, of {list(shapes.get(name, ()))}"
                    )
        return found

    def _by_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], experts: Experts, own: Mapping[ExpertLayer, range]
    ) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.groups]
        others = [name for name in shapes if experts.layer_of(name) is None]
        separate = [name for layer, numbers in own.items() for name in layer.names(numbers)]
        for names, marked in ((others, False), (separate, True)):
            chosen = [n for n, group in enumerate(self.groups) if bool(group.get("moe")) == marked]
            sizes = [[self._shape(n, i, key) for i, key in enumerate(self.groups[n]["params"])] for n in chosen]
            given = names_of_numbers({name: shapes[name] for name in names}, sizes)
            for n, some in zip(chosen, given, strict=True):
                found[n] = some
        return found

    def _shape(self, group: int, position: int, key: Any, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        if self.masters is not None:
            return tuple(self.masters[group][position].shape)
        entries = self.state["state"].get(key, {})
        found = [value for name, value in entries.items() if isinstance(value, torch.Tensor) and name != "step"]
        if found:
            return tuple(found[0].shape)
        if default is None:
            raise CheckpointError(f"the optimizer holds nothing for its parameter {key}, so its name is unknown")
        return default


def names_of_numbers(
    shapes: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[str]]:
    """Name the parameters of optimizer groups by shapes and order only; a name is returned only if no other fits. Each
    group is assumed to have the module's order, which `model.parameters()` and `shapes` have.

    >>> names_of_numbers({"w": (2, 3), "b": (2,), "v": (3, 3)}, [[(2, 3), (3, 3)], [(2,)]])
    [['w', 'v'], ['b']]
    """
    count = sum(len(group) for group in groups)
    if count != len(shapes):
        raise CheckpointError(
            f"the optimizer has {count} parameters and the model {len(shapes)}, so which of them it had is not in the "
            "file"
        )
    names: list[list[str]] = [[] for _ in groups]
    for name, shape in shapes.items():
        fitting = [
            own for own, group in zip(names, groups, strict=True) if len(own) < len(group) and group[len(own)] == shape
        ]
        if len(fitting) != 1:
            raise CheckpointError(
                f"parameter {name!r} of shape {list(shape)} may belong to {len(fitting)} of the {len(groups)} "
                "parameter groups, and the file has no names"
            )
        fitting[0].append(name)
    return names
