"""Layers of which each rank has a part: a linear layer's columns or rows, an embedding's words or width.

A layer stays the module that it is and keeps its parameters, which become this rank's part; its class changes to one
that is a subclass of its own. So hooks, names, adapters and `isinstance` go on working, also for classes that are
derived from torch's. What is exchanged is in `shardwise.parallel.tensor.mappings`.

"Columns" are output features and "rows" input features, as in the papers' y = x A, whatever way a weight is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.group import Runs, TensorGroup
from shardwise.registry import narrow as keep
from shardwise.registry import part_of

Kind = Literal["column", "picked", "latent", "row", "words", "width", "norm"]


@dataclass(frozen=True)
class ShardSpec:
    """How a layer is divided.

    Attributes:
        kind: linear layers: `column` (output features) or `row` (input features), or, with a weight that every rank has
            whole, `picked` (output features, some of which several ranks compute) or `latent` (all output features,
            some of which ranks use in different ways); embeddings: `words` or `width`; `norm`: normalises a rank's
            tokens, and puts those of all ranks together (sequence-parallel norms).
        runs: what each place has of the dimension; `latent`: the features that ranks use in different ways.
        whole_output: `column`, `width`: put the output together on every rank.
        whole_in_evaluation: `column`: put the output together unless the layer is in training.
        whole_input: `row`: the input is whole on every rank, of which each takes its part.
        tokens: dimension of the tokens, which the ranks share outside of divided layers (sequence-parallel norms): a
            `row` layer's outputs are summed into them. None: every rank has all tokens there.
    """

    kind: Kind
    runs: tuple[Runs, ...] = ()
    whole_output: bool = False
    whole_in_evaluation: bool = False
    whole_input: bool = False
    tokens: int | None = None

    @property
    def sizes(self) -> list[int]:
        """Features of each place."""
        return [sum(end - first for first, end in own) for own in self.runs]


class Parallel:
    """What divided layers have in common.

    Attributes:
        group: the ranks that have the parts.
        cut: how it is divided.
    """

    group: TensorGroup
    cut: ShardSpec

    def extra_repr(self) -> str:
        """Describe the layer, and which part of it this is."""
        said = cast(nn.Module, super()).extra_repr()
        if not self.cut.runs:
            return f"{said}, tokens of rank {self.group.place + 1} of {self.group.size}".lstrip(", ")
        return f"{said}, {self.cut.kind}: part {self.group.place + 1} of {self.group.size}".lstrip(", ")


class ColumnParallel(Parallel):
    """A linear layer with some of the output features; each rank has all of the input."""

    @property
    def gives_all(self) -> bool:
        """Whether its output is put together now."""
        cut = self.cut
        return cut.whole_output or (cut.whole_in_evaluation and not cast(nn.Module, self).training)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's output features, or all."""
        y = cast(nn.Module, super()).forward(mappings.enter(x, self.group), *args, **kwargs)
        return mappings.gather(y, self.group, self.cut.sizes) if self.gives_all else y


class PickedColumns(Parallel):
    """A linear layer that every rank has whole, and of which each computes some output features.

    For fused projections of which several ranks need the same features (keys that they share) beside others of their
    own: parts of the weight would overlap.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's output features."""
        own = self.cut.runs[self.group.place]
        weight = self.weight.T if stores_inputs_first(cast(nn.Module, self)) else self.weight
        rows = torch.cat([weight[first:end] for first, end in own])
        bias = None if self.bias is None else torch.cat([self.bias[first:end] for first, end in own])
        return F.linear(mappings.enter(x, self.group), rows, bias)


class LatentColumns(Parallel):
    """A linear layer that every rank has whole, of whose output features ranks use some in different ways."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return all output features; the gradients of some are summed over ranks."""
        ((first, end),) = self.cut.runs[self.group.place]
        y = cast(nn.Module, super()).forward(x, *args, **kwargs)
        used = mappings.enter(y[..., first:end], self.group)
        return torch.cat([y[..., :first], used, y[..., end:]], -1)


class RowParallel(Parallel):
    """A linear layer with some of the input features: outputs are summed over ranks, and the bias is added once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all output features."""
        group, cut = self.group, self.cut
        if cut.whole_input:
            x = mappings.split(x, group, cut.sizes)
        y = x @ self.weight if stores_inputs_first(cast(nn.Module, self)) else F.linear(x, self.weight)
        if cut.tokens is None:
            y = mappings.leave(y, group)
        else:
            y = mappings.sum_split(y, group, group.tokens_of_whole(y.shape[cut.tokens]), cut.tokens)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # as F.linear under autocast


