"""Sequence-parallel norms: tokens are sharded between tensor-parallel layers (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2205.05198).

    embedding | first block ... last block | last norm | head
    all tokens |  own tokens                |    all tokens
               norm -> all -> column ... row -> own, added to the stream

Norms and biases of row layers see one rank's tokens only, so their gradients are partial.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.names import name_search
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.layers import NormParallel, ShardSpec

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import LayerSpec, TensorParallel
    from shardwise.parallel.tensor.group import TensorGroup

_KEY = "tensor_parallel.sequence_parallel"
_RULES = "tensor_parallel.partition_config.layer_specs"
_DIMENSION = -2  # default token dimension: hidden states are [..., tokens, width]


@dataclass(frozen=True)
class Tokens:
    """Token sharding of a model."""

    cuts: dict[str, ShardSpec]  # sharding of its layers, including norms that all-gather tokens
    begin: str  # path of the first block, whose input has all tokens
    whole: list[str]  # unsharded modules between the norms, with all tokens as input and output
    dim: int

    def attach(self, model: nn.Module) -> None:
        """Install token-sharding hooks on a model with sharded layers."""
        norm = next(module for module in model.modules() if isinstance(module, NormParallel))
        model.get_submodule(self.begin).register_forward_pre_hook(_Begin(norm, self.dim), with_kwargs=True)
        for path in self.whole:
            model.get_submodule(path).register_forward_hook(_Part(norm, self.dim))


class _Begin:
    """Forward pre-hook of the first block: each rank takes its tokens; `norm` has the group."""

    begins_tokens = True

    def __init__(self, norm: NormParallel, dim: int) -> None:
        self._norm, self._dim = norm, dim

    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = [*args, *kwargs.values()]
        if not given or not isinstance(given[0], torch.Tensor) or given[0].dim() < 2:
            raise UsageError(
                f"{_KEY}: expected hidden states [..., tokens, width] as the first argument of the first block, a "
                f"{type(block).__name__}, found {type(given[0]).__name__ if given else 'none'}"
            )
        group = self._norm.group
        own = mappings.split(given[0], group, group.begin_tokens(given[0].shape[self._dim]), self._dim)
        if args:
            return (own, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): own}


class _Part:
    """Forward hook of an unsharded module: each rank takes its tokens of the (first) output; `norm` has the group."""

    def __init__(self, norm: NormParallel, dim: int) -> None:
        self._norm, self._dim = norm, dim

    def __call__(self, module: nn.Module, args: Any, made: Any) -> Any:
        several = isinstance(made, tuple)
        y, group = made[0] if several else made, self._norm.group
        own = mappings.split(y, group, group.tokens_of_whole(y.shape[self._dim]), self._dim)
        return (own, *made[1:]) if several else own


def takes_tokens(hook: Any) -> bool:
    """Return True if a hook splits tokens over ranks."""
    return isinstance(hook, (_Begin, _Part))


def for_copy(hook: Any, group: TensorGroup) -> Any:
    """Return the hook for a copied module with another group."""
    made = copy.copy(hook)
    made._norm = SimpleNamespace(group=group)
    return made


def takes_tokens_before(module: nn.Module) -> bool:
    """Return True if tokens are sharded from this module's input on."""
    return any(isinstance(hook, _Begin) for hook in module._forward_pre_hooks.values())


def takes_tokens_behind(module: nn.Module) -> bool:
    """Return True if tokens are sharded from this module's output on, after all ranks have computed all tokens."""
    return any(isinstance(hook, _Part) for hook in module._forward_hooks.values())


