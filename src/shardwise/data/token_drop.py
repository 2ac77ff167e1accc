"""Random layer-token dropping: layers compute a random part of the tokens, and the others pass by unchanged.

Paper: Yao et al., "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
Transformers" (2022).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.compat import never_compiled
from shardwise.config.schema.data import RandomLTD
from shardwise.data.draws import Instead, PassDraws, as_output, layers_of, split_output
from shardwise.errors import ConfigError, UsageError

AT = "data_efficiency.data_routing.random_ltd"
_INNER = "random_ltd_layer"
_POSITIONS = ("position_ids", "position_embeddings")
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_position")
"""Arguments about generation, which training has no use for."""


class RandomLTDScheduler:
    """Number of tokens that layers compute, by step: linear from `min_value` to `max_value`.

    Args:
        settings: the section `random_ltd`, as a dictionary or as a checked section.
    """

    def __init__(self, settings: RandomLTD | Mapping[str, Any]) -> None:
        self.settings = settings if isinstance(settings, RandomLTD) else RandomLTD.model_validate(dict(settings))
        schedule = self.settings.random_ltd_schedule
        steps = schedule.schedule_config
        values = (schedule.min_value, schedule.max_value, steps.require_steps, steps.seq_per_step)
        if any(value is None for value in values):
            raise ConfigError(f"{AT}.random_ltd_schedule: needs min_value, max_value, require_steps and seq_per_step")
        self._least, self._most, self._steps, self._unit = (int(value) for value in values if value is not None)
        self._current = self.get_seq(1)

    def get_seq(self, step: int) -> int:
        """Return the number of tokens in a step, from 1."""
        if step >= self._steps:
            return self._most
        grown = self._least + (self._most - self._least) * step // self._steps
        return max(self._least, grown - grown % self._unit)

    def get_current_seq(self) -> int:
        """Return the current number of tokens."""
        return self._current

    def update_seq(self, global_steps: int) -> int:
        """Set and return the current number: that of a step, from 1."""
        self._current = self.get_seq(global_steps)
        return self._current

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Return the tokens of a sequence of length `max_value` that all layers compute in a number of steps."""
        dropping = self.settings.random_ltd_layer_num or 0
        whole = (self.settings.total_layer_num or 0) - dropping
        return sum(dropping * self.get_seq(step) + whole * self._most for step in range(1, train_iters + 1))

    def state_dict(self) -> dict[str, int]:
        """Return the current number of tokens."""
        return {"current_value": self._current}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a state."""
        self._current = state["current_value"]


class RandomLayerTokenDrop(nn.Module):
    """A layer that drops tokens once an engine with `random_ltd` has been built; without one it computes all of them.

    Args:
        layer: takes and returns hidden states first; it is found under `random_ltd_layer`.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        return self.random_ltd_layer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, because models read attributes of their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(_INNER), name)


def convert_to_random_ltd(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Wrap each layer of a class in `RandomLayerTokenDrop`; return the model. Raises UsageError if it has none."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, RandomLayerTokenDrop)
        for name, child in parent.named_children()
        if isinstance(child, convert_type)
    ]
    if not found:
        raise UsageError(f"convert_to_random_ltd(): {type(model).__name__} has no {convert_type.__name__}")
    for parent, name, child in found:
        parent.register_module(name, RandomLayerTokenDrop(child))
    return model


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names of the layers before `convert_to_random_ltd`."""
    return {name.replace(f"{_INNER}.", ""): value for name, value in state_dict.items()}


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with the names before `convert_to_random_ltd`; of an engine, whole weights on rank
    0 (all ranks call).
    """
    whole: Any = getattr(model, "module_state_dict", model.state_dict)
    state: dict[str, Any] | None = whole()
    return remove_random_ltd_state_dict(state or {})


