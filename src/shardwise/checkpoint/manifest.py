"""The manifest: what a checkpoint holds, by logical tensor, and where the bytes are.

A tensor is described by its name in the model, its global shape, and a list of slices, each a run of the
flattened tensor, or of a box of it, that lies under a key of a file. Nothing says which rank, stage or number of ranks
it is for; `layout` records how it was written for people to read. A loader of any layout therefore reads what it needs
by name, box and range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwise import boxes
from shardwise.boxes import Patch, Region
from shardwise.checkpoint.checksums import FileFacts
from shardwise.errors import CheckpointError

if TYPE_CHECKING:  # imported where it is needed: the process that writes in the background does without
    import torch

NAME = "manifest.json"
"""Of its file."""

BEGINNING = b'{"blake2b": "'
"""First bytes of that file."""

PARAMETER = "parameter"
BUFFER = "buffer"
OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class Slice:
    """Elements `[start, stop)` of a flattened tensor, stored as the 1-D tensor `key` of `file`.

    Attributes:
        file: name of a file in the checkpoint's directory.
        key: tensor in that file; it has the tensor's own shape if the slice is the whole tensor.
        start: first element.
        stop: end (exclusive).
        box: the n-dimensional part of the tensor, as (first, end) or several of these for each dimension, in which
            `start` and `stop` count. None: the whole tensor.
    """

    file: str
    key: str
    start: int
    stop: int
    box: Region | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the slice as the manifest has it."""
        return {"file": self.file, "key": self.key, "start": self.start, "stop": self.stop, "box": self.box}


@dataclass(frozen=True)
class StoredTensor:
    """One logical tensor of a checkpoint.

    Attributes:
        name: name of the parameter or buffer in the model.
        kind: `parameter` (master weights where there are any), `optimizer/<state key>` or `buffer`.
        shape: global shape. Optimizer state that has the parameter's shape is cut like it; other is whole.
        dtype: dtype of the stored values, as `float32`.
        slices: where the values are. Their boxes divide the tensor, and the slices of each box divide the box; they
            are in the order of boxes, then of elements.
        aliases: further names of a tied parameter.
        trainable: parameters: whether an optimizer stepped it.
        group: parameters: index of its optimizer parameter group.
        compute_dtype: parameters: dtype in which the module computed with it.
        rank: buffers that differed between ranks: the rank whose value this is.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    slices: tuple[Slice, ...]
    aliases: tuple[str, ...] = ()
    trainable: bool | None = None
    group: int | None = None
    compute_dtype: str | None = None
    rank: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the stored values."""
        return dtype_of(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the description as the manifest has it."""
        return {**vars(self), "slices": [part.to_json() for part in self.slices]}

    def part(self, box: Region | None) -> StoredTensor:
        """Return a part of the tensor as a tensor of its own, whose elements are counted in the part.

        Its slices are those of which the part has something.
        """
        if box is None:
            return self
        outer = boxes.whole(self.shape)
        slices = [part for part in self.slices if boxes.meet(outer if part.box is None else part.box, box)]
        facts = {**vars(self), "shape": boxes.sizes(box), "slices": tuple(slices)}
        return StoredPart(**facts, of=self.shape, region=box)

    def runs(self, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        """Return what makes up elements `[start, stop)`: slices, and what is taken from each.

        Of a patch the first memory is the slice as it is stored, the second one that holds just these elements.

        Raises:
            CheckpointError: some elements are not stored.
        """
        return self._runs(self.shape, boxes.whole(self.shape), start, stop)

    def _runs(self, shape: tuple[int, ...], region: Region, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        """See `runs`; the elements are those of a region of a tensor of a shape."""
        found: list[tuple[Slice, Patch]] = []
        whole, missing = boxes.whole(shape), stop - start
        plain = region == whole
        for part in self.slices:
            if missing <= 0:
                break
            if plain and part.box is None and (part.stop <= start or part.start >= stop):
                continue  # most slices of a tensor that is spread over many ranks
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
        """Check that slices, inside of the tensor and in order, have each element once.

        Raises:
            ValueError: elements are missing or there twice; the message names them, and the files.
        """
        outer = boxes.whole(self.shape)
        parts: list[Region] = []
        place = size = 0
        for part in self.slices:
            box = outer if part.box is None else part.box
            if not parts or box != parts[-1]:
                self._check_end(place, size, parts)
                parts.append(box)
                place, size = 0, math.prod(boxes.sizes(box))
            if part.start != place:
                raise ValueError(
                    f"{self.kind} {self.name!r}: expected a run from element {place}{self._of(parts)}, found "
                    f"{part.start} (in {part.file})"
                )
            place = part.stop
        self._check_end(place, size, parts)
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

    def _check_end(self, place: int, size: int, parts: Sequence[Region]) -> None:
        if place != size:
            raise ValueError(f"{self.kind} {self.name!r}: {place} of {size} elements{self._of(parts)} are stored")

    def _of(self, parts: Sequence[Region]) -> str:
        """Return the box that slices are of, in words."""
        return "" if parts[-1] == boxes.whole(self.shape) else f" of the box {[list(ends) for ends in parts[-1]]}"


@dataclass(frozen=True)
class StoredPart(StoredTensor):
    """A part of a stored tensor: see `StoredTensor.part`. Boxes of its slices are those of the tensor.

    Attributes:
        of: shape of the tensor.
        region: the part.
    """

    of: tuple[int, ...] = ()
    region: Region = ()

    def runs(self, start: int, stop: int) -> list[tuple[Slice, Patch]]:
        """Return what makes up elements `[start, stop)` of the part."""
        return self._runs(self.of, self.region, start, stop)


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds besides the values of tensors.

    Trees are JSON as `shardwise.checkpoint.nested_json` makes it; references to tensors in them are
    {"file": ..., "key": ...}.

    Attributes:
        tag: name of the checkpoint.
        created: seconds since 1970.
        versions: of shardwise, torch and Python.
        layout: stage, number of ranks and dtype it was written with; for information. "sequence" is the number of the
            state, "copy" that of the copy in memory of the same state; "latest" is false if it was not to become
            `latest`; "scheduler" is the class of the schedule; "job" is a random name of the job; "finite" is false
            where values are infinite or NaN, and "not_finite" then names some.
        config: the effective configuration; for information.
        files: size and checksums by file name.
        tensors: every logical tensor.
        excluded: names of frozen parameters that were left out on request.
        optimizer: {"class", "groups": [settings of each group], "values": {parameter: {key: value}}}, or None.
        scheduler: state of the learning-rate schedule (tree), or None.
        scaler: state of the loss scaler (tree), or None.
        counters: steps and samples so far.
        ranks: for each rank a tree with its random number generators and its place in the data.
        extra: extra state of modules (trees), by name.
        client: the user's own state (tree).
    """

    tag: str
    created: float
    versions: dict[str, str]
    layout: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, FileFacts]
    tensors: list[StoredTensor]
    excluded: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    counters: dict[str, int] = field(default_factory=dict)
    ranks: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    client: Any = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether trained parameters and optimizer state were finite, or nobody has looked."""
        return self.layout.get("finite") is not False

    @property
    def sequence(self) -> int:
        """Number of the state, which is larger in newer ones; 0 in manifests of earlier versions."""
        found = self.layout.get("sequence", 0)
        return found if type(found) is int and found >= 0 else 0

    def of_kind(self, kind: str) -> list[StoredTensor]:
        """Return the tensors of one kind (`optimizer/` means all optimizer state)."""
        return [t for t in self.tensors if t.kind == kind or (kind == OPTIMIZER and t.kind.startswith(kind))]

    def of_module(self) -> list[StoredTensor]:
        """Return all parameters and buffers."""
        return [t for t in self.tensors if t.kind in (PARAMETER, BUFFER)]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as `float32`.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    import torch

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
    """Join what the ranks have written of each tensor, and check that it is all there, once.

    Ranks need not have the same tensors, and may know further names of one.

    Raises:
        CheckpointError: ranks disagree about a tensor, or elements are missing or written twice.
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
        slices = sorted(
            (run for member in members for run in member.slices),
            key=lambda run: (boxes.ranges(outer if run.box is None else run.box), run.start),
        )
        aliases = dict.fromkeys(alias for member in members for alias in member.aliases)
        tensor = replace(first, slices=tuple(slices), aliases=tuple(aliases))
        try:
            tensor.check_cover()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        joined.append(tensor)
    return joined


