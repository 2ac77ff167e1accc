"""Merging model-parallel parts: the box of a parameter in each file of `mp_rank_XX`, which is a checkpoint of a smaller
model.

The split of a parameter is taken from `universal_checkpoint_info`: from `affine_map`, which DeepSpeed writes for models
that it has split itself, with the place of each run of a part in the unsplit tensor, fused parameters too; or from
patterns of other libraries for parameters split by input features, replicated ones, and else the first dimension.
Without these it is taken from the engine to load into, if its tensor-parallel size is the same, or from shapes, if
every part has the unsplit shape. Otherwise an error is raised, because shapes do not show whether a parameter is fused
(query, key and value).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise import boxes
from shardwise.boxes import Region
from shardwise.checkpoint.formats.deepspeed.neutral import Content, equal_bits, join_values
from shardwise.checkpoint.manifest import BUFFER, PARAMETER, StoredTensor, combine, outline
from shardwise.errors import CheckpointError

_ROW, _WHOLE, _WORDS = (
    "parameter_with_row_parallelism_patterns",
    "tp_replicated_parameter_patterns",
    "vocabulary_parameter_patterns",
)


@dataclass(frozen=True)
class TargetParameter:
    """A parameter of the engine to load into: its unsplit shape, and (region, ranks that hold it) of each part."""

    shape: tuple[int, ...]
    parts: Sequence[tuple[Region, Sequence[int]]] = ()


@dataclass(frozen=True)
class Division:
    """The split of a parameter: its unsplit shape, and the region of each part."""

    shape: tuple[int, ...]
    regions: tuple[Region, ...]


class Divisions:
    """Splits of a checkpoint's parameters, from `universal_checkpoint_info` (or None) and the engine's parameters."""

    def __init__(self, info: Any, target_parameters: Mapping[str, TargetParameter]) -> None:
        found = info if isinstance(info, Mapping) else {}
        affine = found.get("affine_map")
        self._affine = _Patterns(affine.get("params") or {} if isinstance(affine, Mapping) else {})
        patterns = {key: _strings(value) for key, value in found.items() if key != "affine_map"}
        self._rows, self._same, self._words = (_Patterns(patterns.pop(key, ())) for key in (_ROW, _WHOLE, _WORDS))
        self._others = _Patterns(name for names in patterns.values() for name in names)
        self._speaks = _ROW in found
        self._target_parameters = target_parameters

    def of(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], equal: Callable[[], bool]) -> Division:
        """Return the split of a parameter by names and shapes of its parts; `equal` compares their values."""
        described = next((found for name in names if (found := self._affine.find(name)) is not None), None)
        if described is not None:
            return _mapped(names[0], shapes, described)
        return self._named(names, shapes) or self._known(names, shapes, equal)

    def _named(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Division | None:
        rows, same, words, others = (
            any(patterns.find(name) is not None for name in names)
            for patterns in (self._rows, self._same, self._words, self._others)
        )
        if not self._speaks or (others and not rows and not same and not words) or rows + same + words > 1:
            return None
        if same or not shapes[0]:
            return _replicated(names[0], shapes)
        return _side_by_side(names[0], shapes, 1 if rows and len(shapes[0]) > 1 else 0)

    def _known(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], equal: Callable[[], bool]) -> Division:
        whole = next((self._target_parameters[name] for name in names if name in self._target_parameters), None)
        count = len(shapes)
        subject = f"parameter {names[0]!r}: {count} model-parallel parts of shapes {_listed(shapes)}"
        if whole is None:
            raise CheckpointError(
                f"{subject}, and the files do not describe its split. Load the checkpoint into an engine of a model "
                f"that has it, with tensor_parallel.autotp_size={count}, which knows; what that saves fits any layout"
            )
        if all(shape == whole.shape for shape in shapes):
            if not equal():
                raise CheckpointError(
                    f"{subject}, each of them that of the whole, and the values are not the same: files of several "
                    "checkpoints, or ranks that have diverged. Which of them is right is unknown"
                )
            return _replicated(names[0], shapes)
        regions = [box for n in range(count) for box, ranks in whole.parts if any(rank % count == n for rank in ranks)]
        if [boxes.sizes(region) for region in regions] == list(shapes):
            return Division(whole.shape, tuple(regions))
        raise CheckpointError(
            f"{subject} of an unsplit {list(whole.shape)}, and the files do not describe whether it is one tensor "
            "or several fused ones, each split. Load the checkpoint with "
            f"tensor_parallel.autotp_size={count} (rules of tensor_parallel.partition_config.layer_specs describe the "
            "split of your own layers); what that saves fits any layout"
        )


class _Patterns:
    def __init__(self, patterns: Mapping[str, Any] | Iterable[str]) -> None:
        given = patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns, True)
        self._exact: dict[str, Any] = {}
        self._others: list[tuple[re.Pattern[str], Any]] = []
        for pattern, value in given.items():
            plain = re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$"))
            if pattern == f"^{re.escape(plain)}$":
                self._exact[plain] = value
                continue
            try:
                self._others.append((re.compile(pattern), value))
            except re.error as error:
                raise CheckpointError(
                    f"universal_checkpoint_info: {pattern!r} is no regular expression: {error}"
                ) from error

    def find(self, name: str) -> Any:
        if name in self._exact:
            return self._exact[name]
        return next((value for pattern, value in self._others if pattern.match(name)), None)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return _strings(value["patterns"]) if "patterns" in value else [str(key) for key in value]
    return [text for item in value for text in _strings(item)] if isinstance(value, (list, tuple)) else []


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return outline([str(list(shape)) for shape in shapes])


def _replicated(name: str, shapes: Sequence[tuple[int, ...]]) -> Division:
    if len(set(shapes)) > 1:
        raise CheckpointError(
            f"parameter {name!r}: should be whole in every model-parallel part, found the shapes {_listed(shapes)}"
        )
    return Division(shapes[0], (boxes.whole(shapes[0]),) * len(shapes))


def _side_by_side(name: str, shapes: Sequence[tuple[int, ...]], dimension: int) -> Division:
    rest = {shape[:dimension] + shape[dimension + 1 :] for shape in shapes}
    if len(rest) > 1:
        raise CheckpointError(
            f"parameter {name!r}: should be divided in dimension {dimension}, found the shapes {_listed(shapes)}"
        )
    ends = [0, *itertools.accumulate(shape[dimension] for shape in shapes)]
    whole = list(shapes[0])
    whole[dimension] = ends[-1]
    regions = []
    for pair in itertools.pairwise(ends):
        region = list(boxes.whole(whole))
        region[dimension] = pair
        regions.append(tuple(region))
    return Division(tuple(whole), tuple(regions))


def _mapped(name: str, shapes: Sequence[tuple[int, ...]], described: Any) -> Division:
    try:
        whole = tuple(int(size) for size in described["logical_shape"])
        regions = [_region(whole, shape, described["ranks"][rank]) for rank, shape in enumerate(shapes)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"parameter {name!r}: its entry in universal_checkpoint_info (affine_map) does not fit parts of shapes "
            f"{_listed(shapes)}, or is of a form that is not known "
            f"({type(error).__name__}: {error})"
        ) from error
    return Division(whole, tuple(regions))


def _region(whole: tuple[int, ...], shape: tuple[int, ...], described: Mapping[str, Any]) -> Region:
    """Return the region of a part; its pieces are consecutive along one dimension."""
    if tuple(described["shard_shape"]) != shape:
        raise ValueError(f"a part should have shape {list(described['shard_shape'])}")
    pieces = [piece for piece in described["pieces"] if math.prod(piece["shape"])]
    if not pieces:
        if math.prod(shape):
            raise ValueError("a part has elements without a description")
        return ((0, 0),) * len(whole)
    found = sorted((_box(shape, p["dest"], p["shape"]), _box(whole, p["source"], p["shape"])) for p in pieces)
    region = boxes.region(
        tuple(dict.fromkeys(source[dimension] for _, source in found)) for dimension in range(len(whole))
    )
    for dest, source in found:
        for runs, one, other in zip(boxes.ranges(region), dest, source, strict=True):
            if one[0] != sum(min(end, other[0]) - first for first, end in runs if first < other[0]):
                raise ValueError("pieces of a part do not follow one another as in the whole")
    if boxes.sizes(region) != shape or sum(math.prod(piece["shape"]) for piece in pieces) != math.prod(shape):
        raise ValueError("the pieces of a part are not all of it")
    return region


def _box(shape: tuple[int, ...], place: Sequence[Any], sizes: Sequence[int]) -> boxes.Box:
    offset, given = int(place[0]), tuple(place[1])
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    if any(own != expected and size > 1 for own, expected, size in zip(strides, given, sizes, strict=True)):
        raise ValueError(f"strides {list(given)} in a tensor of shape {list(shape)}")
    found = []
    for stride, size in zip(strides, sizes, strict=True):
        first, offset = divmod(offset, stride)
        found.append((first, first + int(size)))
    if offset or not boxes.is_within(tuple(found), shape):
        raise ValueError(f"a piece outside of a tensor of shape {list(shape)}")
    return tuple(found)


def join(
    parts: Sequence[Content], splits: Divisions, names: Mapping[str, str], read: Callable[[StoredTensor], torch.Tensor]
) -> Content:
    """Return the content of all model-parallel parts. `names` are those in the files, where they differ; `read` returns
    the values of a tensor.
    """
    joined = replace(parts[0], tensors={}, world=sum(part.world for part in parts))
    divisions: dict[str, Division] = {}
    for (name, kind, rank), tensor in parts[0].tensors.items():
        held = [own for part in parts if (own := part.tensors.get((name, kind, rank))) is not None]
        alike = functools.partial(_equal, held, read)
        if kind == BUFFER:
            if rank is None and (len(held) < len(parts) or not alike()):
                raise CheckpointError(
                    f"buffer {name!r} has other values on other model-parallel ranks; how these are joined is not known"
                )
            joined.keep(tensor)
        elif kind == PARAMETER:
            if len(held) < len(parts):
                raise CheckpointError(f"some model-parallel ranks have no parameter {name!r}: files of two checkpoints")
            known = (name, *tensor.aliases, *filter(None, [names.get(name)]))
            divisions[name] = splits.of(known, [own.shape for own in held], alike)
    placed: list[StoredTensor] = []
    taken: set[tuple[str, str, Region]] = set()
    for number, part in enumerate(parts):
        for (name, kind, _), tensor in part.tensors.items():
            if kind == BUFFER:
                continue
            if name not in divisions:
                raise CheckpointError(
                    f"only model-parallel rank {number} has {kind} {name!r}: files of two checkpoints"
                )
            division = divisions[name]
            region = division.regions[number]
            if not tensor.numel and 0 not in division.shape:
                continue  # an optimizer has no state for an empty part
            repeated = (name, kind, region) in taken
            taken.add((name, kind, region))
            box = None if region == boxes.whole(division.shape) else region
            slices = () if repeated else tuple(piece._replace(box=box) for piece in tensor.slices)
            placed.append(replace(tensor, shape=division.shape, slices=slices))
        if number:
            join_values(joined, part, number)
            joined.refused = joined.refused or part.refused
    for tensor in combine(placed):
        joined.keep(tensor)
    return joined


def _equal(tensors: Sequence[StoredTensor], read: Callable[[StoredTensor], torch.Tensor]) -> bool:
    return equal_bits(read(tensor) for tensor in tensors)
