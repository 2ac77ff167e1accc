"""Dry runs: fake copies of modules and batches.

Fake tensors (torch's FakeTensorMode) have a shape, a dtype and a device, but no values. Because the tracker of real
steps also counts them, plan and measurement use the same arithmetic.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.compat import requested_device, without_overrides
from shardwise.errors import UsageError
from shardwise.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Call:
    """Arguments of a module call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Answers(TorchDispatchMode):
    """Returns plausible values of fake tensors to `only` these modules (empty: all): True, 1, or 0.5 (finite, and 1
    minus it is not 0). Existing values (a learning rate in a tensor) are unreadable in a dry run, too.
    """

    def __init__(self, only: Collection[str] = ()) -> None:
        super().__init__()
        self._only = only

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (device := requested_device(func, args)) is not None:
            return device
        if func is torch.ops.aten._local_scalar_dense.default and (not self._only or _calling_module() in self._only):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 0.5 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_masks() -> Iterator[None]:
    """Make transformers omit attention masks that hide nothing, as for tensors with values: inside the block fake
    tensors do not seem traced, for which transformers creates masks.
    """
    utilities: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utilities, "is_fake_tensor"):
        yield
        return
    known, utilities.is_fake_tensor = utilities.is_fake_tensor, lambda _: False
    try:
        with Answers(only=("transformers.masking_utils", "transformers.modeling_attn_mask_utils")):
            yield
    finally:
        utilities.is_fake_tensor = known


def has_masks(batch: Any) -> bool:
    """Return True if a batch has position ids, or masks that are not known to be all ones."""
    from torch._subclasses.fake_tensor import FakeTensor

    def hides(name: str, values: Any) -> bool:
        if not isinstance(values, torch.Tensor):
            return False
        unknown = values.is_meta or isinstance(values, FakeTensor)
        return name == "position_ids" or (name.endswith("mask") and (unknown or not bool(values.all())))

    return any(hides(name, values) for name, values in arguments_of(batch)[1].items())


def _calling_module() -> str:
    frame: FrameType | None = sys._getframe(2)
    # A recorder of the dry run stands between the model and this mode, too.
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "shardwise"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a module with fake parameters and buffers; shared ones stay shared, meta tensors become CPU tensors."""
    memo: dict[int, Any] = {}
    with mode, without_overrides():
        for parameter in module.parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=_device_of(parameter))
            memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = _empty_like(buffer, _device_of(buffer))
    return copy.deepcopy(module, memo)


def fake_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with the same options and other parameter groups, which shares no mutable state."""
    fake: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue
        fake.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        fake.__dict__[name] = OrderedDict()
    fake.state = defaultdict(dict)
    fake.param_groups = [dict(group) for group in groups]
    # The norms of the engine's tensors do not apply to these tensors.
    norms = fake.__dict__.pop("shardwise_norms", None)
    if norms is not None:
        fake.__dict__["shardwise_norms"] = norms.single_rank(fake.param_groups)
    return fake


def fake_values(values: Any, mode: FakeTensorMode, device: torch.device | None = None) -> Any:
    """Return nested values with fake tensors; `device`: of meta tensors (None: the CPU)."""
    from torch._subclasses.fake_tensor import FakeTensor

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            return mode.from_tensor(tensor)
        with mode:
            return _empty_like(tensor, _device_of(tensor, device)).requires_grad_(tensor.requires_grad)

    return map_tensors(values, fake)


def shapes_of(values: Any, rows: int | None = None, wanted: int | None = None) -> Any:
    """Return nested values with meta tensors; a batch dimension (the first) of size `rows` becomes `wanted`.

    >>> shapes_of({"x": torch.ones(8, 3), "scale": torch.ones(3)}, 8, 2)["x"].shape
    torch.Size([2, 3])
    >>> shapes_of(torch.ones(3, 2).T, 2, 4).stride()  # as the transpose of (3, 4)
    (1, 4)
    """

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        size, strides = list(tensor.shape), list(tensor.stride())
        if rows and wanted is not None and size[:1] == [rows]:
            size[0] = wanted
            strides = [step // rows * wanted if step > strides[0] else step for step in strides]
        made = torch.empty_strided(size, strides, dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return map_tensors(values, shape)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _device_of(tensor: torch.Tensor, default: torch.device | None = None) -> torch.device:
    return (default or torch.device("cpu")) if tensor.is_meta else tensor.device


@contextlib.contextmanager
def undisturbed(devices: Collection[int] | None = None) -> Iterator[None]:
    """Preserve the RNG state (of CUDA `devices`; None: all), run eagerly, and silence torch's log of fake operators."""
    # torch logs a traceback of each failing operator before it raises the error; the caller writes its message.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        log.setLevel(level)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a batch: a mapping, a tuple or list, a `Call`, or the only argument."""
    if isinstance(batch, Call):
        return batch.args, batch.kwargs
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def like_cross_entropy(output: Any) -> torch.Tensor:
    """Return a loss with the memory of a usual loss: the output's own loss, or the sum of fp32 log-softmaxes, because
    cross entropy keeps an fp32 copy of the logits and creates a gradient of the same size.
    """
    scalar = _scalar_in(output)
    if scalar is not None:
        return scalar
    return _sum_of([tensor.float().log_softmax(-1) if tensor.dim() else tensor for tensor in _trained_outputs(output)])


def loss_of(output: Any) -> torch.Tensor:
    """Return the output itself, its `loss` or its first element; without a loss the sum of differentiable outputs."""
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
