"""The ends of compression: a model initialized from its teacher, and a model that is smaller for good."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from shardwise.compression.compress import NORMS, SECTION, Compression, section_of
from shardwise.compression.modules import is_convolution, is_linear, outputs_dim
from shardwise.errors import ConfigError, UsageError
from shardwise.zero.parameters.gathered import GatheredParameters
from shardwise.zero.units.released import owner_of

_SIZES = {
    "outputs": ("out_features", "nf", "out_channels", "num_features"),
    "inputs": ("in_features", "nx", "in_channels"),
}
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "heads")
_WIDTHS = ("all_head_size", "embed_dim", "inner_dim")


def init_compression(model: nn.Module, config: Any, teacher_model: nn.Module | None = None) -> Any:
    """Prepare a model for compression, and return it; before `shardwise.initialize`, which then has the same section.

    Weights keep their names, shapes and identity. Layers compute with masked and quantized values, with the straight
    gradient. Their hooks see a weight that is used by calling its module; other uses get the weight itself. Effective
    weights are kept for the backward pass like activations: with ZeRO stage 3 use activation checkpointing.

    Args:
        model: the model.
        config: as of `shardwise.initialize`; only `compression_training` is read.
        teacher_model: for `layer_reduction`.

    Raises:
        ConfigError: the section is absent or wrong, a pattern matches no module, or values do not fit the model.
        UsageError: the model is prepared already, or `layer_reduction` has no teacher.

    Example:
        >>> import torch
        >>> from shardwise.compression import init_compression
        >>> group = {"params": {"start_bits": 1, "target_bits": 1}, "modules": ["*"]}
        >>> method = {"shared_parameters": {"enabled": True}, "different_groups": {"all": group}}
        >>> config = {"compression_training": {"weight_quantization": method}}
        >>> layer = init_compression(torch.nn.Linear(2, 1, bias=False), config)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, -3.0]]))
        >>> layer(torch.tensor([1.0, 0.0])).item()
        2.0
    """
    section = section_of(config)
    if Compression.of(model) is not None:
        raise UsageError("init_compression(): the model is prepared already")
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise UsageError(f"init_compression(): {SECTION}.layer_reduction needs teacher_model=...")
        student_initialization(model, teacher_model, section)
    compression = Compression.start(model, section)
    compression.reduced = section.layer_reduction.enabled
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, config: Any) -> nn.Module:
    """Copy layers and modules of a teacher, as `compression_training.layer_reduction` says; return the student.

    Both models may be divided by `shardwise.zero.Init` or an engine; all ranks call.

    Raises ConfigError for modules that are absent or have other shapes, and for another number of layers.
    """
    reduction = section_of(config).layer_reduction
    path = f"{SECTION}.layer_reduction"
    names = {name: name for name in reduction.other_module_name}
    if reduction.module_name_prefix is not None:
        prefix = reduction.module_name_prefix
        layers = len(list(_module(student_model, prefix, f"{path}.module_name_prefix", "student").children()))
        if layers != reduction.keep_number_layer:
            kept = reduction.keep_number_layer
            raise ConfigError(f"{path}.keep_number_layer: is {kept}, and the student has {layers} layers")
        names |= {f"{prefix}.{at}": f"{prefix}.{number}" for at, number in enumerate(reduction.teacher_layer or ())}
    for to, of in names.items():
        target = _tensors(_module(student_model, to, path, "student"))
        source = _tensors(_module(teacher_model, of, path, "teacher"))
        for name in sorted({*target, *source}):
            shapes = [tuple(found[name].shape) if name in found else None for found in (target, source)]
            if shapes[0] != shapes[1]:
                raise ConfigError(f"{path}: {to}.{name} of the student is {shapes[0]}, {of}.{name} is {shapes[1]}")
        for name, tensor in target.items():
            with torch.no_grad(), GatheredParameters([source[name]]), GatheredParameters([tensor], modifier_rank=0):
                tensor.copy_(source[name])
    return student_model


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _module(model: nn.Module, name: str, path: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(f"{path}: the {whose} has no module {name!r} ({error})") from error


@torch.no_grad()
def redundancy_clean(model: nn.Module, config: Any) -> Any:
    """Make compression permanent, and return the model, as after the last step of the schedule.

    Weights become their quantized and masked values. Rows, heads and channels that are pruned are removed, with inputs
    of `related_modules`; without these they stay as zeros. Outputs stay equal, if functions between the layers map 0 to
    0. Inputs that are quantized stay so. Masks that have not begun are taken from the present weights.

    Args:
        model: prepared by `init_compression`, wholly or in part, and trained; or another model, which is prepared here.
        config: as of `init_compression`, with the same section.

    Raises:
        UsageError: an engine owns the parameters (call `engine.destroy()` before), or layers cannot be made smaller.
        ConfigError: as `init_compression`; or the section is another one.
    """
    if any(owner_of(parameter) is not None for parameter in model.parameters()):
        raise UsageError("redundancy_clean(): the parameters belong to an engine. Call engine.destroy() before")
    section = section_of(config)
    before = Compression.of(model)
    compression = before or Compression.start(model, section)
    prefix = compression.prefix(model)
    if compression.section != section:
        raise ConfigError(f"{SECTION}: init_compression() was called with another section than redundancy_clean()")
    try:
        compression.advance(max(compression.step, compression.last_step))
        _check_shared(model, compression)
    except BaseException:
        if before is None:
            compression.remove(model, inputs=True)
        raise
    for one in compression.modules.values():
        for key in ("weight", "bias"):
            values = one.values(one.module, key, compression.step)
            if values is not None:
                one.module.get_parameter(key).copy_(values)
    for one in compression.modules.values():
        for kind, mask in one.own.items():
            related = [
                (prefix + name, other) for name, other in compression.related.get((one.name, f"{kind}_pruning"), ())
            ]
            if related and mask.parts:
                kept = mask.kept(one.module).nonzero().flatten()
                _Cleaner(model, prefix + one.name, kept, mask.parts).clean(one.module, kind, related)
    compression.remove(model, inputs=False)
    return model


def _check_shared(model: nn.Module, compression: Compression) -> None:
    """Raise UsageError if modules that share a parameter compute with different values of it."""
    names: dict[nn.Parameter, list[tuple[str, str]]] = {}
    prefix = compression.prefix(model)
    compressed = {prefix + name: one for name, one in compression.modules.items()}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append((name, key))
    for parameter, places in names.items():
        found = []
        for name, key in places if len(places) > 1 else ():
            one = compressed.get(name)
            values = None if one is None else one.values(one.module, key, compression.step)
            found.append(parameter if values is None else values)
        other = next((at for at, values in enumerate(found) if not torch.equal(values, found[0])), None)
        if other is not None:
            first, second = (".".join(places[at]) for at in (0, other))
            raise UsageError(
                f"redundancy_clean(): {first} and {second} are one parameter, and compression gives them different "
                "values. Untie them before compression, or leave both out of `modules`"
            )


class _Cleaner:
    """Removes the parts of a module that are not `kept`, of `parts`, and what belongs to them."""

    def __init__(self, model: nn.Module, name: str, kept: torch.Tensor, parts: int) -> None:
        self.model, self.name, self.kept, self.parts = model, name, kept, parts

    def clean(self, module: nn.Module, kind: str, related: list[tuple[str, nn.Module]]) -> None:
        if kind == "head":
            width = self._keep(self.name, module, "inputs")
            for name, other in related:
                if self._size(other, "outputs") != width:
                    raise UsageError(
                        f"redundancy_clean(): {name!r} has {self._size(other, 'outputs')} outputs, and {self.name!r} "
                        f"{width} inputs: heads can be removed from separate queries, keys and values of one size"
                    )
                self._keep(name, other, "outputs")
            self._set_heads([self.name, *(name for name, _ in related)], width)
            return
        self._keep(self.name, module, "outputs")
        for name, other in related:
            self._keep(name, other, "outputs" if isinstance(other, NORMS) else "inputs")

    def _size(self, module: nn.Module, side: str) -> int:
        first = outputs_dim(module)
        return int(module.get_parameter("weight").shape[first if side == "outputs" else 1 - first])

    def _keep(self, name: str, module: nn.Module, side: str) -> int:
        """Keep the parts in the outputs or inputs of a module, and return the size before."""
        norm = isinstance(module, NORMS)
        if not norm and not is_linear(module) and not is_convolution(module):
            raise UsageError(f"redundancy_clean(): {name!r} is a {type(module).__name__}, which cannot be made smaller")
        if getattr(module, "groups", 1) != 1:
            raise UsageError(f"redundancy_clean(): {name!r} is a convolution with groups; leave it out")
        size = len(module.running_mean) if norm else self._size(module, side)  # type: ignore[arg-type]
        if size % self.parts:
            raise UsageError(
                f"redundancy_clean(): {name!r} has {size} {side}, no multiple of {self.parts} parts of {self.name!r}"
            )
        each = size // self.parts
        index = (self.kept.unsqueeze(1) * each + torch.arange(each, device=self.kept.device)).flatten()
        dims = {"weight": 0 if norm or side == "outputs" else 1}
        if not norm and outputs_dim(module):
            dims["weight"] = 1 - dims["weight"]
        if norm or side == "outputs":
            dims["bias"] = 0
        for key, dim in dims.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                holders = [m for m in self.model.modules() if any(p is parameter for p in m._parameters.values())]
                if len(holders) > 1:
                    raise UsageError(f"redundancy_clean(): {name}.{key} is shared with another module; untie it before")
                made = parameter.index_select(dim, index).clone()
                setattr(module, key, nn.Parameter(made, requires_grad=parameter.requires_grad))
        for key in ("running_mean", "running_var") if norm else ():
            if module._buffers.get(key) is not None:
                setattr(module, key, module.get_buffer(key)[index].clone())
        for attribute in _SIZES[side]:
            if hasattr(module, attribute):
                setattr(module, attribute, len(index))
        return size

    def _set_heads(self, names: list[str], width: int) -> None:
        """Set the numbers that attention modules reshape with."""
        common = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*(n.split(".") for n in names)))  # noqa: B905
        ancestor = self.model.get_submodule(".".join(words[0] for words in common))
        count = len(self.kept)
        for module in ancestor.modules():
            for attributes, before, after in (
                (_HEADS, self.parts, count),
                (_WIDTHS, width, width // self.parts * count),
            ):
                for attribute in attributes:
                    if vars(module).get(attribute) == before:
                        setattr(module, attribute, after)