def _agreed(tensor: StoredTensor) -> tuple[Any, ...]:
    """Return what ranks that write parts of a tensor have to say alike."""
    return tensor.shape, tensor.dtype, tensor.trainable, tensor.group


def in_order(tensors: Iterable[StoredTensor], orders: Iterable[Sequence[str]]) -> list[StoredTensor]:
    """Return tensors as manifests list them: by kind, then in the order in which all ranks have the parameters.

    Where ranks have different ones, as layers, it is that of names, with numbers as numbers: however many ranks share
    the model, the order is the same.

    Args:
        tensors: what is listed.
        orders: names of each rank's parameters.
    """
    known = set(map(tuple, orders))
    places = {name: place for place, name in enumerate(known.pop())} if len(known) == 1 else {}
    return sorted(tensors, key=lambda t: (t.kind, places.get(t.name, -1), _with_numbers(t.name), t.rank or 0))


def _with_numbers(name: str) -> list[Any]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))]


def tensor_from_json(entry: dict[str, Any]) -> StoredTensor:
    """Return the tensor of which `StoredTensor.to_json` has made this."""
    slices = [
        Slice(**{**part, "box": None if part["box"] is None else tuple(map(_ends, part["box"]))})
        for part in entry["slices"]
    ]
    return StoredTensor(
        **{**entry, "shape": tuple(entry["shape"]), "aliases": tuple(entry["aliases"]), "slices": tuple(slices)}
    )


def _ends(dimension: list[Any]) -> tuple[Any, ...]:
    """Return a dimension of a region, which is a pair, or a list of pairs."""
    if dimension and isinstance(dimension[0], list):
        return tuple((first, end) for first, end in dimension)
    first, end = dimension
    return first, end


def outline(names: Sequence[str], limit: int = 5) -> str:
    """Return the first few of some names, and how many there are more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def by_any_name(tensors: Iterable[StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return tensors by name and by every alias."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        for name in (tensor.name, *tensor.aliases):
            found.setdefault(name, tensor)
    return found
