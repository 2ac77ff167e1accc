"""What an optimizer keeps, found by stepping a copy of it on tensors without memory.

No table of optimizers: any class, with any options, is asked itself.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.memory.dryrun import Answers


def state_bytes(
    optimizer: torch.optim.Optimizer,
    group: int,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[int, int]]:
    """Return what an optimizer will keep for each of some tensors, and how much of that are single numbers.

    Args:
        optimizer: asked, not changed: a copy with the same options is stepped.
        group: index of the parameter group whose options hold.
        shapes: of all tensors that the optimizer will step in this group.
        dtype: of these tensors and of their gradients.
        device: where they live; some optimizers work differently on different devices.

    Example:
        >>> adam = torch.optim.Adam([torch.zeros(1)])
        >>> state_bytes(adam, 0, [(1000,), (10, 20)], dtype=torch.float32, device=torch.device("cpu"))
        [(8004, 4), (1604, 4)]
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), Answers(), torch.enable_grad():
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        twin = twin_of(optimizer, [{**optimizer.param_groups[group], "params": parameters}])
        # Of the class, not of the instance: a scheduler may have wrapped the instance's, and would count the call.
        type(optimizer).step(twin)
    found = []
    for parameter in parameters:
        kept = [value for value in twin.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
        # A parameter of no dimension is all size: its averages are no counters.
        single = [value for value in kept if not value.dim() and parameter.dim()]
        found.append((_bytes(kept), _bytes(single)))
    return found


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def twin_of(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with the same options over other tensors; it shares nothing that a step changes.

    Args:
        optimizer: is not changed.
        groups: the parameter groups, each with its options.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue
        twin.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(group) for group in groups]
    # What an engine has told it about its tensors, which are others here.
    norms = twin.__dict__.pop("shardwise_norms", None)
    if norms is not None:
        twin.__dict__["shardwise_norms"] = norms.alone(twin.param_groups)
    return twin
