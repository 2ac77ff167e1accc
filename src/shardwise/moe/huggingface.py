"""Models of transformers: the experts of each block are divided over ranks, and tokens travel to them; none is dropped.

Blocks of these models (Mixtral, Qwen-MoE, DeepSeek with its shared experts) have a router and a module `experts`, which
gets tokens, chosen experts and weights, and holds the weights of all experts in stacked tensors. That module is
replaced by one with the same parameters, of which a rank keeps its experts. Router, shared experts and the rest of the
block stay what they are, so that what the model computes is the same up to rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.moe.dispatch import counted, in_turn
from shardwise.moe.exchange import Divided, ExpertGroup, mark_experts
from shardwise.moe.experts import GroupSizes, grouped_linear, in_turn_of
from shardwise.names import name_search

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import ExpertParallel

_SECTION = "expert_parallel"

PRESETS = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}
"""Value of `preset_model` -> how the classes of its blocks begin."""


@dataclass(frozen=True)
class Names:
    """What the children and parameters of a block are called.

    Attributes:
        experts: the child that holds the experts.
        router: the child that routes.
        gate: the stacked gate projections, with the up projections beneath them if `up` is None.
        down: the stacked down projections.
        up: the stacked up projections.
    """

    experts: str
    router: str
    gate: str
    down: str
    up: str | None

    @classmethod
    def of(cls, section: ExpertParallel) -> Names:
        """Return what a configuration calls them."""
        return cls(
            section.expert_pattern or "experts",
            section.router_pattern or "gate",
            section.expert_w1 or "gate_up_proj",
            section.expert_w2 or "down_proj",
            section.expert_w3,
        )

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters of the experts."""
        return [self.gate, self.down, *([self.up] if self.up is not None else [])]


