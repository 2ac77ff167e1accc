"""Planning activations: the model's own forward and backward pass on tensors without memory.

A copy of the module whose parameters are fake (torch's FakeTensorMode: a shape, a dtype and a device, but no values)
computes a sample batch, and the tracker that measures real steps counts what it makes. Plan and measurement are
therefore the same arithmetic. A parameter's gradient is dropped as soon as it has been produced, as the engine does;
when that happens is part of the result, because the engine's own buffers come and go with it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.compat import without_overrides
from shardwise.errors import UsageError
from shardwise.memory.accountant import Accountant
from shardwise.memory.track import track_activations


@dataclass(frozen=True)
class Stretch:
    """The time from one gradient to the next.

    Attributes:
        parameter: `id()` of the parameter whose gradient begins it; None for the time before the first gradient.
        start: bytes of activations and temporaries when it begins, this gradient included.
        peak: most bytes at once after that, when the gradient has been taken away.
    """

    parameter: int | None
    start: int
    peak: int


@dataclass(frozen=True)
class ActivationPlan:
    """Activations and temporaries of one forward and backward pass.

    Attributes:
        stretches: in order of time.
    """

    stretches: tuple[Stretch, ...]

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return max(max(stretch.start, stretch.peak) for stretch in self.stretches)


def plan_activations(
    module: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    own_hooks: Collection[int] = (),
) -> ActivationPlan:
    """Return the bytes of activations and temporaries in one forward and backward pass.

    Args:
        module: is copied without its values and not changed. Its parameters may be released.
        batch: one micro-batch: a mapping is passed as keyword arguments, a tuple or list as positional ones, anything
            else as the only argument. Its own memory is not counted.
        loss: makes a scalar of the module's output. Default: the output itself where it is one, its `loss` (attribute
            or key), or its first element; otherwise the sum of all differentiable outputs.
        dtypes: `id(parameter)` to the dtype in which the module will compute with it, where that is not its own.
        own_hooks: ids of module hooks that the copy must not run.

    Raises:
        Exception: whatever the module raises when it cannot be copied or cannot compute without values (its control
            flow depends on data).

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
        >>> plan = plan_activations(net, torch.ones(4, 512))
        >>> plan.peak >= 4 * 1024 * 4, len(plan.stretches)  # what ReLU saves; before, and after each of four gradients
        (True, 5)
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    accountant = Accountant()
    stretches: list[Stretch] = []
    begun: list[tuple[int | None, int]] = [(None, 0)]

    def produced(parameter: int, fake: torch.Tensor) -> None:
        stretches.append(Stretch(*begun.pop(), accountant.peak_total))
        begun.append((parameter, accountant.total))
        fake.grad = None
        accountant.reset_peak()

    twin = _fake_copy(module, mode, dtypes or {}, own_hooks, produced)
    with _undisturbed(), mode:
        args, kwargs = _arguments(tree_map(lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, batch))
        with torch.enable_grad(), track_activations(accountant):
            output = twin(*args, **kwargs)
            scalar = loss(output) if loss is not None else _loss_of(output)
            del output
            scalar.backward()
    return ActivationPlan((*stretches, Stretch(*begun.pop(), accountant.peak_total)))


def _fake_copy(
    module: nn.Module,
    mode: Any,
    dtypes: Mapping[int, torch.dtype],
    own_hooks: Collection[int],
    produced: Callable[[int, torch.Tensor], None],
) -> nn.Module:
    """Copy the module's structure; parameters and buffers become fake, shared ones stay shared."""
    memo: dict[int, Any] = {}
    with mode, without_overrides():
        for parameter in module.parameters():
            dtype = dtypes.get(id(parameter), parameter.dtype)
            values = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            fake = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if fake.requires_grad:
                fake.register_post_accumulate_grad_hook(functools.partial(produced, id(parameter)))
            memo[id(parameter)] = fake
        for buffer in module.buffers():
            memo[id(buffer)] = torch.empty_strided(
                buffer.size(), buffer.stride(), dtype=buffer.dtype, device=buffer.device
            )
    twin = copy.deepcopy(module, memo)
    for child in twin.modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key in own_hooks:
                hooks.pop(key, None)
    return twin


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the random state, and run compiled modules as they were written."""
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        yield


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _loss_of(output: Any) -> torch.Tensor:
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate
    differentiable = [v for v in tree_leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not differentiable:
        raise UsageError("the module's output does not depend on any parameter that is trained; pass loss=")
    return torch.stack([tensor.sum() for tensor in differentiable]).sum()
