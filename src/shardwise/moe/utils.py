"""Questions about experts, and parameter groups of their own: what scripts call for every model.

Parameters of experts need no groups of their own: an engine knows what they are parts of. Groups that are made here
are optimised as any other, and may have a learning rate or weight decay of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.moe.exchange import ExpertParallelModule, expert_group_of


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's, or is marked as one (`param.allreduce` is False)."""
    return expert_group_of(param) is not None or getattr(param, "allreduce", True) is False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has layers of experts, and how many experts the last of them has.

    Raises:
        UsageError: a parameter is marked as that of an expert, and belongs to none.

    Example:
        >>> from shardwise.moe import MoE
        >>> has_moe_layers(nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2))), has_moe_layers(nn.Linear(1, 1))
        ((True, 2), (False, 0))
    """
    _check("has_moe_layers", m.parameters())
    counts = [module.num_experts for module in m.modules() if isinstance(module, ExpertParallelModule)]
    return bool(counts), counts[-1] if counts else 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a parameter group says that it is one of experts (`"moe"`)."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (parameters that are not of experts, those that are)."""
    shared: list[nn.Parameter] = []
    experts: list[nn.Parameter] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (gradients of parameters that are not of experts, of those that are); parameters without one are left
    out."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Take the experts out of parameter groups, into groups of their own behind them.

    These have the options of the group that they come from, `"moe": True` and as `"name"` that of the group of ranks.

    Args:
        param_groups: a group, or several; experts are taken out of them.
        max_group_size: most elements of a group of experts; None: as many as there are.

    Raises:
        UsageError: a parameter is marked as that of an expert, and belongs to none.
        ValueError: something else than groups is given.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    made: list[dict[str, Any]] = []
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(
                "split_params_into_different_moe_groups_for_optimizer: expected parameter groups, dictionaries with "
                f"'params', found {type(group).__name__}"
            )
        params = _listed(group["params"])
        _check("split_params_into_different_moe_groups_for_optimizer", params)
        by_ranks: dict[str | None, list[torch.Tensor]] = {}
        for param in params:
            by_ranks.setdefault(expert_group_of(param), []).append(param)
        group["params"] = by_ranks.pop(None, [])
        for name, experts in by_ranks.items():
            made += [
                {**group, "params": some, "name": name, "moe": True} for some in _portions(experts, max_group_size)
            ]
    return groups + made


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, or parameter groups, in a list; with experts among them, as groups of which some are theirs.

    Raises:
        UsageError: a parameter is marked as that of an expert, and belongs to none.
    """
    given = list(model_parameters)
    groups = [entry for entry in given if isinstance(entry, dict)]
    params = [entry for entry in given if not isinstance(entry, dict)]
    for entry in given:
        _check("configure_moe_param_groups", _listed(entry["params"] if isinstance(entry, dict) else entry))
    if groups:
        return split_params_into_different_moe_groups_for_optimizer(groups, None)
    if any(expert_group_of(param) is not None for param in params):
        return split_params_into_different_moe_groups_for_optimizer({"params": params}, None)
    return params


def _portions(params: list[torch.Tensor], limit: float | None) -> Iterator[list[torch.Tensor]]:
    """Divide parameters into runs of at most so many elements; a larger parameter is alone."""
    run: list[torch.Tensor] = []
    for param in params:
        if limit is not None and run and sum(p.numel() for p in run) + param.numel() > limit:
            yield run
            run = []
        run.append(param)
    if run:
        yield run


def _listed(params: Any) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _check(name: str, params: Iterable[torch.Tensor]) -> None:
    marked = sum(getattr(param, "allreduce", True) is False and expert_group_of(param) is None for param in params)
    if marked:
        raise UsageError(
            f"{name}: {marked} parameters are marked as those of experts (allreduce = False) and belong to no layer of "
            "shardwise.moe: marks are not read. Say with shardwise.declare_part which ranks share each of them"
        )
