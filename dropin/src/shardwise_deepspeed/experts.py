"""DeepSpeed's MoE layer, and queries and parameter groups of experts for scripts that call them for every model.

An engine needs no separate groups for expert parameters. Groups created here may have their own learning rate or weight
decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import moe
from shardwise.errors import UsageError
from shardwise.moe.exchange import ExpertParallelModule, expert_group_of


class MoE(moe.MoE):
    """`shardwise.moe.MoE`, with a method of DeepSpeed's layer."""

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: `shardwise.initialize()` creates the groups. Raises a UsageError without a process group."""
        if self.ep_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"MoE without its groups: ep_size={self.ep_size}, and there is no process group. Call "
                "shardwise.init_distributed() before"
            )


def is_moe_param(param: torch.Tensor) -> bool:
    """Return True for an expert's parameter, or one marked as such (`param.allreduce` is False)."""
    return expert_group_of(param) is not None or getattr(param, "allreduce", True) is False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (True, number of experts of the last MoE layer) or (False, 0).

    Raises:
        UsageError: a parameter is marked as an expert's without belonging to one.

    Example:
        >>> from shardwise.moe import MoE
        >>> has_moe_layers(nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2))), has_moe_layers(nn.Linear(1, 1))
        ((True, 2), (False, 0))
    """
    _check("has_moe_layers", m.parameters())
    counts = [module.num_experts for module in m.modules() if isinstance(module, ExpertParallelModule)]
    return bool(counts), counts[-1] if counts else 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True if a parameter group is marked as one of experts (`"moe"`)."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (other parameters, expert parameters)."""
    shared: list[nn.Parameter] = []
    experts: list[nn.Parameter] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (gradients of other parameters, gradients of expert parameters), without missing ones."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Move expert parameters of parameter groups into separate groups at the end.

    These have the options of their original group, `"moe": True`, and the expert-parallel group's name as `"name"`.

    Args:
        param_groups: one group or several, changed in place.
        max_group_size: maximum elements of a group of experts; None: unlimited.

    Raises:
        UsageError: a parameter is marked as an expert's without belonging to one.
        ValueError: an argument is no parameter group.
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
    """Return parameters or parameter groups as a list, with expert parameters in separate groups.

    Raises:
        UsageError: a parameter is marked as an expert's without belonging to one.
    """
    given = list(model_parameters)
    if any(isinstance(entry, dict) for entry in given):
        return split_params_into_different_moe_groups_for_optimizer(given, None)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": given}, None)
    return groups if len(groups) > 1 else given


def _portions(params: list[torch.Tensor], limit: float | None) -> Iterator[list[torch.Tensor]]:
    """Split parameters into runs of at most `limit` elements; a larger parameter has its own run."""
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
