"""What compression does to one module, by hooks around its forward pass.

A module keeps its class, and its parameters keep their names and identity. During a forward pass, attributes of the
instance with masked and quantized values hide the parameters, so that any forward function computes with them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.boxes import Region, ranges, whole
from shardwise.compression.masks import Mask
from shardwise.compression.quantize import Scales, quantized, quantized_inputs, straight_through
from shardwise.errors import UsageError
from shardwise.optim.rounding import uniform
from shardwise.parallel.tensor.layers import stores_inputs_first
from shardwise.parallel.tensor.mappings import together
from shardwise.registry import part_of

if TYPE_CHECKING:
    from shardwise.config.schema.compression_training import WeightQuantizationParams, WeightQuantizationShared

MOMENTUM = 0.9
"""Of the moving mean of static bounds."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_linear(module: nn.Module) -> bool:
    """Return True for `nn.Linear` and transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or stores_inputs_first(module)


def is_convolution(module: nn.Module) -> bool:
    """Return True for convolutions of one to three dimensions."""
    return isinstance(module, _CONVOLUTIONS)


def is_compressible(module: nn.Module) -> bool:
    """Return True for linear layers, convolutions and embeddings, whose `weight` is a parameter of their own."""
    kinds = is_linear(module) or is_convolution(module) or isinstance(module, nn.Embedding)
    return kinds and module._parameters.get("weight") is not None


def outputs_dim(module: nn.Module) -> int:
    """Return the dimension of the weight's outputs; the inputs are in the other of the first two."""
    return int(stores_inputs_first(module))


class _Part(NamedTuple):
    """Shape of the whole tensor, and the part that a rank has; None: the whole."""

    shape: tuple[int, ...]
    box: Region | None


def part_for(parameter: torch.Tensor, original: torch.Tensor) -> _Part:
    """Return the part of a module's parameter that the parameter of a copy of the module is: the same, or the whole."""
    part = part_of(original)
    if part.shape is None or parameter.shape != original.shape:
        return _Part(tuple(parameter.shape), None)
    return _Part(part.shape, part.box)