class TokenDropper:
    """Lets layers of a model drop tokens: those wrapped by the script, or else the layers that the model repeats.

    Raises ConfigError if the model has not `total_layer_num` layers; a forward pass raises UsageError for hidden states
    that are not (samples, tokens, features).
    """

    def __init__(self, model: nn.Module, scheduler: RandomLTDScheduler, draws: PassDraws) -> None:
        self._scheduler, self._draws, self._settings = scheduler, draws, scheduler.settings
        wrapped = [module for module in model.modules() if isinstance(module, RandomLayerTokenDrop)]
        layers = wrapped or layers_of(model, AT)
        wanted = self._settings.random_ltd_layer_id or []
        # A script may have wrapped only the layers that are to drop tokens.
        if wrapped and len(wrapped) == len(wanted):
            layers, wanted = wrapped, list(range(len(wrapped)))
        elif len(layers) != self._settings.total_layer_num:
            raise ConfigError(
                f"{AT}.total_layer_num: is {self._settings.total_layer_num}, and {type(model).__name__} has "
                f"{len(layers)} layers ({type(layers[0]).__name__})"
            )
        self._instead = [
            Instead(layers[number], partial(self._run, number), _inner(layers[number])) for number in sorted(wanted)
        ]

    def _run(self, number: int, layer: Instead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = layer.hidden_states(args, kwargs)
        if given.dim() != 3:
            raise UsageError(
                f"{AT}: layer {number} has hidden states of the shape {tuple(given.shape)}; expected samples, tokens "
                "and features, or tokens first (hidden_state_order). Leave layers of other models out"
            )
        sequence_first = self._settings.hidden_state_order == "seq_batch_dim"
        hidden = given.transpose(0, 1) if sequence_first else given
        chosen = self._chosen(number, hidden)
        if chosen is None:
            return layer.plain(*args, **kwargs)
        bound = layer.signature.bind(*args, **kwargs)
        length, kept = hidden.shape[1], _take(hidden, chosen, 1)
        for position, (name, value) in enumerate(bound.arguments.items()):
            if position == 0:
                bound.arguments[name] = kept.transpose(0, 1) if sequence_first else kept
            elif isinstance(value, dict) and _is_variadic(layer.signature, name):
                bound.arguments[name] = {key: self._part(key, one, chosen, length) for key, one in value.items()}
            else:
                bound.arguments[name] = self._part(name, value, chosen, length)
        computed, form = split_output(layer.plain(*bound.args, **bound.kwargs), AT)
        computed = computed.transpose(0, 1) if sequence_first else computed
        index = chosen[..., None].expand(-1, -1, hidden.shape[-1])
        joined = hidden.scatter(1, index, computed.to(hidden.dtype))
        return as_output(joined.transpose(0, 1) if sequence_first else joined, form)

    @never_compiled
    def _chosen(self, number: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return ascending indices of the tokens of each sequence (batch, tokens); None: all tokens."""
        rows, length = hidden.shape[:2]
        count = self._scheduler.get_current_seq()
        seed = self._draws.seed_of(number) if count < length else None
        if seed is None:
            return None
        generator = torch.Generator("cpu").manual_seed(seed)
        values = torch.rand(rows, length, generator=generator, dtype=torch.float32, device="cpu")
        return values.topk(count, dim=1).indices.sort(dim=1).values.to(hidden.device, non_blocking=True)

    def _part(self, name: str, value: Any, chosen: torch.Tensor, length: int) -> Any:
        """Return the part of an argument that belongs to the chosen tokens."""
        if name in _CACHES:
            return None
        if name in (self._settings.model_mask_name, "attention_mask") and value is not None:
            if not isinstance(value, torch.Tensor) or value.dim() < 2:
                raise UsageError(f"{AT}: the mask {name!r} is a {type(value).__name__}; use a mask that is a tensor")
            dims = [1] if value.dim() == 2 else [value.dim() - 2, value.dim() - 1]
            for dim in dims:
                value = _take(value, chosen, dim) if value.shape[dim] == length else value
            return value
        if name in _POSITIONS:
            if isinstance(value, (tuple, list)):
                return type(value)(self._part(name, one, chosen, length) for one in value)
            return value if value is None else _take(value, chosen, 1)
        if isinstance(value, torch.Tensor) and length in value.shape:
            raise UsageError(
                f"{AT}: the layer's argument {name!r} has the shape {tuple(value.shape)}, which has the length of the "
                f"sequence, {length}, and it is unknown how to take the part of some tokens. If it is the mask, write "
                "its name as model_mask_name; else leave this layer out of random_ltd_layer_id"
            )
        return value

    def remove(self) -> None:
        """Give the layers their forward methods back."""
        for one in self._instead:
            one.remove()


def _inner(layer: nn.Module) -> nn.Module:
    return layer.random_ltd_layer if isinstance(layer, RandomLayerTokenDrop) else layer


def _is_variadic(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD


def _take(values: torch.Tensor, chosen: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the chosen positions (batch, tokens) of a dimension of values whose first dimension is the batch, or 1."""
    rows, count = chosen.shape
    values = values.expand(rows, *values.shape[1:])
    shape = [1] * values.dim()
    shape[0], shape[dim] = rows, count
    wanted = list(values.shape)
    wanted[dim] = count
    return values.gather(dim, chosen.view(shape).expand(wanted))
