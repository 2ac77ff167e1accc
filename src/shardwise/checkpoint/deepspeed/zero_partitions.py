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
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.deepspeed.experts import Holders
from shardwise.checkpoint.manifest import OPTIMIZER, PARAMETER, outline
from shardwise.errors import CheckpointError

_TENSOR_WIDE = frozenset({"step"})
"""Optimizer states that are one number even if a partition has one element."""


@dataclass(frozen=True)
class DeepSpeedPiece:
    """Elements `[start, stop)` of a flattened tensor, as 1-D values in a mapped file."""

    start: int
    stop: int
    values: torch.Tensor
    file: str


@dataclass
class DeepSpeedLayout:
    """All trained parameters of a checkpoint with their shapes, groups and optimizer state. `pieces` are by name and
    kind (`parameter`, `optimizer/<entry>`), in order. `values` has each parameter's state entries with one value, such
    as step counts. `settings` are those of each parameter group. `dropped` describes state entries that cannot be
    loaded.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    group: dict[str, int] = field(default_factory=dict)
    pieces: dict[tuple[str, str], list[DeepSpeedPiece]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)

    def add(self, name: str, kind: str, piece: DeepSpeedPiece) -> None:
        """Append a piece."""
        if piece.values.numel() != piece.stop - piece.start:
            raise CheckpointError(
                f"{piece.file}: {kind} {name!r}: expected {piece.stop - piece.start} elements, found "
                f"{piece.values.numel()}"
            )
        if piece.stop > piece.start:
            self.pieces.setdefault((name, kind), []).append(piece)

    def set_value(self, name: str, entry: str, value: Any, file: str) -> None:
        """Set an entry with one value; ranks must agree."""
        held = self.values.setdefault(name, {})
        value = as_scalar(value)
        if entry in held and not same(held[entry], value):
            raise CheckpointError(
                f"{file}: optimizer state {entry!r} of {name!r} is {value!r}, in another rank's file {held[entry]!r}: "
                "files of several checkpoints"
            )
        held[entry] = value

    def take_steps(self, file: str) -> None:
        """Copy step counts from groups to parameters, for optimizers that keep them in groups."""
        held = {name for name, kind in self.pieces if kind != PARAMETER}
        for name in held:
            count = self.settings[self.group[name]].get("step")
            if isinstance(count, (int, torch.Tensor)) and "step" not in self.values.get(name, {}):
                self.set_value(name, "step", count, file)

    def check(self) -> None:
        """Check that every element of each present entry exists once. Raises CheckpointError if some are missing."""
        for (name, kind), pieces in self.pieces.items():
            place = 0
            for piece in pieces:
                if piece.start != place:
                    raise CheckpointError(
                        f"{piece.file}: {kind} {name!r}: expected elements from {place} on, found [{piece.start}, "
                        f"{piece.stop})"
                    )
                place = piece.stop
            if place != math.prod(self.shapes[name]):
                raise CheckpointError(
                    f"{pieces[-1].file}: {kind} {name!r} of shape {list(self.shapes[name])}: {place} of "
                    f"{math.prod(self.shapes[name])} elements are there"
                )
        for name, shape in self.shapes.items():
            if math.prod(shape) and (name, PARAMETER) not in self.pieces:
                raise CheckpointError(f"parameter {name!r}: its fp32 values are in no file of the checkpoint")


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


@dataclass(frozen=True)
class Opened:
    """A file of optimizer states: its name, and its content under `optimizer_state_dict`."""

    file: str
    content: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """Return the value under a path of keys. Raises CheckpointError if there is no such key."""
        found: Any = self.content
        for depth, key in enumerate(keys):
            if not isinstance(found, Mapping) or key not in found:
                raise CheckpointError(
                    f"{self.file}: expected the key {'.'.join(keys[: depth + 1])!r}, found "
                    f"{sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__}: a layout that "
                    "this version does not know"
                )
            found = found[key]
        return found

    def tensors(self, key: str) -> list[torch.Tensor]:
        """Return a list of flat tensors."""
        found = self.get(key)
        if not isinstance(found, (list, tuple)) or not all(
            isinstance(item, torch.Tensor) and item.dim() == 1 for item in found
        ):
            raise CheckpointError(f"{self.file}: {key}: expected a list of flat tensors: a layout that is not known")
        return list(found)


def flat_partitions(
    shapes: Sequence[Mapping[str, Any]],
    ranks: Sequence[Opened],
    holders: Sequence[Sequence[Holders]],
    *,
    reordered: bool,
) -> DeepSpeedLayout:
    """Return the layout of files of stages 1 and 2, in rank order.

    `shapes` is `param_shapes`: for each group, shapes by name in the order of its flat buffer. `holders` are for each
    group the ranks of each of its copies, which are other parameters. `reordered`: `round_robin_gradients` was on,
    buffers are in the order of `param_shapes`, and `param_slice_mappings` has the names of the other order.
    """
    layout = DeepSpeedLayout()
    bases = [_base_state(rank) for rank in ranks]
    settings = bases[0][1]
    masters = [rank.tensors("single_partition_of_fp32_groups") for rank in ranks]
    for rank, own in zip(ranks, masters, strict=True):
        if len(own) != len(shapes) or len(settings) != len(shapes):
            raise CheckpointError(
                f"{rank.file}: expected {len(shapes)} parameter groups as in the model states, found {len(own)} "
                f"partitions and {len(settings)} groups of settings"
            )
    for number, group in enumerate(shapes):
        layout.settings.append(settings_of(settings[number]))
        places = _places(group, ranks[0], number)
        for copy in holders[number]:
            names = {name: copy.names.get(name, name) for name in group}
            for name, shape in group.items():
                layout.shapes[names[name]] = tuple(shape)
                layout.group[names[name]] = number
            held = [(ranks[index], masters[index][number], bases[index][0].get(number, {})) for index in copy.ranks]
            size = _partition_size([(rank, master.numel()) for rank, master, _ in held], number)
            for index, (rank, master, state) in enumerate(held):
                begin = index * size
                found: dict[str, tuple[int, int]] = {}
                for name, (place, numel) in places.items():
                    first, last = max(place, begin), min(place + numel, begin + size)
                    if first >= last:
                        continue
                    cut, elements = slice(first - begin, last - begin), (first - place, last - place)
                    found[name] = (cut.start, last - first)
                    if cut.stop > master.numel():
                        raise CheckpointError(
                            f"{rank.file}: {name!r} ends at element {cut.stop} of a partition of {master.numel()} "
                            "elements"
                        )
                    layout.add(names[name], PARAMETER, DeepSpeedPiece(*elements, master[cut], rank.file))
                    _add_state(layout, rank.file, names[name], state, master.numel(), cut, elements)
                if not reordered:
                    _compare_mapping(rank, number, found)
    return layout


def _base_state(rank: Opened) -> tuple[dict[int, Any], Sequence[Mapping[str, Any]]]:
    """Return each group's partition state and settings. Elastic checkpoints have a list of states, no settings."""
    base = rank.get("base_optimizer_state")
    if isinstance(base, (list, tuple)):
        return dict(enumerate(base)), [{} for _ in base]
    states, settings = rank.get("base_optimizer_state", "state"), rank.get("base_optimizer_state", "param_groups")
    if any(len(group["params"]) != 1 for group in settings):
        raise CheckpointError(
            f"{rank.file}: expected one flat tensor for each parameter group: a layout that is not known"
        )
    return {n: states[group["params"][0]] for n, group in enumerate(settings) if group["params"][0] in states}, settings


