"""Expert parallelism for transformers' models: dropless, with the experts of each block distributed over ranks.

Blocks (Mixtral, Qwen-MoE, DeepSeek) have a router and a module `experts`, which receives tokens, chosen experts and
weights, and stores all experts' weights in stacked tensors. A module with the same parameters, narrowed to the rank's
experts, replaces `experts`; results are equal up to rounding.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.compat import has_values
from shardwise.errors import ConfigError, UsageError
from shardwise.moe.dispatch import counted, in_turn
from shardwise.moe.exchange import SINGLE_RANK, ExpertGroup, ExpertParallelModule, mark_experts
from shardwise.moe.experts import GroupSizes, grouped_linear, in_turn_of
from shardwise.names import name_search
from shardwise.registry import declare_stack

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import ExpertParallel

_SECTION = "expert_parallel"

# Value of `preset_model` -> class name prefix of the blocks.
PRESETS = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
}


@dataclass(frozen=True)
class Names:
    """Names of a block's children and parameters."""

    experts: str  # child with the experts
    routers: tuple[str, ...]  # possible names of the router child
    gate: str  # stacked gate projections, with the up projections below them if `up` is None
    down: str
    up: str | None

    @classmethod
    def of(cls, section: ExpertParallel) -> Names:
        """Return the names of a configuration."""
        return cls(
            section.expert_pattern or "experts",
            ("gate", "router") if section.router_pattern is None else (section.router_pattern,),
            section.expert_w1 or "gate_up_proj",
            section.expert_w2 or "down_proj",
            section.expert_w3,
        )

    @property
    def parameters(self) -> list[str]:
        """Names of the weights of the experts."""
        return [self.gate, self.down, *([self.up] if self.up is not None else [])]


