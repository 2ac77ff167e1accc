"""Place of each parameter and its optimizer state in DeepSpeed's files.

Stage 0: the module's state dict holds all parameters unsharded. The optimizer's state dict numbers them without names.
In 16 bits the file also has fp32 masters, in the same order.

Stages 1 and 2: the trained parameters of a group are concatenated in a flat buffer in the order of `param_shapes`,
padded at its end to a multiple of the number of ranks. Each rank has a range of it, and a parameter may begin on one
rank and end on the next. `param_alignment_paddings` are gaps after single parameters. Optimizer state is flat in the
same way; the last ranks' masters usually lack the padding.

Stage 3: each parameter, frozen ones too, is padded to a multiple of the number of ranks and sharded. A rank's shards of
the trained parameters of a (sub-)group are concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.formats.deepspeed.experts import ExpertLayer, Experts, Holders
from shardwise.checkpoint.formats.deepspeed.neutral import Content, Piece
from shardwise.checkpoint.manifest import OPTIMIZER, PARAMETER, outline
from shardwise.errors import CheckpointError

_TENSOR_WIDE = frozenset({"step"})
"""Optimizer states that are one number even if a partition has one element."""


@dataclass(frozen=True)
class OptimizerFile:
    """A file of optimizer states: its name, and its content under `optimizer_state_dict`."""

    file: str
    content: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        if key not in self.content:
            raise CheckpointError(
                f"{self.file}: expected the key {key!r}, found {outline(sorted(map(str, self.content)))}: a layout "
                "that is not known"
            )
        return self.content[key]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def flat_partitions(
    content: Content,
    shapes: Sequence[Mapping[str, Any]],
    ranks: Sequence[OptimizerFile],
    holders: Sequence[Sequence[Holders]],
    *,
    reordered: bool,
) -> None:
    """Add files of stages 1 and 2, in rank order.

    `shapes` is `param_shapes`: for each group, shapes by name in the order of its flat buffer. `holders` are for each
    group the ranks of each of its copies, which are other parameters. `reordered`: `round_robin_gradients` was on,
    buffers are in the order of `param_shapes`, and `param_slice_mappings` has the names of the other order.
    """
    bases = [_base_state(rank) for rank in ranks]
    for number, (group, settings) in enumerate(zip(shapes, bases[0][1], strict=True)):
        content.settings.append(settings_of(settings))
        places = _places(group, ranks[0], number)
        for copy in holders[number]:
            for name, shape in group.items():
                content.shapes[copy.name(name)], content.group[copy.name(name)] = tuple(shape), number
            masters = [ranks[index]["single_partition_of_fp32_groups"][number] for index in copy.ranks]
            size = _partition_size([ranks[index] for index in copy.ranks], masters, number)
            for place, (index, master) in enumerate(zip(copy.ranks, masters, strict=True)):
                rank, begin, state = ranks[index], place * size, bases[index][0].get(number, {})
                found: dict[str, tuple[int, int]] = {}
                for name, (at, numel) in places.items():
                    first, last = max(at, begin), min(at + numel, begin + size)
                    if first < last:
                        found[name] = (first - begin, last - first)
                        piece = Piece(first - at, last - at, master[first - begin : last - begin], rank.file)
                        content.add(copy.name(name), PARAMETER, piece)
                        _add_state(content, copy.name(name), state, master.numel(), first - begin, piece)
                if not reordered:
                    _compare_mapping(rank, number, found)


def _base_state(rank: OptimizerFile) -> tuple[dict[int, Any], Sequence[Mapping[str, Any]]]:
    """Return each group's partition state and settings. Elastic checkpoints have a list of states, no settings."""
    base = rank["base_optimizer_state"]
    if isinstance(base, (list, tuple)):
        return dict(enumerate(base)), [{} for _ in base]
    states, settings = base["state"], base["param_groups"]
    return {n: states[group["params"][0]] for n, group in enumerate(settings) if group["params"][0] in states}, settings


def _places(group: Mapping[str, Any], rank: OptimizerFile, number: int) -> dict[str, tuple[int, int]]:
    paddings = rank.content.get("param_alignment_paddings")
    gaps = [0] * len(group) if paddings is None else paddings[number]
    places, place = {}, 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        places[name] = (place, math.prod(shape))
        place += places[name][1] + gap
    return places


