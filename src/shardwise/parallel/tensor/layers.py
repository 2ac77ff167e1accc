"""Tensor-parallel layers: column- and row-parallel linear layers, vocabulary- and width-parallel embeddings.

A layer keeps its identity and parameters, which become this rank's part; its class changes to a subclass. So hooks,
names, adapters and `isinstance` keep working, also for subclasses of torch's layers. "Columns" are output features and
"rows" input features, as in the papers' y = x A, for any storage order of the weight.
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
    """Sharding of a layer.

    Kinds of linear layers: `column` (output features), `row` (input features); with an unsharded weight, `picked`
    (ranks compute output features that may overlap) and `latent` (all output features, some used differently). Of
    embeddings: `words` and `width`. `norm`: normalises a rank's tokens and all-gathers them (sequence-parallel norms).
    """

    kind: Kind
    runs: tuple[Runs, ...] = ()  # each rank's ranges of the dimension; `latent`: features that ranks use differently
    whole_output: bool = False  # `column`, `width`: all-gather the output
    whole_in_evaluation: bool = False  # `column`: all-gather the output in evaluation mode
    whole_input: bool = False  # `row`: the input is unsharded, and each rank takes its part
    # Token dimension, sharded outside of tensor-parallel layers (sequence-parallel norms); a `row` layer
    # reduce-scatters its output along this dimension. None: every rank has all tokens.
    tokens: int | None = None

    @property
    def sizes(self) -> list[int]:
        """Features of each rank."""
        return [sum(end - first for first, end in own) for own in self.runs]


class Parallel:
    """Base class of tensor-parallel layers; `cut` is the sharding of the layer, `former` has earlier groups."""

    group: TensorGroup
    cut: ShardSpec
    former: Sequence[TensorGroup] = ()

    def extra_repr(self) -> str:
        """Describe the layer, with this rank's part."""
        said = cast(nn.Module, super()).extra_repr()
        if not self.cut.runs:
            return f"{said}, tokens of rank {self.group.place + 1} of {self.group.size}".lstrip(", ")
        return f"{said}, {self.cut.kind}: part {self.group.place + 1} of {self.group.size}".lstrip(", ")


class ColumnParallel(Parallel):
    """Column-parallel linear layer: some output features, all input features."""

    @property
    def gives_all(self) -> bool:
        """True if the output is currently all-gathered."""
        cut = self.cut
        return cut.whole_output or (cut.whole_in_evaluation and not cast(nn.Module, self).training)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's output features, or all."""
        y = cast(nn.Module, super()).forward(mappings.enter(x, self.group), *args, **kwargs)
        return mappings.gather(y, self.group, self.cut.sizes) if self.gives_all else y


class PickedColumns(Parallel):
    """Linear layer with an unsharded weight, of which ranks compute overlapping output features (shared key heads)."""

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
    """Linear layer with an unsharded weight; ranks use some output features differently."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return all output features; gradients of some are all-reduced."""
        ((first, end),) = self.cut.runs[self.group.place]
        y = cast(nn.Module, super()).forward(x, *args, **kwargs)
        used = mappings.enter(y[..., first:end], self.group)
        return torch.cat([y[..., :first], used, y[..., end:]], -1)


class RowParallel(Parallel):
    """Row-parallel linear layer: outputs are all-reduced, and the bias is added once."""

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
    """Vocabulary-parallel embedding: other ranks' words are 0, outputs are all-reduced. `padding_idx` counts all words.

    Because a word of no rank stays out of range, every rank raises the error of one process.
    """

    padding_idx: int | None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all words."""
        ((first, end),) = self.cut.runs[self.group.place]
        elsewhere = ((words >= 0) & (words < first)) | ((words >= end) & (words < len_of(self.cut.runs)))
        here = (words - first).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        self.padding_idx = None if padding is None or not first <= padding < end else padding - first
        try:
            found = cast(nn.Module, super()).forward(here)
        finally:
            self.padding_idx = padding
        return mappings.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


class EmbedDimParallelEmbedding(Parallel):
    """Embedding with a part of every vector."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return this rank's parts of vectors, or gathered ones."""
        found = cast(nn.Module, super()).forward(words)
        return mappings.gather(found, self.group, self.cut.sizes) if self.cut.whole_output else found


class NormParallel(Parallel):
    """Norm of this rank's tokens, all-gathered for the following layers."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return all tokens, normalised."""
        group, dim = self.group, cast(int, self.cut.tokens)
        sizes = group.tokens_of_all(x.shape[dim])
        return mappings.gather_tokens(cast(nn.Module, super()).forward(x, *args, **kwargs), group, sizes, dim)


class OwnParts(Parallel):
    """Module that uses this rank's part of unsharded tensors with a number for each head or feature."""

    # parameter, buffer or module list -> dimension, and each rank's ranges
    slices: dict[str, tuple[int, tuple[Runs, ...]]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose tensor attributes return this rank's parts."""
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
    """Make a module use this rank's parts of some unsharded tensors; their gradients are partial."""
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
    """Shard a layer in place: a linear layer (also transformers' `Conv1D`), an embedding or a norm."""
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
    if isinstance(layer, nn.Embedding) and layer.scale_grad_by_freq and cut.kind == "words":
        raise UsageError(
            f"tensor parallelism: the embedding {path} has scale_grad_by_freq, and the ranks would count other ranks' "
            "words as their first. Divide its width (partition_type row), or leave it undivided"
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
    """Return the tensor-parallel subclass of a layer's class."""
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
    """Return True if a linear layer's weight is (inputs, outputs), as in transformers' Conv1D."""
    return hasattr(layer, "nf") and hasattr(layer, "nx")


def narrow(parameter: nn.Parameter, dim: int, cut: ShardSpec, group: TensorGroup, name: str) -> None:
    """Keep and declare this rank's part of a parameter, on any tier; tied layers must have the same sharding."""
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
    """Return the total number of features."""
    return max(end for own in runs for _, end in own)


def _tell_sizes(layer: nn.Module, cut: ShardSpec, own: int) -> None:
    names = {"column": ("out_features", "nf"), "row": ("in_features", "nx"), "words": ("num_embeddings",)}
    for name in names.get(cut.kind, ("embedding_dim",)):
        if hasattr(layer, name):
            setattr(layer, name, own)


def runs_of(total: int, ranks: int, grain: int = 1) -> tuple[Runs, ...]:
    """Return consecutive ranges of features for each rank, as equal as possible, in multiples of `grain`.

    >>> runs_of(12, 2, 4)
    (((0, 8),), ((8, 12),))
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
    """Return ranges of a fused dimension, from size and ranges of each part.

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
