"""The manifest: a checkpoint's content by logical tensor, and the place of the bytes.

A tensor has its name in the model, its global shape, and a list of slices: ranges of the flattened tensor, or of a box
of it, under a key of a file. No entry depends on ranks or stage; `layout` records them for people. A loader of any
layout therefore reads by name, box and range.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

import pydantic
import torch

from shardwise import boxes
from shardwise.boxes import Patch, Region
from shardwise.checkpoint.checksums import FileFacts, Natural
from shardwise.errors import CheckpointError

T = TypeVar("T")

NAME = "manifest.json"
"""Name of the manifest's file."""

BEGINNING = b'{"blake2b": "'
PARAMETER = "parameter"
BUFFER = "buffer"
OPTIMIZER = "optimizer/"


_Ends = tuple[pydantic.StrictInt, pydantic.StrictInt]
_Boxes = list[tuple[_Ends | tuple[_Ends, ...], ...] | None]
"""A `Region` of each slice; text is no number."""

_STRICT = pydantic.with_config(pydantic.ConfigDict(extra="forbid"))


class Slice(NamedTuple):
    """Elements `[start, stop)` of a flattened tensor, stored as the 1-D tensor `key` of `file` in the checkpoint's
    directory. The tensor in the file has the tensor's own shape if the slice is the entire tensor. `start` and `stop`
    count in `box`, with (first, end) or several of these for each dimension; None: the entire tensor.
    """

    file: str
    key: str
    start: int
    stop: int
    box: Region | None = None


def _slices(found: Any) -> tuple[Slice, ...]:
    """Return slices of JSON. Because large manifests have millions, types are checked for whole columns, and boxes once
    for slices in a row. Raises ValueError with the name of the field.
    """
    try:
        rows = list(map(_fields, found))
        complete = {*map(len, found)} <= {len(Slice._fields)}
    except (KeyError, TypeError):
        complete = False
    if not complete:
        raise ValueError(f"expected a list of objects with the fields {', '.join(Slice._fields)}")
    *places, written = zip(*rows, strict=True) if rows else [()]
    for name, kind, column in zip(Slice._fields, (str, str, int, int), places, strict=False):
        wrong = {*map(type, column)} - {kind}
        if wrong:
            raise ValueError(f"{name}: expected {kind.__name__}, found {wrong.pop().__name__}")
    if {*map(type, written)} <= {type(None)}:
        return tuple(map(_slice, rows))
    runs = [(box, len(list(run))) for box, run in itertools.groupby(written)]
    try:
        known = from_json(_Boxes, [box for box, _ in runs])
    except ValueError as error:
        raise ValueError(f"box.{error}") from None
    checked = itertools.chain.from_iterable(map(itertools.repeat, known, (count for _, count in runs)))
    return tuple(map(_slice, zip(*places, checked, strict=True)))


_fields = operator.itemgetter(*Slice._fields)
_slice = functools.partial(tuple.__new__, Slice)