def _places(group: Mapping[str, Any], rank: Opened, number: int) -> dict[str, tuple[int, int]]:
    paddings = rank.content.get("param_alignment_paddings")
    gaps = [0] * len(group) if paddings is None else paddings[number]
    places, place = {}, 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        places[name] = (place, math.prod(shape))
        place += places[name][1] + gap
    return places


def _partition_size(held: Sequence[tuple[Opened, int]], number: int) -> int:
    """Return the elements of a rank's range of a flat buffer; masters may lack the padding."""
    whole = {count + rank.get("group_paddings")[number] for rank, count in held}
    sizes = whole if len(whole) == 1 else {count for _, count in held}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{held[0][0].file}: partitions of group {number} have {outline([str(c) for _, c in held])} elements "
            "and paddings that do not make them equal: files of several checkpoints"
        )
    return sizes.pop()


def _compare_mapping(rank: Opened, number: int, found: Mapping[str, tuple[int, int]]) -> None:
    mappings = rank.content.get("param_slice_mappings")
    if mappings is None:
        return
    expected = {name: (fragment.start, fragment.numel) for name, fragment in mappings[number].items()}
    if expected != found:
        name = next(name for name in {**found, **expected} if found.get(name) != expected.get(name))
        raise CheckpointError(
            f"{rank.file}: {name!r} should have (start, elements) {found.get(name)} in the partition of group {number} "
            f"by param_shapes, and {expected.get(name)} by param_slice_mappings: files of several checkpoints, or an "
            "unknown layout"
        )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def _add_state(
    layout: DeepSpeedLayout,
    file: str,
    name: str,
    state: Mapping[str, Any],
    least: int,
    cut: slice,
    elements: tuple[int, int],
) -> None:
    """Add the optimizer state of a fragment, from that of a rank's partition with `least` elements without padding, to
    a layout. `cut` is the fragment's place in the partition, `elements` its range of the parameter.
    """
    for entry, value in state.items():
        number = (
            not isinstance(value, torch.Tensor) or value.dim() == 0 or (entry in _TENSOR_WIDE and value.numel() == 1)
        )
        if number:
            if value is not None:
                layout.set_value(name, entry, value.reshape(()) if isinstance(value, torch.Tensor) else value, file)
        elif value.dim() == 1 and value.numel() >= least:
            layout.add(name, OPTIMIZER + entry, DeepSpeedPiece(*elements, value[cut], file))
        else:
            layout.dropped.add(f"{entry} (of shape {list(value.shape)})")


