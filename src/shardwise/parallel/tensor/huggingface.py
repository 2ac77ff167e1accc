"""Shards experts, heads and the loss of a model, in addition to its linear layers and embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.heads import HEADS, KEY_HEADS, Heads
from shardwise.parallel.tensor.layers import Parallel, ShardSpec, class_of, divide, len_of, narrow, take_parts
from shardwise.parallel.tensor.loss import words_cross_entropy
from shardwise.parallel.tensor.model_families import BIASES, Block, Stacked
from shardwise.parallel.tensor.module_index import Inventory
from shardwise.parallel.tensor.plan import TensorParallelPlan
from shardwise.registry.heads import set_heads


def divide_model(model: nn.Module, division: TensorParallelPlan, group: TensorGroup) -> None:
    """Shard a model in place by a plan; raises a ConfigError if its loss does not support sharded logits."""
    modules = Inventory(model).modules
    for path, stacked in division.experts.items():
        _divide_experts(modules[path], stacked, group, path)
    for path, runs in division.vectors.items():
        parent, _, name = path.rpartition(".")
        narrow(modules[parent].get_parameter(name), 0, ShardSpec("column", runs), group, path)
    for path in division.summands:
        for parameter in modules[path].parameters(recurse=False):
            group.declare_summands(parameter)
    for path, cut in division.layers.items():
        divide(model.get_submodule(path), cut, group, path)
    for block in division.blocks:
        _tell_heads(modules, block, group)
    for path, slices in division.slices.items():
        take_parts(modules[path], slices, group)
    if division.head is not None:
        path, head = division.head
        _replace_loss(modules[path], cast(Parallel, modules[head]).cut, group)


def divided_parameters(model: nn.Module, division: TensorParallelPlan) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters that `divide_model` declares as parts."""
    modules = Inventory(model).modules
    for path in division.layers:
        layer = model.get_submodule(path)
        yield from ((f"{path}.{name}", parameter) for name, parameter in layer.named_parameters(recurse=False))
    for path in (*division.experts, *division.summands):
        yield from ((f"{path}.{name}", one) for name, one in modules[path].named_parameters(recurse=False))
    for path in division.vectors:
        parent, _, name = path.rpartition(".")
        yield path, modules[parent].get_parameter(name)
    for path, slices in division.slices.items():
        for name, parameter in modules[path].named_parameters():
            if name.split(".")[0] in slices:
                yield f"{path}.{name}", parameter