@dataclass(frozen=True)
class Form:
    """Storage and computation of a block's experts."""

    names: Names
    transposed: bool = False  # weights are [experts, in, out]
    bias: bool = False  # each projection has a bias, named as its weight plus `_bias`
    # input of the down projection, from the concatenated gate and up outputs; None: activation(gate) * up
    gated: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters."""
        return [n for name in self.names.parameters for n in ([name, f"{name}_bias"] if self.bias else [name])]


class StackedExperts(ExpertParallelModule):
    """The experts of a block in stacked tensors: y = (activation(x gate^T) * x up^T) down^T for each.

    Parameters of the replaced module `given` are reused under their names. `activation` is None if the form has its own
    gate. `grouped` computes all experts in one matrix product if torch supports it
    (`shardwise.compat.grouped_product`).
    """

    def __init__(
        self,
        given: nn.Module,
        form: Form,
        ep_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor] | None,
        grouped: bool,
    ) -> None:
        super().__init__()
        self._form = form
        for name in form.parameters:
            self.register_parameter(name, given.get_parameter(name))
            declare_stack(self.get_parameter(name))
        self.num_experts = len(given.get_parameter(form.names.gate))
        self.ep_size = ep_size
        mark_experts(self.parameters(), ep_size)
        self.act_fn = activation
        self.grouped = grouped
        self._own: tuple[int, int] | None = None
        self.train(given.training)

    def bind(self, path: str, group: ExpertGroup) -> None:
        """Set the group and declare this rank's experts; the first call frees the experts of other ranks."""
        self.group, self.path = group, path
        own = group.own(self.num_experts)
        if self._own is None:
            for name in self._form.parameters:
                group.narrow(self.get_parameter(name))
            self._own = own
            return
        if self._own != own and group.comm is not None and not group.comm.imagined:
            raise UsageError(
                f"{path}: this rank has kept the experts from {self._own[0]} to {self._own[1]} and would now need "
                f"those from {own[0]} to {own[1]}. Build the model again"
            )
        for name in self._form.parameters:
            group.declare(self.get_parameter(name), experts=self.num_experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs; `top_k_index` and its weights are [tokens, k]."""
        return self.mixed(self.bound(), self.num_experts, hidden_states, top_k_index, top_k_weights)

    def mixed(
        self, group: ExpertGroup, count: int, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the result for a group with `count` experts."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = index.reshape(len(tokens), -1).T.contiguous()
        counts = counted(chosen, count)
        self.count(counts)
        # A single rank with the grouped product reads no numbers: torch takes the group ends from the device.
        rows = group.count_rows(counts, chosen.numel(), self.path, on_host=group.size > 1)
        order = in_turn(chosen)
        made = in_turn_of(group, order.spread(tokens), rows, self._compute, self.path)
        joined = order.joined(made, weights.reshape(len(tokens), -1).T)
        return joined.to(hidden_states.dtype).view(hidden_states.shape)

    def _compute(self, rows: torch.Tensor, sizes: GroupSizes) -> torch.Tensor:
        names = self._form.names
        first = self._project(rows, names.gate, sizes)
        if self._form.gated is not None:
            return self._project(self._form.gated(first), names.down, sizes)
        gate, up = first.chunk(2, dim=-1) if names.up is None else (first, self._project(rows, names.up, sizes))
        assert self.act_fn is not None
        return self._project(self.act_fn(gate) * up, names.down, sizes)

    def _project(self, rows: torch.Tensor, name: str, sizes: GroupSizes) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, name)
        weight = weight.transpose(1, 2) if self._form.transposed else weight
        made = grouped_linear(rows, weight, sizes, grouped=self.grouped)
        if not self._form.bias:
            return made
        bias: torch.Tensor = getattr(self, f"{name}_bias")
        experts = torch.arange(len(bias), device=rows.device)
        return made + bias[experts.repeat_interleave(sizes.on(rows.device), output_size=len(rows))].to(made.dtype)


def convert(model: nn.Module, section: ExpertParallel) -> list[str]:
    """Replace the experts of a model's blocks in place, except replaced ones; return names of the expert modules."""
    names = Names.of(section)
    found = []
    compared: set[Any] = set()
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
            form = _form(inner, given, names, section, model)
            activation = _activation(inner, given, section.expert_activation) if form.gated is None else None
            made = StackedExperts(given, form, section.autoep_size, activation, section.use_grouped_mm)
            kind = (type(given), form.names, *(tuple(p.shape) for p in made.parameters()))
            if kind not in compared:
                _compare(inner, given, made)
                compared.add(kind)
            setattr(block, names.experts, made)
        found.append(inner)
    if not found:
        raise ConfigError(
            f"{_SECTION}: {type(model).__name__} has no block with the children {names.experts!r} (with stacked "
            f"parameters {', '.join(names.parameters)}) and {' or '.join(map(repr, names.routers))}"
            + (f" whose name matches {section.moe_layer_pattern!r}" if section.moe_layer_pattern is not None else "")
            + (f" of the family {section.preset_model!r}" if section.preset_model is not None else "")
            + f". Name them with {_SECTION}.moe_layer_pattern, expert_pattern, router_pattern, expert_w1, expert_w2 "
            "and expert_w3, or switch the section off"
        )
    return found


def _blocks(model: nn.Module, section: ExpertParallel, names: Names) -> Iterator[tuple[str, nn.Module]]:
    begins = "" if section.preset_model is None else PRESETS[section.preset_model]
    finds = name_search(model)
    for path, block in model.named_modules():
        experts = getattr(block, names.experts, None)
        routed = any(isinstance(getattr(block, name, None), nn.Module) for name in names.routers)
        if not isinstance(experts, nn.Module) or not routed:
            continue
        if section.moe_layer_pattern is not None and not finds([section.moe_layer_pattern], path):
            continue
        stacked = (experts._parameters.get(name) for name in names.parameters)
        if type(block).__name__.startswith(begins) and all(one is not None and one.dim() == 3 for one in stacked):
            yield path, block


def _form(path: str, given: nn.Module, names: Names, section: ExpertParallel, model: nn.Module) -> Form:
    """Raise a ConfigError for unsupported experts, or an indivisible number."""
    gating = getattr(type(given), "_apply_gate", None)
    own_gate = gating is not None and gating.__name__ != "_default_apply_gate"
    form = Form(
        names,
        transposed=bool(getattr(given, "is_transposed", False)),
        bias=bool(getattr(given, "has_bias", False)),
        gated=_Gate(given) if own_gate else None,
    )
    others = sorted(set(given.state_dict()) - set(form.parameters))
    forms = [] if getattr(given, "has_gate", True) else ["has_gate"]
    forms += ["is_concatenated"] if not own_gate and not getattr(given, "is_concatenated", True) else []
    forms += ["has_post_expert_norm"] if getattr(given, "has_post_expert_norm", False) else []
    if others or forms:
        raise ConfigError(
            f"{_SECTION}: the experts of {path} ({type(given).__name__}) have {', '.join(others + forms)}; only those "
            "are divided that are gate, up and down projections. Switch the section off: `zero_optimization.stage` 3 "
            "divides any experts over the ranks"
        )
    count = len(given.get_parameter(names.gate))
    if count % section.autoep_size:
        raise ConfigError(
            f"{_SECTION}.autoep_size: {section.autoep_size} ranks cannot have as many of the {count} experts of "
            f"{path}; choose a divisor of {count}"
        )
    if section.num_experts_attr is not None:
        configured = getattr(getattr(model, "config", None), section.num_experts_attr, None)
        if configured != count:
            raise ConfigError(
                f"{_SECTION}.num_experts_attr: model.config.{section.num_experts_attr} is {configured}, and {path} has "
                f"{count} experts"
            )
    return form


class _Gate:
    def __init__(self, given: nn.Module) -> None:
        self._of = copy.copy(given)
        self._of._parameters = {}

    def __call__(self, projected: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._of._apply_gate(projected)  # type: ignore[operator]
        return found


class _Original(nn.Module):
    """The experts of a block in their own class's plain torch implementation."""

    def __init__(self, given: nn.Module) -> None:
        super().__init__()
        self.given = given

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        written = getattr(type(self.given).forward, "__wrapped__", type(self.given).forward)
        found: torch.Tensor = written(self.given, *args)
        return found


class _Converted(nn.Module):
    def __init__(self, made: StackedExperts) -> None:
        super().__init__()
        self.given = made

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.given.mixed(SINGLE_RANK, 2, *args)


def _compare(path: str, given: nn.Module, made: StackedExperts) -> None:
    """Compare two random experts of both forms on a few tokens: results, and gradients of tokens and parameters."""
    if type(given).forward is nn.Module.forward or not has_values(torch.empty(0, device="cpu")):
        return  # the module has no forward, or a memory plan computes no values
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).requires_grad_()

    shapes = {name: p.shape[1:] for name, p in made.named_parameters()}
    with torch.no_grad():
        values = {f"given.{n}": drawn(2, *shape) / max(shape[-1], 1) ** 0.5 for n, shape in shapes.items()}
    values = {name: value.requires_grad_() for name, value in values.items()}
    names = made._form.names
    width = shapes[names.gate][0 if made._form.transposed else -1]
    tokens, weights = drawn(4, width), drawn(4, 2)
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]], device="cpu")
    inputs = [tokens, weights, *values.values()]
    results = []
    try:
        for form in (_Original(given), _Converted(made)):
            found = torch.func.functional_call(form, values, (tokens, chosen, weights))
            grads = torch.autograd.grad(found.square().sum(), inputs, allow_unused=True)
            results.append(
                [found, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]
            )
    except (TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{_SECTION}: the experts of {path} ({type(given).__name__}) cannot be called with tokens, chosen experts "
            f"and their weights ({error}). Switch the section off: `zero_optimization.stage` 3 divides any experts"
        ) from error
    what = ["results", "gradients of tokens", "gradients of weights of choices", *(f"gradients of {n}" for n in shapes)]
    for name, expected, got in zip(what, *results, strict=True):
        off = float((expected - got).abs().max().detach())
        if not off <= 1e-4 * max(float(expected.abs().max().detach()), 1e-30):
            raise ConfigError(
                f"{_SECTION}: divided, the experts of {path} ({type(given).__name__}) would compute something else: "
                f"{name} differ by {off:.1e} on random tokens. Check expert_w1, expert_w2, expert_w3 and "
                "expert_activation, or switch the section off"
            )


def _activation(path: str, given: nn.Module, name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
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
