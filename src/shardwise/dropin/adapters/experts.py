"""Questions about experts, answered for the models that there are here: models without any.

Scripts call these for every model. Parameters of experts are marked `allreduce = False` by who makes them; an engine
here reduces all gradients over all ranks, so such parameters are refused rather than trained wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.absent import MOE
from shardwise.errors import AbsentNameError


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is marked as that of an expert (`param.allreduce` is False)."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """Return (False, 0): whether a model has layers of experts, and how many experts.

    Raises:
        AbsentNameError: a parameter is marked as that of an expert.
    """
    _check("has_moe_layers", m.parameters())
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a parameter group says that it is one of experts (`"moe"`)."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return (parameters that are not of experts, those that are)."""
    shared: list[torch.nn.Parameter] = []
    experts: list[torch.nn.Parameter] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (gradients of parameters that are not of experts, of those that are); parameters without one are left
    out."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the parameter groups as they are, in a list: there are no experts to be divided from them.

    Args:
        param_groups: a group, or several.
        max_group_size: accepted; it is that of groups of experts.

    Raises:
        AbsentNameError: a parameter is marked as that of an expert.
        ValueError: something else than groups is given.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(
                "split_params_into_different_moe_groups_for_optimizer: expected parameter groups, dictionaries with "
                f"'params', found {type(group).__name__}"
            )
        if not isinstance(group["params"], (list, tuple, torch.Tensor)):
            group["params"] = list(group["params"])  # it may be an iterator, which looking at it uses up
        _check("split_params_into_different_moe_groups_for_optimizer", _listed(group["params"]))
    return groups


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, or parameter groups, as they are, in a list.

    Raises:
        AbsentNameError: a parameter is marked as that of an expert.
    """
    given = list(model_parameters)
    for entry in given:
        _check("configure_moe_param_groups", _listed(entry["params"] if isinstance(entry, dict) else entry))
    return given


def _listed(params: Any) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _check(name: str, params: Iterable[torch.Tensor]) -> None:
    marked = sum(is_moe_param(param) for param in params)
    if marked:
        raise AbsentNameError(f"{name}: {marked} parameters are marked as those of experts (allreduce = False): {MOE}")