def divided_parameters(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Opened]) -> DeepSpeedLayout:
    """Return the layout of files of stage 3, in rank order; `shapes` as for `flat_partitions`, by (sub-)group."""
    layout = DeepSpeedLayout()
    world = len(ranks)
    masters = [rank.tensors("fp32_flat_groups") for rank in ranks]
    states = [rank.get("optimizer_state_dict", "state") for rank in ranks]
    settings = ranks[0].get("optimizer_state_dict", "param_groups")
    owner = {key: number for number, group in enumerate(settings) for key in group["params"]}
    layout.settings = [settings_of(group) for group in settings]
    for rank, own in zip(ranks, masters, strict=True):
        if [flat.numel() for flat in own] != [flat.numel() for flat in masters[0]]:
            raise CheckpointError(f"{rank.file}: its flat groups have other sizes than those of {ranks[0].file}")
    if set(owner) != set(range(len(masters[0]))):
        raise CheckpointError(
            f"{ranks[0].file}: expected {len(owner)} flat groups as in the optimizer's state, found {len(masters[0])}"
        )
    number, offset = 0, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        numel = math.prod(shape)
        part = -(-numel // world)
        while number < len(masters[0]) and offset == masters[0][number].numel():
            number, offset = number + 1, 0
        if part and (number == len(masters[0]) or offset + part > masters[0][number].numel()):
            raise CheckpointError(
                f"{ranks[0].file}: {name!r} of shape {list(shape)} does not fit into flat group {number} behind "
                f"{offset} elements: a layout that is not known"
            )
        layout.shapes[name] = tuple(shape)
        layout.group[name] = owner.get(number, 0)
        for index, rank in enumerate(ranks):
            first, last = (min(numel, edge * part) for edge in (index, index + 1))
            if first == last:
                continue
            flat = masters[index][number]
            cut = slice(offset, offset + last - first)
            layout.add(name, PARAMETER, DeepSpeedPiece(first, last, flat[cut], rank.file))
            _add_state(layout, rank.file, name, states[index].get(number, {}), flat.numel(), cut, (first, last))
        offset += part
    left = sum(flat.numel() for flat in masters[0][number:]) - offset
    if left:
        raise CheckpointError(
            f"{ranks[0].file}: {left} elements of its flat groups belong to no parameter: a layout that is not known"
        )
    return layout


def numbered_states(
    layout: DeepSpeedLayout,
    file: str,
    shapes: Mapping[str, tuple[int, ...]],
    names: Sequence[Sequence[str | None]],
    state: Mapping[str, Any],
    masters: Sequence[Sequence[torch.Tensor]] | None,
) -> None:
    """Add the contents of stage 0's optimizer state dict (torch's form) to a layout. `names` are the parameters of each
    group, by number; None is skipped. `masters` are their fp32 values, where the module has 16-bit ones.
    """
    layout.settings = [settings_of(group) for group in state["param_groups"]]
    for number, (group, members) in enumerate(zip(state["param_groups"], names, strict=True)):
        for position, (key, name) in enumerate(zip(group["params"], members, strict=True)):
            if name is None:
                continue
            layout.shapes[name], layout.group[name] = shapes[name], number
            numel = math.prod(shapes[name])
            if masters is not None:
                layout.add(name, PARAMETER, DeepSpeedPiece(0, numel, masters[number][position].reshape(-1), file))
            found = {
                entry: value.reshape(-1)
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shapes[name]
                else value
                for entry, value in state["state"].get(key, {}).items()
            }
            _add_state(layout, file, name, found, numel, slice(0, numel), (0, numel))
