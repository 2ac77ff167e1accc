"""Optimizer state size, measured by a step of a copy on fake tensors: of any class with any options."""

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
    """Return, for each tensor of `shapes`, the bytes of its optimizer state and the bytes of scalars in it.

    A copy of the optimizer is stepped, with the options of parameter group `group`; some state depends on the device.

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
        # The class's method, because a scheduler may have wrapped the instance's and would count the call.
        type(optimizer).step(twin)
    found = []
    for parameter in parameters:
        kept = [value for value in twin.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
        # The averages of a 0-D parameter are 0-D, but no counters.
        single = [value for value in kept if not value.dim() and parameter.dim()]
        found.append((_bytes(kept), _bytes(single)))
    return found


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def twin_of(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with the same options and other parameter groups, which shares no mutable state."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue
        twin.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(group) for group in groups]
    # The norms of the engine's tensors do not apply to these tensors.
    norms = twin.__dict__.pop("shardwise_norms", None)
    if norms is not None:
        twin.__dict__["shardwise_norms"] = norms.single_rank(twin.param_groups)
    return twin