@dataclass
class WeightQuantizer:
    """Quantization of a weight by a schedule of bits."""

    name: str
    shared: WeightQuantizationShared
    params: WeightQuantizationParams

    def bits(self, step: int) -> tuple[int, int] | None:
        """Return the bits at a step, and the steps since they changed; None before the schedule."""
        passed = step - self.shared.schedule_offset
        if passed < 0:
            return None
        bits, period = self.params.start_bits, self.params.quantization_period
        while bits > self.params.target_bits and passed >= period:
            bits, passed = bits - 1, passed - period
            period *= 2 if self.params.doubles else 1
        return bits, passed

    def last_step(self) -> int:
        """Return the first step from which nothing changes."""
        falls = self.params.start_bits - self.params.target_bits
        mixed = self.shared.fp16_mixed_quantize
        rest = math.ceil(1 / mixed.quantize_change_ratio) - 1 if mixed.enabled else 0
        periods = 2**falls - 1 if self.params.doubles else falls
        return self.shared.schedule_offset + self.params.quantization_period * periods + rest

    def __call__(self, module: nn.Module, values: torch.Tensor, part: _Part, step: int) -> torch.Tensor:
        """Return masked values of a weight, or of a part of it, quantized."""
        now = self.bits(step)
        if now is None:
            return values
        noise = None
        if self.shared.rounding == "stochastic":
            noise = self._noise(part, step, values.device)
        found = quantized(
            values,
            now[0],
            symmetric=self.shared.quantization_type == "symmetric",
            scales=self.scales(module, part, values.device),
            noise=noise,
        )
        mixed = self.shared.fp16_mixed_quantize
        if mixed.enabled:
            found = torch.lerp(values.detach(), found, min(1.0, mixed.quantize_change_ratio * (now[1] + 1)))
        return straight_through(values, found)

    def _noise(self, part: _Part, step: int, device: torch.device) -> torch.Tensor:
        """Draw by the position in the whole weight, because all ranks and divisions have to round alike."""
        seed = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=7).digest(), "big")
        region = ranges(whole(part.shape) if part.box is None else part.box)
        return uniform(part.shape, region, seed=seed, step=step, device=device)

    def scales(self, module: nn.Module, part: _Part, device: torch.device) -> Scales:
        """Return the groups of a weight. Raises UsageError if it cannot be divided so."""
        groups, shape = self.shared.quantize_groups, part.shape
        if torch.Size(shape).numel() % groups or (part.box is not None and shape[0] % groups):
            what = "elements" if part.box is None else "rows in the first dimension, with tensor parallelism"
            raise UsageError(
                f"compression_training.weight_quantization.shared_parameters.quantize_groups = {groups} does not "
                f"divide {self.name!r} of shape {list(shape)}: it has to divide the number of {what}"
            )
        if part.box is None:
            return Scales(groups)
        group: Any = module.group
        rows = torch.cat([torch.arange(first, end, device=device) for first, end in ranges(part.box)[0]])
        gather = functools.partial(_gathered, group=group, groups=groups, name=self.name)
        return Scales(groups, rows // (shape[0] // groups), gather)


def _gathered(own: torch.Tensor, group: Any, groups: int, name: str) -> torch.Tensor:
    return together(own, group, [groups] * group.size, 0, f"{name}.scales").view(group.size, groups)


@dataclass
class InputQuantizer:
    """Quantization of the inputs of a module. Static bounds are in the module's buffer `input_bounds`."""

    bits: int
    symmetric: bool
    static: bool
    begins: int
    images: bool
    seen: torch.Tensor | None = None
    """Smallest and largest input of this rank since the last step, in training."""

    def attach(self, module: nn.Module) -> None:
        """Add the buffer of static bounds; NaN: unknown."""
        if self.static:
            weight = module.get_parameter("weight")
            device = torch.device("cpu") if weight.is_meta else weight.device
            bounds = torch.full((2,), float("nan"), dtype=torch.float32, device=device)
            module.register_buffer("input_bounds", bounds)

    def __call__(self, module: nn.Module, inputs: torch.Tensor, step: int, *, note: bool) -> torch.Tensor:
        """Return quantized inputs. Until static bounds are known, those of the inputs are taken.

        `note`: the bounds follow the inputs of this call.
        """
        if not inputs.numel():  # of an expert without tokens, or a rank without a part of the sequence
            return inputs
        bounds = None
        if self.static:
            here = torch.stack(torch.aminmax(inputs.detach())).float()
            if note and module.training:
                seen = here if self.seen is None else self.seen
                self.seen = torch.stack([torch.minimum(seen[0], here[0]), torch.maximum(seen[1], here[1])])
            bounds = module.get_buffer("input_bounds")
            bounds = torch.where(bounds.isnan(), here.to(bounds.dtype), bounds)
        if step < self.begins:
            return inputs
        return quantized_inputs(
            inputs, self.bits, symmetric=self.symmetric, bounds=bounds, dim=1 if self.images else -1
        )

    def update(self, module: nn.Module, seen: torch.Tensor) -> None:
        """Move the bounds to those of all ranks in a step, (2,); NaN: no rank has called the module."""
        bounds = module.get_buffer("input_bounds")
        moved = torch.where(bounds.isnan(), seen, MOMENTUM * bounds.float() + (1 - MOMENTUM) * seen)
        bounds.copy_(torch.where(seen.isnan(), bounds, moved))
        self.seen = None


@dataclass
class Clock:
    """The step of a model's schedules, which all its modules share."""

    step: int = 0


@dataclass
class Compressed:
    """Compression of one module.

    Attributes:
        own: masks of the module's weight, by method.
        others: masks of another module that apply to this one's parameters (normalization of pruned channels).
        cleaned: True once compression is permanent, and no step changes it.
    """

    name: str
    module: nn.Module
    clock: Clock
    weights: WeightQuantizer | None = None
    inputs: InputQuantizer | None = None
    own: dict[str, Mask] = field(default_factory=dict)
    others: list[tuple[nn.Module, Mask]] = field(default_factory=list)
    called: bool = False
    cleaned: bool = False
    handles: list[Any] = field(default_factory=list)

    def install(self) -> None:
        """Register the hooks: within those of an engine, which come first and last."""
        before, after = _Before(self), _After(self)
        self.handles = [
            self.module.register_forward_pre_hook(before, with_kwargs=True),
            self.module.register_forward_hook(after, prepend=True, always_call=True),
            self.module.register_load_state_dict_post_hook(_Loaded(self)),
        ]

    def remove(self) -> None:
        """Remove the hooks; inputs that are quantized stay so."""
        for handle in self.handles:
            handle.remove()
        self.weights, self.own, self.others, self.handles, self.cleaned = None, {}, [], [], True
        if self.inputs is not None:
            self.install()

    def values(self, module: nn.Module, key: str, step: int) -> torch.Tensor | None:
        """Return what the module, or a copy of it, computes with instead of a parameter ("weight" or "bias"); None: the
        parameter.
        """
        parameter = module._parameters.get(key)
        if parameter is None:
            return None
        values: torch.Tensor = parameter
        part = part_for(parameter, self.module.get_parameter(key))
        for holder, mask in itertools.chain(((module, mask) for mask in self.own.values()), self.others):
            of_bias = key == "bias" and mask.method in ("row", "channel")
            if (step >= mask.begins or mask.fixed) and (key == "weight" or of_bias):
                along = 0 if of_bias or holder is not module else None
                values = values * mask.values(holder, parameter.dim(), part.box, along)
        if key == "weight" and self.weights is not None:
            values = self.weights(module, values, part, step)
        return None if values is parameter else values


class _Before:
    """Hides parameters, and quantizes the input."""

    def __init__(self, compressed: Compressed) -> None:
        self.compressed = compressed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compressed, step = self.compressed, self.compressed.clock.step
        compressed.called = True
        for key in ("weight", "bias"):
            values = compressed.values(module, key, step)
            if values is not None:
                module.__dict__[key] = values
        if compressed.inputs is None:
            return None
        own = module is compressed.module
        if args:
            return (compressed.inputs(module, args[0], step, note=own), *args[1:]), kwargs
        return args, {**kwargs, "input": compressed.inputs(module, kwargs["input"], step, note=own)}


class _After:
    """Shows the parameters again."""

    def __init__(self, compressed: Compressed) -> None:
        self.compressed = compressed

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        module.__dict__.pop("weight", None)
        module.__dict__.pop("bias", None)


class _Loaded:
    """Reads which masks a state dict has decided."""

    def __init__(self, compressed: Compressed) -> None:
        self.compressed = compressed

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for mask in self.compressed.own.values():
            mask.read(module)


def scheduled(model: nn.Module) -> list[str]:
    """Return the names of the modules whose compression follows a schedule, as of `init_compression`."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook.compressed.name for hook in hooks if isinstance(hook, _Before) and not hook.compressed.cleaned]
