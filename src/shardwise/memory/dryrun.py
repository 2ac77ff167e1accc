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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compat import without_overrides
from shardwise.errors import UsageError
from shardwise.memory.accountant import Accountant
from shardwise.memory.track import track_activations
from shardwise.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


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


@dataclass(frozen=True)
class Call:
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def plan_activations(
    module: nn.Module,
    batch: Any,
    *,
    device: torch.device | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    own_hooks: Collection[int] = (),
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> ActivationPlan:
    """Return the bytes of activations and temporaries in one forward and backward pass.

    Args:
        module: is copied without its values and not changed. Its parameters may be released.
        batch: one micro-batch: a mapping is passed as keyword arguments, a tuple or list as positional ones, a `Call`
            as both, anything else as the only argument. Its own memory is not counted.
        device: where what lies on the meta device is taken to be; default: the CPU.
        loss: makes a scalar of the module's output. Default: the output itself where it is one, its `loss` (attribute
            or key), or its first element; otherwise the sum of all differentiable outputs.
        dtypes: `id(parameter)` to the dtype in which the module will compute with it, where that is not its own.
        own_hooks: ids of module hooks that the copy must not run.
        around: context in which the module computes; the loss is made outside of it.

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

    twin = fake_copy(module, mode, dtypes=dtypes, own_hooks=own_hooks, produced=produced)
    with undisturbed(), mode:
        args, kwargs = _arguments(fake_values(batch, mode, device))
        with torch.enable_grad(), track_activations(accountant):
            with around or contextlib.nullcontext():
                output = twin(*args, **kwargs)
            scalar = loss(output) if loss is not None else _loss_of(output)
            del output
            scalar.backward()
    return ActivationPlan((*stretches, Stretch(*begun.pop(), accountant.peak_total)))


def fake_copy(
    module: nn.Module,
    mode: FakeTensorMode,
    *,
    dtypes: Mapping[int, torch.dtype] | None = None,
    own_hooks: Collection[int] = (),
    produced: Callable[[int, torch.Tensor], None] | None = None,
) -> nn.Module:
    """Copy a module's structure; parameters and buffers become fake, shared ones stay shared.

    Args:
        module: is not changed. What it has on the meta device is taken to be on the CPU.
        mode: makes the fake tensors.
        dtypes: of parameters, by `id()`, where that is not to be their own.
        own_hooks: ids of module hooks that the copy must not run.
        produced: called with a parameter's `id()` and its copy when that has received a gradient.
    """
    memo: dict[int, Any] = {}
    with mode, without_overrides():
        for parameter in module.parameters():
            dtype = (dtypes or {}).get(id(parameter), parameter.dtype)
            values = torch.empty(parameter.shape, dtype=dtype, device=_device_of(parameter))
            fake = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if fake.requires_grad and produced is not None:
                fake.register_post_accumulate_grad_hook(functools.partial(produced, id(parameter)))
            memo[id(parameter)] = fake
        for buffer in module.buffers():
            memo[id(buffer)] = _empty_like(buffer, _device_of(buffer))
    twin = copy.deepcopy(module, memo)
    for child in twin.modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key in own_hooks:
                hooks.pop(key, None)
    return twin


def fake_values(values: Any, mode: FakeTensorMode, device: torch.device | None = None) -> Any:
    """Return nested values with each tensor replaced by a fake one.

    Args:
        values: nested in any way.
        mode: makes the fake tensors.
        device: where tensors of the meta device are taken to be; default: the CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            return mode.from_tensor(tensor)
        with mode:
            return _empty_like(tensor, _device_of(tensor, device)).requires_grad_(tensor.requires_grad)

    return map_tensors(values, fake)


def shapes_of(values: Any, rows: int | None = None, wanted: int | None = None) -> Any:
    """Return nested values with each tensor replaced by one on the meta device.

    Args:
        values: nested in any way; tensors are dense.
        rows: size of the first dimension of what belongs to samples.
        wanted: the size that it is to have instead.

    >>> shapes_of({"x": torch.ones(8, 3), "scale": torch.ones(3)}, 8, 2)["x"].shape
    torch.Size([2, 3])
    """
    meta = torch.device("meta")

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        made = _empty_like(tensor, meta)
        if rows is not None and made.dim() and made.shape[0] == rows:
            made = made[:wanted]
        return made.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return map_tensors(values, shape)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _device_of(tensor: torch.Tensor, default: torch.device | None = None) -> torch.device:
    return (default or torch.device("cpu")) if tensor.is_meta else tensor.device


@contextlib.contextmanager
def undisturbed(devices: Collection[int] | None = None) -> Iterator[None]:
    """Keep the random state, and run compiled modules as they were written.

    Args:
        devices: the CUDA devices whose random state is kept; None: of all.
    """
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        yield


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Call):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def like_cross_entropy(output: Any) -> torch.Tensor:
    """Return a loss that takes the memory of a usual one: the output's own loss, or the sum of fp32 log-softmaxes.

    For outputs whose real loss is not known: cross entropy keeps an fp32 copy of the logits and makes a gradient of the
    same size.
    """
    scalar = _scalar_in(output)
    if scalar is not None:
        return scalar
    return _sum_of([tensor.float().log_softmax(-1) if tensor.dim() else tensor for tensor in _trained_outputs(output)])


def _loss_of(output: Any) -> torch.Tensor:
    scalar = _scalar_in(output)
    return scalar if scalar is not None else _sum_of(_trained_outputs(output))


def _scalar_in(output: Any) -> torch.Tensor | None:
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate
    return None


def _trained_outputs(output: Any) -> list[torch.Tensor]:
    differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not differentiable:
        raise UsageError("the module's output does not depend on any parameter that is trained; pass loss=")
    return differentiable


def _sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()