def tokens_of(model: nn.Module, cuts: dict[str, ShardSpec], section: TensorParallel) -> Tokens:
    """Return the token sharding between a model's tensor-parallel layers; raises a ConfigError without blocks.

    Rules select norms (`partition_type` `norm`) and unsharded modules between them (`whole`). Without rules, norms are
    found in blocks of one list, with a final norm; each is assumed to precede tensor-parallel layers.
    """
    prefix, (first, *_) = _blocks(model, cuts)
    adapted = [path for path, cut in cuts.items() if cut.kind == "row" and path.endswith(".base_layer")]
    if adapted:
        raise ConfigError(
            f"{_KEY}: {adapted[0]} has an adapter, which would add all tokens to those of a rank. Switch the key off, "
            "or leave layers of partition_type row without adapters"
        )
    rules = section.partition_config.layer_specs if section.partition_config is not None else []
    rules = [rule for rule in rules if rule.partition_type in ("norm", "whole")]
    dims = {_DIMENSION if rule.partition_dim is None else rule.partition_dim for rule in rules} or {_DIMENSION}
    if len(dims) > 1:
        raise ConfigError(f"{_RULES}: tokens cannot be in several dimensions ({sorted(dims)}) of one model")
    (dim,) = dims
    found = _named(model, rules) if rules else dict(_found(model, prefix, cuts))
    divided = {
        path: replace(cut, tokens=dim) if cut.kind == "row" and path.startswith(f"{prefix}.") else cut
        for path, cut in cuts.items()
    }
    norms = {path: ShardSpec("norm", tokens=dim) for path, kind in found.items() if kind == "norm"}
    if not norms:
        raise ConfigError(f"{_RULES}: {_KEY} needs norms (partition_type norm), and no rule has found one")
    whole = [path for path, kind in found.items() if kind == "whole"]
    return Tokens(divided | norms, f"{prefix}.{first}", whole, dim)


def _blocks(model: nn.Module, cuts: dict[str, ShardSpec]) -> tuple[str, list[str]]:
    rows = [path for path, cut in cuts.items() if cut.kind == "row"]
    lists: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        inner = any(path.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inner:
            names = [name for name, _ in module.named_children()]
            if names and all(any(row.startswith(f"{path}.{name}.") for row in rows) for name in names):
                lists[path] = names
    if len(lists) != 1:
        raise ConfigError(
            f"{_KEY}: expected one list of blocks that each have a layer of partition_type row in "
            f"{type(model).__name__}, found {', '.join(lists) or 'none'}. Switch the key off"
        )
    return next(iter(lists.items()))


def _named(model: nn.Module, rules: list[LayerSpec]) -> dict[str, str]:
    found: dict[str, str] = {}
    finds = name_search(model)
    for path, _ in model.named_modules():
        for rule in rules:
            named = finds(rule.patterns, path) or finds(rule.patterns, f"{path}.weight")
            if named and not any(path.startswith(f"{outer}.") for outer in found):
                found.setdefault(path, rule.partition_type)
    return found


def _found(model: nn.Module, prefix: str, cuts: dict[str, ShardSpec]) -> Iterator[tuple[str, str]]:
    for number, block in model.get_submodule(prefix).named_children():
        layers = norms = 0
        for name, child in block.named_children():
            path = f"{prefix}.{number}.{name}"
            if _is_norm(child):
                norms += 1
                yield path, "norm"
            elif any(True for _ in child.parameters()):
                kinds = {cut.kind for inner, cut in cuts.items() if f"{inner}.".startswith(f"{path}.")}
                layers += "row" in kinds or not kinds
                if not kinds:
                    yield path, "whole"
        if not 1 <= norms <= layers:
            raise ConfigError(
                f"{_KEY}: {prefix}.{number} has {norms} norms and {layers} other layers; expected a norm before each "
                f"layer, or one before all. Name those before divided layers in {_RULES} (partition_type norm), or "
                "switch the key off"
            )
    outer, _, name = prefix.rpartition(".")
    after = list(model.get_submodule(outer).named_children())
    place = [child for child, _ in after].index(name)
    last = [child for child, module in after[place + 1 :] if _is_norm(module)]
    if len(last) != 1:
        raise ConfigError(
            f"{_KEY}: expected one norm behind {prefix}, found {', '.join(last) or 'none'}. Name the norms, and the "
            f"last one, in {_RULES} (partition_type norm), or switch the key off"
        )
    yield f"{outer}.{last[0]}".lstrip("."), "norm"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(p.dim() == 1 for p in module.parameters())