class VocabParallelEmbedding(Parallel):
    """An embedding with some of the words: the others are zero, and the sum over ranks has all.

    `padding_idx` goes on counting all words.
    """

    padding_idx: int | None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all words."""
        ((first, end),) = self.cut.runs[self.group.place]
        elsewhere = (words < first) | (words >= end)
        here = (words - first).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        self.padding_idx = None if padding is None or not first <= padding < end else padding - first
        try:
            found = cast(nn.Module, super()).forward(here)
        finally:
            self.padding_idx = padding
        return mappings.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


class EmbedDimParallelEmbedding(Parallel):
    """An embedding with a part of every vector."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return this rank's parts of vectors, or whole ones."""
        found = cast(nn.Module, super()).forward(words)
        return mappings.gather(found, self.group, self.cut.sizes) if self.cut.whole_output else found


class NormParallel(Parallel):
    """A norm of this rank's tokens, which puts those of all ranks together for the layers behind it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return all tokens, normalised."""
        group, dim = self.group, cast(int, self.cut.tokens)
        sizes = group.tokens_of_all(x.shape[dim])
        return mappings.gather_tokens(cast(nn.Module, super()).forward(x, *args, **kwargs), group, sizes, dim)


class OwnParts(Parallel):
    """A module with tensors that have a number for each head or feature, whole on every rank: it uses this rank's.

    Attributes:
        slices: name of a parameter, buffer or list of modules -> the dimension, and what each place has of it.
    """

    slices: dict[str, tuple[int, tuple[Runs, ...]]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which finds this rank's parts under the names of whole tensors."""
        self.__dict__["_own_parts"] = True
        try:
            return cast(nn.Module, super()).forward(*args, **kwargs)
        finally:
            self.__dict__["_own_parts"] = False

    def __getattr__(self, name: str) -> Any:
        found = cast(Any, super()).__getattr__(name)
        if not self.__dict__.get("_own_parts") or name not in self.slices:
            return found
        dim, runs = self.slices[name]
        own = runs[self.group.place]
        if isinstance(found, nn.ModuleList):
            return nn.ModuleList([found[index] for first, end in own for index in range(first, end)])
        some = [found.narrow(dim, first, end - first) for first, end in own]
        return some[0] if len(some) == 1 else torch.cat(some, dim)


def take_parts(module: nn.Module, slices: dict[str, tuple[int, tuple[Runs, ...]]], group: TensorGroup) -> None:
    """Have a module use this rank's parts of some of its tensors, which stay whole; gradients are summands."""
    kept = {}
    for name, (dim, runs) in slices.items():
        value = vars(module).get(name)
        if isinstance(value, torch.Tensor):  # neither a parameter nor a buffer
            setattr(
                module,
                name,
                torch.cat([value.narrow(dim, first, end - first) for first, end in runs[group.place]], dim),
            )
            continue
        kept[name] = dim, runs
        found = getattr(module, name)
        for parameter in found.parameters() if isinstance(found, nn.Module) else [found]:
            if isinstance(parameter, nn.Parameter):
                group.declare_summands(parameter)
    if not kept:
        return
    module.__class__ = class_of(type(module), OwnParts)
    part: Any = module
    part.slices, part.group = kept, group
    part.cut = ShardSpec("column", next(iter(kept.values()))[1])


_CLASSES: dict[str, type[Parallel]] = {
    "column": ColumnParallel,
    "picked": PickedColumns,
    "latent": LatentColumns,
    "row": RowParallel,
    "words": VocabParallelEmbedding,
    "width": EmbedDimParallelEmbedding,
    "norm": NormParallel,
}

_made: dict[tuple[type, type], type] = {}


def divide(layer: nn.Module, cut: ShardSpec, group: TensorGroup, path: str) -> None:
    """Make a layer one of which each rank has its part.

    Parameters that are shared with a layer that has been divided before (tied embeddings) are that rank's part already;
    they have to be divided in the same way.

    Args:
        layer: a linear layer (also one that stores its weight transposed, as transformers' `Conv1D`), an embedding,
            or a norm.
        cut: how.
        group: the ranks.
        path: the layer's name, for messages.

    Raises:
        UsageError: this layer cannot be divided so.
    """
    if cut.kind == "norm":
        if isinstance(layer, NormParallel):
            return  # it has another name, too
        for parameter in layer.parameters():
            group.declare_summands(parameter)
        _become(layer, cut, group)
        return
    linear = cut.kind not in ("words", "width")
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2 or (not linear and not isinstance(layer, nn.Embedding)):
        raise UsageError(
            f"tensor parallelism: {path} ({type(layer).__name__}) cannot be divided as a {cut.kind} layer: expected "
            f"{'a linear layer' if linear else 'an embedding'} with a 2-D weight"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        raise UsageError(
            f"tensor parallelism: the embedding {path} has max_norm, which changes vectors in the forward pass. Leave "
            "it undivided"
        )
    inputs_first = linear and stores_inputs_first(layer)
    bias = layer._parameters.get("bias")
    if cut.kind == "picked":
        for summand in (weight, bias):
            if summand is not None:
                group.declare_summands(summand)
    elif cut.kind != "latent":
        dim = {"column": int(inputs_first), "row": int(not inputs_first), "words": 0, "width": 1}[cut.kind]
        narrow(weight, dim, cut, group, f"{path}.weight")
        if bias is not None and cut.kind == "column":
            narrow(bias, 0, cut, group, f"{path}.bias")
        if bias is not None and cut.kind == "row" and cut.tokens is not None:
            group.declare_summands(bias)
        _tell_sizes(layer, cut, cut.sizes[group.place])
    _become(layer, cut, group)


def _become(layer: nn.Module, cut: ShardSpec, group: TensorGroup) -> None:
    layer.__class__ = class_of(type(layer), _CLASSES[cut.kind])
    part = cast(Parallel, layer)
    part.cut, part.group = cut, group


def class_of(base: type, parallel: type[Parallel]) -> type:
    """Return the subclass of a layer's class whose forward pass is that of a part."""
    key = (base, parallel)
    if key not in _made:
        _made[key] = type(base.__name__, (parallel, base), {"__module__": base.__module__, "__reduce__": _reduce})
    return _made[key]


def _reduce(self: Any) -> Any:
    kinds = type(self).__mro__
    base = next(cls for cls in kinds if issubclass(cls, nn.Module) and not issubclass(cls, Parallel))
    mixed = [
        cls for cls in kinds if issubclass(cls, Parallel) and not issubclass(cls, nn.Module) and cls is not Parallel
    ]
    return _again, (base, *mixed), self.__dict__


def _again(base: type, *mixed: type[Parallel]) -> Any:
    made: Any = base
    for parallel in reversed(mixed):
        made = class_of(made, parallel)
    return made.__new__(made)


def stores_inputs_first(layer: nn.Module) -> bool:
    """Whether a linear layer's weight is (inputs, outputs), as that of transformers' Conv1D is."""
    return hasattr(layer, "nf") and hasattr(layer, "nx")


def narrow(parameter: nn.Parameter, dim: int, cut: ShardSpec, group: TensorGroup, name: str) -> None:
    """Keep this rank's part of a parameter, wherever its values are, and declare it."""
    known = part_of(parameter)
    if known.box is not None and known.shape is not None:
        if known.shape[dim] != len_of(cut.runs) or group.box(known.shape, dim, cut.runs) != known.box:
            raise UsageError(
                f"tensor parallelism: {name} is shared with a layer that is divided in another way; this rank has the "
                f"box {known.box} of {list(known.shape)}. Divide both alike, or neither"
            )
        return
    features, total = parameter.shape[dim], len_of(cut.runs)
    if features != total:
        raise UsageError(
            f"tensor parallelism: {name} has {features} features in dimension {dim}, of which the ranks would have "
            f"{total}"
        )
    keep(parameter, **group.part(parameter.shape, dim, cut.runs))


def len_of(runs: Sequence[Runs]) -> int:
    """Return how many features there are in all."""
    return max(end for own in runs for _, end in own)


def _tell_sizes(layer: nn.Module, cut: ShardSpec, own: int) -> None:
    """Have a layer's attributes say what it has."""
    names = {"column": ("out_features", "nf"), "row": ("in_features", "nx"), "words": ("num_embeddings",)}
    for name in names.get(cut.kind, ("embedding_dim",)):
        if hasattr(layer, name):
            setattr(layer, name, own)


def runs_of(total: int, ranks: int, grain: int = 1) -> tuple[Runs, ...]:
    """Return consecutive runs of features for each rank, as equal as can be, of whole grains.

    >>> runs_of(12, 2, 4)
    (((0, 8),), ((8, 12),))

    Raises:
        UsageError: the features are no whole grains, or there are fewer grains than ranks.
    """
    grains, rest = divmod(total, grain)
    if rest or grains < ranks:
        raise UsageError(
            f"tensor parallelism: {total} features in units of {grain} cannot be divided over {ranks} ranks; there "
            "have to be whole units, and at least as many as ranks"
        )
    runs, first = [], 0
    for rank in range(ranks):
        end = first + (grains // ranks + (rank < grains % ranks)) * grain
        runs.append(((first, end),))
        first = end
    return tuple(runs)


def joined(parts: Sequence[tuple[int, Sequence[Runs]]]) -> tuple[Runs, ...]:
    """Return runs of a fused dimension, of which each part has so many features and is divided in its own way.

    >>> joined([(4, runs_of(4, 2)), (2, runs_of(2, 2))])
    (((0, 2), (4, 5)), ((2, 4), (5, 6)))
    """
    ranks = len(parts[0][1])
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for size, runs in parts:
        for own, more in zip(found, runs, strict=True):
            own += [(start + first, start + end) for first, end in more]
        start += size
    return tuple(tuple(own) for own in found)