def _partition_size(ranks: Sequence[OptimizerFile], masters: Sequence[torch.Tensor], number: int) -> int:
    """Return the elements of a rank's range of a flat buffer; masters may lack the padding."""
    counts = [master.numel() for master in masters]
    padded = {count + rank["group_paddings"][number] for rank, count in zip(ranks, counts, strict=True)}
    sizes = padded if len(padded) == 1 else set(counts)
    if len(sizes) != 1:
        raise CheckpointError(
            f"{ranks[0].file}: partitions of group {number} have {outline([str(count) for count in counts])} elements "
            "and paddings that do not make them equal: files of several checkpoints"
        )
    return sizes.pop()


def _compare_mapping(rank: OptimizerFile, number: int, found: Mapping[str, tuple[int, int]]) -> None:
    mappings = rank.content.get("param_slice_mappings")
    if mappings is None:
        return
    expected = {name: (fragment.start, fragment.numel) for name, fragment in mappings[number].items()}
    if expected != found:
        raise CheckpointError(
            f"{rank.file}: the partition of group {number} has other parameters by param_shapes than by "
            f"param_slice_mappings ({outline(sorted({**found, **expected}))}): files of several checkpoints, or a "
            "layout that is not known"
        )


def _add_state(content: Content, name: str, state: Mapping[str, Any], least: int, first: int, elements: Piece) -> None:
    """Add the optimizer state of a fragment, from that of a rank's partition with `least` elements without padding.

    `first` is the fragment's place in the partition, `elements` its master weights or its range of the parameter.
    """
    for entry, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and not (entry in _TENSOR_WIDE and value.numel() == 1):
            if value.dim() == 1 and value.numel() >= least:
                cut = value[first : first + elements.stop - elements.start]
                content.add(name, OPTIMIZER + entry, Piece(elements.start, elements.stop, cut, elements.file))
            else:
                content.dropped.add(f"{entry} (of shape {list(value.shape)})")
        elif value is not None:
            single = value.reshape(()) if isinstance(value, torch.Tensor) else value
            content.set_value(name, entry, single, elements.file)


def divided_parameters(content: Content, shapes: Sequence[Mapping[str, Any]], ranks: Sequence[OptimizerFile]) -> None:
    """Add files of stage 3, in rank order; `shapes` as for `flat_partitions`, by (sub-)group."""
    masters = [rank["fp32_flat_groups"] for rank in ranks]
    settings = ranks[0]["optimizer_state_dict"]["param_groups"]
    owner = {key: number for number, group in enumerate(settings) for key in group["params"]}
    content.settings += [settings_of(group) for group in settings]
    number, offset = 0, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        while number < len(masters[0]) and offset == masters[0][number].numel():
            number, offset = number + 1, 0
        content.shapes[name], content.group[name] = tuple(shape), owner.get(number, 0)
        for rank, own, (first, last) in zip(ranks, masters, shards(numel, len(ranks)), strict=True):
            if first < last:
                flat = own[number]
                piece = Piece(first, last, flat[offset : offset + last - first], rank.file)
                content.add(name, PARAMETER, piece)
                state = rank["optimizer_state_dict"]["state"].get(number, {})
                _add_state(content, name, state, flat.numel(), offset, piece)
        offset += part


def shards(numel: int, world: int) -> list[tuple[int, int]]:
    """Return the elements of each rank of a parameter of stage 3."""
    part = -(-numel // world)
    return [(min(numel, rank * part), min(numel, (rank + 1) * part)) for rank in range(world)]


# -- stage 0, whose files only number the parameters with optimizer state ----------------------------------------------


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

    def add(
        self, content: Content, shapes: Mapping[str, tuple[int, ...]], names: Sequence[Sequence[str]], wanted: set[str]
    ) -> None:
        """Add the settings of groups, and the state of the `wanted` of their parameters, which `names` lists."""
        content.settings = [settings_of(group) for group in self.groups]
        for number, (group, members) in enumerate(zip(self.groups, names, strict=True)):
            for position, (key, name) in enumerate(zip(group["params"], members, strict=True)):
                if name not in wanted:
                    continue
                content.shapes[name], content.group[name] = shapes[name], number
                numel, values = math.prod(shapes[name]), torch.empty(0, device="cpu")
                if self.masters is not None:
                    values = self.masters[number][position].reshape(-1)
                    content.add(name, PARAMETER, Piece(0, numel, values, self.file))
                found = {
                    entry: value.reshape(-1)
                    if isinstance(value, torch.Tensor) and tuple(value.shape) == shapes[name]
                    else value
                    for entry, value in self.state["state"].get(key, {}).items()
                }
                _add_state(content, name, found, numel, 0, Piece(0, numel, values, self.file))

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
