"""What an optimizer will keep and use, found by stepping a copy of it on tiny tensors.

No table of optimizers: any class, with any options, is asked itself; one that works in chunks says what it takes
(`shardwise_step_bytes`). State and temporaries of a step are sums of products of a tensor's sizes (m * n for moments,
m + n for factored ones, a constant for step counts), that is, multilinear in the sizes. Such a function is known
everywhere once it is known at the corners of a small box. Temporaries of a matrix may also depend on its shorter side
(products of a matrix with itself): where the corners do not tell, smaller matrices with the same ratio of sides do.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.compat import allow_gradient_dtype
from shardwise.memory.accountant import Accountant
from shardwise.memory.track import track_activations

_LOW, _HIGH = 16, 32
"""Sizes of the corners: small, and different enough from one that no dimension looks like a scalar's."""


@dataclass(frozen=True)
class StepBytes:
    """What stepping tensors of one parameter group takes.

    Attributes:
        state: bytes kept between steps.
        temporary: most bytes of temporaries at once during a step.
    """

    state: int
    temporary: int


def step_bytes(
    optimizer: torch.optim.Optimizer,
    group: int,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
) -> StepBytes:
    """Return what an optimizer will take for tensors of these shapes, from dry runs on tiny tensors.

    Args:
        optimizer: asked, not changed: a copy with the same options is stepped.
        group: index of the parameter group whose options hold.
        shapes: of all tensors that the optimizer will step in this group.
        dtype: of these tensors.
        gradient_dtype: of their gradients.
        device: where they live; some optimizers work differently on different devices.

    Example:
        >>> adam = torch.optim.Adam([torch.zeros(1)])
        >>> fp32 = torch.float32
        >>> step_bytes(adam, 0, [(1000,)], dtype=fp32, gradient_dtype=fp32, device=torch.device("cpu")).state
        8004
    """
    own = getattr(optimizer, "shardwise_step_bytes", None)
    if own is not None:
        # Scratch of bounded size is not multilinear.
        return StepBytes(*own(group, shapes, dtype=dtype, gradient_dtype=gradient_dtype, device=device))
    corner = _corners(optimizer, group, dtype, gradient_dtype, device)
    state = 0
    alone: list[int] = []
    after: list[int] = []
    together = 0
    for shape in shapes:
        state += _interpolate(shape, lambda at: corner(1, at).state)
        one, two, three = (_temporary(shape, corner, count) for count in (1, 2, 3))
        alone.append(one)
        after.append(two - one)
        together += three - two
    if together > 0:
        # All tensors are stepped at once: each needs its share.
        return StepBytes(state, max(alone) + together - together // len(shapes))
    # One after the other; something of the one before may still be there.
    return StepBytes(state, max((one + before for one, before in zip(alone, [0, *after], strict=False)), default=0))


def state_bytes(
    optimizer: torch.optim.Optimizer,
    group: int,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[int, int]]:
    """Return what an optimizer will keep for each of some tensors, and how much of that is there whatever their size.

    Arguments as of `step_bytes`; gradients have the tensors' dtype.

    Example:
        >>> adam = torch.optim.Adam([torch.zeros(1)])
        >>> state_bytes(adam, 0, [(1000,), (10, 20)], dtype=torch.float32, device=torch.device("cpu"))
        [(8004, 4), (1604, 4)]
    """
    corner = _corners(optimizer, group, dtype, dtype, device)

    def kept(shape: tuple[int, ...]) -> int:
        return _interpolate(shape, lambda at: corner(1, at).state)

    # A scalar is all size: what is kept of a vector of no elements would be kept of it, too.
    return [(kept(shape), kept((0,) * max(1, len(shape)))) for shape in shapes]


def _corners(
    optimizer: torch.optim.Optimizer,
    group: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
) -> Callable[[int, tuple[int, ...]], StepBytes]:
    """Return a function that says what so many tensors of a small shape take; each is tried once."""
    known: dict[tuple[int, tuple[int, ...]], StepBytes] = {}

    def corner(count: int, shape: tuple[int, ...]) -> StepBytes:
        if (count, shape) not in known:
            known[count, shape] = _dry_run(optimizer, group, [shape] * count, dtype, gradient_dtype, device)
        return known[count, shape]

    return corner


def _temporary(shape: tuple[int, ...], corner: Callable[[int, tuple[int, ...]], StepBytes], count: int) -> int:
    """Return the temporaries of stepping `count` tensors of a shape."""

    def at(small: tuple[int, ...]) -> int:
        return corner(count, small).temporary

    outside = (_LOW + _HIGH, _LOW + _HIGH)
    if len(shape) != 2 or not all(shape) or _interpolate(outside, at) == at(outside):
        return _interpolate(shape, at)
    return _by_ratio(shape, at)


def _by_ratio(shape: tuple[int, ...], at: Callable[[tuple[int, ...]], int]) -> int:
    """Evaluate at a matrix's shape a function that is quadratic in the scale, from smaller ones like it."""
    short, long = min(shape), max(shape)
    if long <= _HIGH:
        return at(shape)
    # Of the shape of the matrix as nearly as whole numbers can be, and never large.
    unit = min(_LOW, max(1, _LOW * _LOW * short // long)), min(_LOW * _LOW, max(1, round(_LOW * long / short)))
    small = unit if shape[0] == short else unit[::-1]
    scale = math.sqrt(short * long / (unit[0] * unit[1]))
    first, second, third = (at((small[0] * times, small[1] * times)) for times in (1, 2, 3))
    curve = (first - 2 * second + third) / 2
    slope = second - first - 3 * curve
    return max(0, round(curve * scale**2 + slope * scale + first - slope - curve))


def _interpolate(shape: tuple[int, ...], at: Callable[[tuple[int, ...]], int]) -> int:
    """Evaluate at `shape` the multilinear function that `at` gives at corners."""
    total = 0
    for sides in itertools.product((_LOW, _HIGH), repeat=len(shape)):
        weight = 1
        for size, side in zip(shape, sides, strict=True):
            weight *= (_HIGH - size) if side == _LOW else (size - _LOW)
        total += weight * at(sides)
    return max(0, round(total / (_HIGH - _LOW) ** len(shape)))


def _dry_run(
    optimizer: torch.optim.Optimizer,
    group: int,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
) -> StepBytes:
    tensors = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        allow_gradient_dtype(parameter, gradient_dtype)
        parameter.grad = torch.ones(shape, dtype=gradient_dtype, device=device)
        tensors.append(parameter)
    twin = twin_of(optimizer, [{**optimizer.param_groups[group], "params": tensors}])
    accountant = Accountant()
    # Of the class, not of the instance: a scheduler may have wrapped the instance's, and would count the call.
    step = type(optimizer).step
    with torch.enable_grad(), track_activations(accountant):
        step(twin)
        kept = {
            id(value.untyped_storage()): value.untyped_storage().nbytes()
            for state in twin.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }
        before = accountant.total
        accountant.reset_peak()
        step(twin)
    return StepBytes(sum(kept.values()), accountant.peak_total - before)


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