@_STRICT
@dataclass(frozen=True)
class StoredTensor:
    """One logical tensor of a checkpoint.

    Attributes:
        name: name of the parameter or buffer in the model.
        kind: `parameter` (master weights if there are any), `optimizer/<state key>` or `buffer`.
        shape: global shape. Optimizer state with the parameter's shape is sharded like it; other state is not sharded.
        dtype: dtype of the stored values, as `float32`.
        slices: places of the values. Their boxes partition the tensor, and the slices of each box the box, in order.
        aliases: further names of a tied parameter.
        trainable: parameters: whether an optimizer stepped it.
        group: parameters: index of its optimizer parameter group.
        compute_dtype: parameters: dtype in which the module computed with it.
        rank: buffers that differed between ranks: the rank of this value.
    """

    name: str
    kind: Annotated[str, pydantic.Field(pattern="^(parameter|buffer|optimizer/.*)$")]
    shape: tuple[int, ...]
    dtype: str
    slices: Annotated[tuple[Slice, ...], pydantic.PlainValidator(_slices)]
    aliases: tuple[str, ...] = ()
    trainable: bool | None = None
    group: Natural | None = None
    compute_dtype: str | None = None
    rank: Natural | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the stored values."""
        return dtype_of(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON of the manifest."""
        return {**vars(self), "slices": [part._asdict() for part in self.slices]}

    def part(self, box: Region | None) -> StoredTensor:
        """Return a box of the tensor as a tensor, with the slices that overlap it."""
        if box is None:
            return self
        outer = boxes.whole(self.shape)
        slices = [part for part in self.slices if boxes.meet(outer if part.box is None else part.box, box)]
        facts = {**vars(self), "shape": boxes.sizes(box), "slices": tuple(slices)}
        return StoredPart(**facts, of=self.shape, region=box)

    def runs(self, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        """Return the sources of elements `[start, stop)`: slices, and the patch of each, from the slice to memory of
        just these elements. Raises CheckpointError if some are not stored.
        """
        return self._runs(self.shape, boxes.whole(self.shape), start, stop)

    def _runs(self, shape: tuple[int, ...], region: Region, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        found: list[tuple[Slice, Patch]] = []
        whole, missing = boxes.whole(shape), stop - start
        plain = region == whole
        for part in self.slices:
            if missing <= 0:
                break
            if plain and part.box is None and (part.stop <= start or part.start >= stop):
                continue  # most slices of a tensor that is sharded over many ranks
            stored = whole if part.box is None else part.box
            for patch in boxes.overlap(stored, part.start, part.stop, region, start, stop):
                found.append((part, patch))
                missing -= patch.numel
        if missing > 0:
            raise CheckpointError(
                f"{self.kind} {self.name!r}: {missing} of elements [{start}, {stop}) of {self.numel} are in no file of "
                "the checkpoint"
            )
        return found

    def check_cover(self) -> None:
        """Raise ValueError unless slices, in order, have each element once. Their boxes are inside of the tensor."""
        outer = boxes.whole(self.shape)
        parts: list[Region] = []
        for own, run in itertools.groupby(self.slices, operator.attrgetter("box")):
            box = outer if own is None else own
            size = math.prod(boxes.sizes(box))
            names, _, starts, stops, _ = zip(*run, strict=True)
            places = (0, *stops)
            if places != (*starts, size) or list(places) != sorted(places):  # columns, because there may be millions
                of = "" if box == outer else f" of the box {[list(ends) for ends in box]}"
                for file, place, start, stop in zip(names, places, starts, stops, strict=False):
                    if not place == start <= stop <= size:
                        raise ValueError(
                            f"{self.kind} {self.name!r}: expected a run from element {place}{of}, found "
                            f"[{start}, {stop}) of {size} elements (in {file})"
                        )
                raise ValueError(f"{self.kind} {self.name!r}: {stops[-1]} of {size} elements{of} are stored")
            parts.append(box)
        if parts == [outer]:
            return
        try:
            wrong = boxes.misfit(self.shape, parts)
        except ValueError as error:
            raise ValueError(f"{self.kind} {self.name!r}: {error}") from error
        if wrong is not None:
            element, times = wrong
            here = tuple((index, index + 1) for index in element)
            held = [part for part in self.slices if boxes.meet(outer if part.box is None else part.box, here)]
            files = dict.fromkeys(part.file for part in held)
            raise ValueError(
                f"{self.kind} {self.name!r}: element {list(element)} of {list(self.shape)} is in {times} boxes"
                + (f", of {outline(list(files))}" if files else "")
            )


@dataclass(frozen=True)
class StoredPart(StoredTensor):
    """A box `region` of a tensor of shape `of`, from `StoredTensor.part`; its slices have the tensor's boxes."""

    of: tuple[int, ...] = ()
    region: Region = ()

    def runs(self, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        """Return the sources of elements `[start, stop)` of the box."""
        return self._runs(self.of, self.region, start, stop)


@_STRICT
@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint except the values of tensors.

    Trees are JSON of `shardwise.checkpoint.nested_json`; references to tensors in them are {"file": ..., "key": ...}.

    Attributes:
        created: seconds since 1970.
        versions: versions of shardwise, torch and Python.
        layout: stage, number of ranks and dtype at saving, for information. "sequence" is the number of the state,
            "copy" that of its copy in memory; "latest" is false if `latest` was not to name it; "scheduler" is the
            class of the schedule; "job" is a random name; "finite" is false with infinite or NaN values, which
            "not_finite" names.
        files: size and checksums by file name.
        excluded: names of frozen parameters that were left out on request.
        optimizer: {"class", "groups": [settings of each group], "values": {parameter: {key: value}}}, or None.
        scheduler, scaler: trees of the learning-rate schedule and the loss scaler, or None.
        loader: tree of the position in the training data, or None; earlier versions have it in each of `ranks`.
        counters: steps and samples so far.
        ranks: for each rank a tree with its random number generators.
        extra, client: trees of the extra state of modules, by name, and of the user's own state.
    """

    tag: str
    created: pydantic.FiniteFloat
    versions: dict[str, str]
    layout: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: list[StoredTensor]
    excluded: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    loader: Any = None
    counters: dict[str, Natural] = field(default_factory=dict)
    ranks: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    client: Any = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether trained parameters and optimizer state were finite, or not checked."""
        return self.layout.get("finite") is not False

    @property
    def sequence(self) -> int:
        """Number of the state, larger in newer ones; 0 in manifests of earlier versions."""
        found = self.layout.get("sequence", 0)
        return found if type(found) is int and found >= 0 else 0

    def trees(self) -> list[Any]:
        """Return all nested values that may refer to tensors."""
        found = [self.client, self.scheduler, self.scaler, self.loader, self.ranks, list(self.extra.values())]
        if self.optimizer is not None:
            found += [self.optimizer["groups"], list(self.optimizer["values"].values())]
        return found

    def of_kind(self, kind: str) -> list[StoredTensor]:
        """Return the tensors of one kind (`optimizer/` means all optimizer state)."""
        return [t for t in self.tensors if t.kind == kind or (kind == OPTIMIZER and t.kind.startswith(kind))]

    def of_module(self) -> list[StoredTensor]:
        """Return all parameters and buffers."""
        return [t for t in self.tensors if t.kind in (PARAMETER, BUFFER)]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as `float32`. Raises CheckpointError if torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"the manifest names a dtype {name!r} that this torch ({torch.__version__}) does not have"
        )
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as `float32`."""
    return str(dtype).removeprefix("torch.")


def combine(parts: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Merge the ranks' parts of each tensor. Ranks may have different tensors, and further names of one. Raises
    CheckpointError if ranks disagree about a tensor, or elements are missing or duplicate.
    """
    groups: dict[tuple[str, str, int | None], list[StoredTensor]] = {}
    for part in parts:
        groups.setdefault((part.name, part.kind, part.rank), []).append(part)
    joined = []
    for (name, kind, _), members in groups.items():
        first = members[0]
        for other in members[1:]:
            if _agreed(first) != _agreed(other):
                raise CheckpointError(f"{kind} {name!r}: ranks disagree: {_agreed(first)} and {_agreed(other)}")
        outer = boxes.whole(first.shape)
        runs = [run for member in members for run in member.slices]
        order = {box: boxes.ranges(outer if box is None else box) for box in {run.box for run in runs}}
        slices = sorted(runs, key=lambda run: (order[run.box], run.start))
        aliases = dict.fromkeys(alias for member in members for alias in member.aliases)
        tensor = replace(first, slices=tuple(slices), aliases=tuple(aliases))
        try:
            tensor.check_cover()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        joined.append(tensor)
    return joined


def _agreed(tensor: StoredTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.trainable, tensor.group


def in_order(tensors: Iterable[StoredTensor], orders: Iterable[Sequence[str]]) -> list[StoredTensor]:
    """Return tensors by kind, then in the parameters' order of all ranks (`orders`).

    If ranks have different parameters, the order is that of names, with numbers as numbers. The number of ranks does
    not change the order.
    """
    known = set(map(tuple, orders))
    places = {name: place for place, name in enumerate(known.pop())} if len(known) == 1 else {}
    return sorted(tensors, key=lambda t: (t.kind, places.get(t.name, -1), _with_numbers(t.name), t.rank or 0))


def _with_numbers(name: str) -> list[Any]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))]


def from_json(kind: type[T], value: Any) -> T:
    """Return a manifest or tensors (`list[StoredTensor]`) of JSON. Raises ValueError if a field has a wrong type."""
    try:
        found: T = _adapter(kind).validate_python(value)
        return found
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place:.200}: {first['msg']:.200}") from None


_adapter: Any = functools.cache(pydantic.TypeAdapter)


def outline(names: Sequence[str], limit: int = 5) -> str:
    """Return the first few of some names, and the number of the others."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def by_any_name(tensors: Iterable[StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return tensors by name and by every alias."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            found.setdefault(name, tensor)
    return found