class StackedExperts(Divided):
    """The experts of a block, in stacked tensors: y = (activation(x gate^T) * x up^T) down^T for each.

    Args:
        given: the module in whose place this one comes; its parameters are taken, under their names.
        names: of these.
        ep_size: ranks over which they are divided.
        activation: of the gate projection.
        grouped: compute all experts in one matrix product where torch can (`shardwise.compat.grouped_product`).
    """

    def __init__(
        self,
        given: nn.Module,
        names: Names,
        ep_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        grouped: bool,
    ) -> None:
        super().__init__()
        self._names = names
        for name in names.parameters:
            self.register_parameter(name, given.get_parameter(name))
        self.num_experts = len(given.get_parameter(names.gate))
        self.ep_size = ep_size
        mark_experts(self.parameters(), ep_size)
        self.act_fn = activation
        self.grouped = grouped
        self._own: tuple[int, int] | None = None
        self.train(given.training)

    def bind(self, path: str, group: ExpertGroup) -> None:
        """See `Divided.bind`; the first time the experts of other ranks are given back."""
        self.group, self.path = group, path
        own = group.own(self.num_experts)
        if self._own is None:
            for name in self._names.parameters:
                group.narrow(self.get_parameter(name))
            self._own = own
            return
        if self._own != own and group.comm is not None and not group.comm.imagined:
            raise UsageError(
                f"{path}: this rank has kept the experts from {self._own[0]} to {self._own[1]} and would now need "
                f"those from {own[0]} to {own[1]}. Build the model again"
            )
        for name in self._names.parameters:
            group.declare(self.get_parameter(name), experts=self.num_experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of what each token's experts make of it, by its weights.

        Args:
            hidden_states: [..., width].
            top_k_index: chosen experts; [tokens, k].
            top_k_weights: their weights.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = top_k_index.reshape(len(tokens), -1).T.contiguous()
        weights = top_k_weights.reshape(len(tokens), -1).T
        group = self.bound()
        counts = counted(chosen, self.num_experts)
        self.count(counts)
        # One rank that multiplies all experts at once reads no number: torch takes their ends from the device.
        rows = group.count_rows(counts, chosen.numel(), self.path, on_host=group.size > 1)
        order = in_turn(chosen)
        made = in_turn_of(group, order.spread(tokens), rows, self._compute, self.path)
        return order.joined(made, weights).to(hidden_states.dtype).view(hidden_states.shape)

    def _compute(self, rows: torch.Tensor, sizes: GroupSizes) -> torch.Tensor:
        first = grouped_linear(rows, self.get_parameter(self._names.gate), sizes, grouped=self.grouped)
        if self._names.up is None:
            gate, up = first.chunk(2, dim=-1)
        else:
            gate = first
            up = grouped_linear(rows, self.get_parameter(self._names.up), sizes, grouped=self.grouped)
        inner = self.act_fn(gate) * up
        return grouped_linear(inner, self.get_parameter(self._names.down), sizes, grouped=self.grouped)


def convert(model: nn.Module, section: ExpertParallel) -> list[str]:
    """Replace the experts of a model's blocks; what has been replaced before stays.

    Args:
        model: is changed.
        section: of the configuration.

    Returns:
        Names of the modules that hold experts.

    Raises:
        ConfigError: nothing in the model is called what the section says, or what is cannot be divided.
    """
    names = Names.of(section)
    found = []
    for path, block in list(_blocks(model, section, names)):
        inner = f"{path}.{names.experts}".lstrip(".")
        given = getattr(block, names.experts)
        if isinstance(given, StackedExperts):
            if given.ep_size != section.autoep_size:
                raise ConfigError(
                    f"{_SECTION}.autoep_size: {section.autoep_size}, but the experts of {inner} have been divided over "
                    f"{given.ep_size} ranks before. Build the model again"
                )
        else:
            _check(inner, given, names, section, model)
            activation = _activation(inner, given, section.expert_activation)
            setattr(
                block,
                names.experts,
                StackedExperts(given, names, section.autoep_size, activation, section.use_grouped_mm),
            )
        found.append(inner)
    if not found:
        raise ConfigError(
            f"{_SECTION}: {type(model).__name__} has no block with the children {names.experts!r} (with stacked "
            f"parameters {', '.join(names.parameters)}) and {names.router!r}"
            + (f" whose name matches {section.moe_layer_pattern!r}" if section.moe_layer_pattern is not None else "")
            + (f" of the family {section.preset_model!r}" if section.preset_model is not None else "")
            + f". Name them with {_SECTION}.moe_layer_pattern, expert_pattern, router_pattern, expert_w1, expert_w2 "
            "and expert_w3, or switch the section off"
        )
    return found


def _blocks(model: nn.Module, section: ExpertParallel, names: Names) -> Iterator[tuple[str, nn.Module]]:
    """Find the blocks that the section means."""
    begins = "" if section.preset_model is None else PRESETS[section.preset_model]
    finds = name_search(model)
    for path, block in model.named_modules():
        experts, router = getattr(block, names.experts, None), getattr(block, names.router, None)
        if not isinstance(experts, nn.Module) or not isinstance(router, nn.Module):
            continue
        if section.moe_layer_pattern is not None and not finds([section.moe_layer_pattern], path):
            continue
        stacked = (experts._parameters.get(name) for name in names.parameters)
        if type(block).__name__.startswith(begins) and all(one is not None and one.dim() == 3 for one in stacked):
            yield path, block


def _check(path: str, given: nn.Module, names: Names, section: ExpertParallel, model: nn.Module) -> None:
    """Raise for experts that compute something else, or cannot be divided."""
    others = sorted(set(given.state_dict()) - set(names.parameters))
    other_forms = {"has_bias": False, "is_transposed": False, "has_gate": True, "is_concatenated": True}
    forms = [name for name, usual in other_forms.items() if getattr(given, name, usual) is not usual]
    forms += ["has_post_expert_norm"] if getattr(given, "has_post_expert_norm", False) else []
    gating = getattr(type(given), "_apply_gate", None)
    if gating is not None and gating.__name__ != "_default_apply_gate":
        forms.append("_apply_gate")
    if others or forms:
        raise ConfigError(
            f"{_SECTION}: the experts of {path} ({type(given).__name__}) have {', '.join(others + forms)}; only those "
            "are divided that are gate, up and down projections without biases. Switch the section off: "
            "`zero_optimization.stage` 3 divides any experts over the ranks"
        )
    count = len(given.get_parameter(names.gate))
    if count % section.autoep_size:
        raise ConfigError(
            f"{_SECTION}.autoep_size: {section.autoep_size} ranks cannot have as many of the {count} experts of "
            f"{path}; choose a divisor of {count}"
        )
    if section.num_experts_attr is not None:
        said = getattr(getattr(model, "config", None), section.num_experts_attr, None)
        if said != count:
            raise ConfigError(
                f"{_SECTION}.num_experts_attr: model.config.{section.num_experts_attr} is {said}, and {path} has "
                f"{count} experts"
            )


def _activation(path: str, given: nn.Module, name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function of experts, or the one of this name."""
    found: Any = getattr(given, "act_fn", None)
    if name is not None:
        found = getattr(F, name, None) or _of_transformers(name)
    if found is None:
        raise ConfigError(
            f"{_SECTION}.expert_activation: {name!r} is no function of torch.nn.functional or transformers"
            if name is not None
            else f"{_SECTION}: the experts of {path} have no `act_fn`; name it with {_SECTION}.expert_activation"
        )
    activation: Callable[[torch.Tensor], torch.Tensor] = found
    return activation


def _of_transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers.activations").ACT2FN[name]
    except (ImportError, KeyError):
        return None