class OwnConfig:
    """View of a model's configuration with rank-specific values, such as the number of heads."""

    def __init__(self, config: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(_config=config, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_own"):  # during copying, before the attributes are set
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


# -- experts -----------------------------------------------------------------------------------------------------------


class ExpertsParallel(Parallel):
    """Stacked experts with sharded inner features; outputs are summed over ranks once."""

    last_bias: str | None

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """Return the experts' output; gradients of routing weights are partial, as the outputs are."""
        group = self.group
        entered = [
            mappings.enter(one, group) if torch.is_tensor(one) and one.is_floating_point() else one
            for one in (hidden_states, *routing)
        ]
        found = cast(nn.Module, super()).forward(*entered)
        if self.last_bias is not None and group.place > 0:  # added by every rank: keep the first rank's
            chosen, weights = entered[1:3]
            biases = cast(nn.Module, self).get_parameter(self.last_bias)[chosen]
            found = found - (biases * weights.unsqueeze(-1)).sum(-2).to(found.dtype).view_as(found)
        return mappings.leave(found, group)


_ALIGNED = 8  # half-precision elements in 16 bytes, the row alignment of torch's grouped products

_INNER = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_dim")


def _divide_experts(module: nn.Module, stacked: Stacked, group: TensorGroup, path: str) -> None:
    for name, (dim, runs) in stacked.first.items():
        narrow(module.get_parameter(name), dim, ShardSpec("column", runs), group, f"{path}.{name}")
    name, dim = stacked.last
    cut = ShardSpec("row", stacked.runs)
    narrow(module.get_parameter(name), dim, cut, group, f"{path}.{name}")
    if stacked.last_bias is not None:
        group.declare_summands(module.get_parameter(stacked.last_bias))
    for attribute in _INNER:
        if getattr(module, attribute, None) == stacked.inner:
            setattr(module, attribute, cut.sizes[group.place])
    config = getattr(module, "config", None)
    if config is not None and any(size % _ALIGNED for size in cut.sizes):
        cast(Any, module).config = OwnConfig(config, {"_experts_implementation": "eager"})
    part = _become(module, ExpertsParallel, cut, group)
    part.last_bias = stacked.last_bias


# -- heads -------------------------------------------------------------------------------------------------------------


class OwnBiases(Parallel):
    """Attention that takes this rank's heads from biases of all heads (ALiBi)."""

    names: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call attention with this rank's biases."""
        forward = cast(nn.Module, super()).forward
        given = inspect.signature(forward).bind(*args, **kwargs)
        for name in self.names:
            if given.arguments.get(name) is not None:
                given.arguments[name] = self._own(given.arguments[name])
        return forward(*given.args, **given.kwargs)

    def _own(self, biases: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads, from the second of four dimensions, or from the first dimension after samples."""
        ((first, end),) = self.cut.runs[self.group.place]
        total = len_of(self.cut.runs)
        if biases.dim() == 4:
            return biases[:, first:end] if biases.shape[1] == total else biases
        return biases.unflatten(0, (-1, total))[:, first:end].flatten(0, 1)


def _tell_heads(modules: dict[str, nn.Module], block: Block, group: TensorGroup) -> None:
    heads = cast(Heads, block.heads)
    for path in block.holders:
        module = modules[path]
        for name, value in heads.attributes(module, *block.features, group.place).items():
            setattr(module, name, value)
        set_heads(module, [head for run in heads.own[group.place] for head in range(*run)])
        config = getattr(module, "config", None)
        if config is not None:
            own = {name: heads.count(group.place) for name in HEADS if getattr(config, name, None) == heads.total}
            own |= {
                name: heads.count_keys(group.place) for name in KEY_HEADS if getattr(config, name, None) == heads.keys
            }
            cast(Any, module).config = OwnConfig(config, own)
    name = type(modules[block.path]).__name__
    if name in BIASES:
        part = _become(modules[block.path], OwnBiases, ShardSpec("column", heads.own), group)
        part.names = BIASES[name]


# -- the loss ----------------------------------------------------------------------------------------------------------

# Cross-entropy losses of transformers -> True if labels are shifted to the next token.
_SHIFTED = {"ForCausalLM": True, "ForConditionalGeneration": True, "ForMaskedLM": False}


class WordsLoss(Parallel):
    """Model of transformers with vocabulary-parallel logits and loss."""

    def extra_repr(self) -> str:
        """Return "", because the model's layers describe the sharding."""
        return ""

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """Vocabulary-parallel cross entropy, with the arguments of the model's own loss."""
        return self._loss

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        sizes = self.cut.sizes
        if cast(Any, self).training is False:
            whole: torch.Tensor = cast(Any, super()).loss_function(
                logits,
                labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
            return whole
        if shift_labels is None:
            shifted = _SHIFTED[cast(Any, self).loss_type]
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifted else labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        wanted = shift_labels.to(logits.device)
        loss = words_cross_entropy(
            logits, wanted, self.group, sizes, ignore_index=ignore_index, reduction=cast(Any, reduction)
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _replace_loss(model: nn.Module, cut: ShardSpec, group: TensorGroup) -> None:
    key = "tensor_parallel.vocab_parallel_lm_head"
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    if kind not in _SHIFTED or not _uses_loss_function(type(model)):
        raise ConfigError(
            f"{key}: the loss of {type(model).__name__} is computed in its own forward pass, from logits of all words. "
            "Write false: the head's output is then put together"
        )
    cast(Any, model).loss_type = kind
    _become(model, WordsLoss, cut, group)


def _uses_loss_function(kind: type[nn.Module]) -> bool:
    try:
        return "self.loss_function(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _become(module: nn.Module, parallel: type[Parallel], cut: ShardSpec, group: TensorGroup) -> Any:
    module.__class__ = class_of(type(module), parallel)
    part: Any = module
    part.cut, part.group = cut, group
    return part
