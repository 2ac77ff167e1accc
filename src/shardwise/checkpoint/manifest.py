"""The manifest: what a checkpoint holds, by logical tensor, and where the bytes are.

A tensor is described by its name in the model, its global shape, and a list of slices, each a run of the
flattened tensor that lies under a key of a file. Nothing says which rank, stage or number of ranks it is for;
`layout` records how it was written for people to read. A loader of any layout therefore reads what it needs by
name and range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.blocks import FileFacts
from shardwise.errors import CheckpointError

if TYPE_CHECKING:  # imported where it is needed: the process that writes in the background does without
    import torch

NAME = "manifest.json"
"""Of its file."""

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
        box: the n-dimensional part of the tensor, as [first, end] for each dimension, in which `start` and
            `stop` count. None: the whole tensor.
    """

    file: str
    key: str
    start: int
    stop: int
    box: tuple[tuple[int, int], ...] | None = None

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
        slices: where the values are; together they cover the tensor once.
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

    def runs(self, start: int, stop: int) -> list[tuple[Slice, int, int]]:
        """Return (slice, first, end) of the stored runs that make up elements `[start, stop)`.

        Raises:
            CheckpointError: some elements are not stored, or stored in a way this version cannot read.
        """
        found = []
        place = start
        for part in self.slices:
            if part.box is not None:
                raise CheckpointError(
                    f"{self.kind} {self.name!r} is stored in n-dimensional boxes, which this version cannot read"
                )
            if part.start <= place < part.stop and place < stop:
                end = min(stop, part.stop)
                found.append((part, place, end))
                place = end
        if place < stop:
            raise CheckpointError(
                f"{self.kind} {self.name!r}: elements [{place}, {stop}) of {self.numel} are in no file of the "
                "checkpoint"
            )
        return found


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds besides the values of tensors.

    Trees are JSON as `shardwise.checkpoint.codec` makes it; references to tensors in them are
    {"file": ..., "key": ...}.

    Attributes:
        tag: name of the checkpoint.
        created: seconds since 1970.
        versions: of shardwise, torch and Python.
        layout: stage, number of ranks and dtype it was written with; for information. "job" is a random name of the
            job; "finite" is false where values are infinite or NaN, and "not_finite" then names some.
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
            if (first.shape, first.dtype) != (other.shape, other.dtype):
                raise CheckpointError(
                    f"{kind} {name!r}: ranks disagree: {first.dtype} {first.shape} and {other.dtype} {other.shape}"
                )
        slices = sorted((run for member in members for run in member.slices), key=lambda run: run.start)
        place = 0
        for run in slices:
            if run.start != place:
                raise CheckpointError(f"{kind} {name!r}: expected a run from element {place}, found {run.start}")
            place = run.stop
        if place != first.numel:
            raise CheckpointError(f"{kind} {name!r}: {place} of {first.numel} elements were written")
        joined.append(StoredTensor(**{**vars(first), "slices": tuple(slices)}))
    return joined


def tensor_from_json(entry: dict[str, Any]) -> StoredTensor:
    """Return the tensor of which `StoredTensor.to_json` has made this."""
    slices = [
        Slice(**{**part, "box": None if part["box"] is None else tuple((a, b) for a, b in part["box"])})
        for part in entry["slices"]
    ]
    return StoredTensor(
        **{**entry, "shape": tuple(entry["shape"]), "aliases": tuple(entry["aliases"]), "slices": tuple(slices)}
    )


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
