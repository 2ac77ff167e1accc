"""The start of compression, by the section `compression_training`, and its schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compression.masks import Mask
from shardwise.compression.modules import (
    Clock,
    Compressed,
    InputQuantizer,
    WeightQuantizer,
    is_compressible,
    is_convolution,
    is_linear,
    outputs_dim,
    part_for,
)
from shardwise.config import resolve
from shardwise.config.read import read
from shardwise.config.schema.compression_training import CompressionTraining
from shardwise.device import numbers_on
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.registry import part_of
from shardwise.utils.logging import logger, warn_once
from shardwise.zero.parameters.gathered import GatheredParameters

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema.compression_training import Group

SECTION = "compression_training"
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ATTRIBUTE = "_shardwise_compression"
_KINDS: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "weight_quantization": (is_compressible, "linear layer, convolution or embedding"),
    "activation_quantization": (lambda m: is_linear(m) or is_convolution(m), "linear layer or convolution"),
    "sparse_pruning": (is_compressible, "linear layer, convolution or embedding"),
    "row_pruning": (is_linear, "linear layer"),
    "head_pruning": (is_linear, "linear layer"),
    "channel_pruning": (is_convolution, "convolution"),
}


def section_of(config: Any) -> CompressionTraining:
    """Return the section of a configuration (anything that `initialize` takes). Raises ConfigError as `initialize`, and
    without the section.
    """
    if isinstance(config, CompressionTraining):
        return config
    document = read(config)
    source = {name: document.data[name] for name in (SECTION, "quantize_training") if name in document.data}
    if not source:
        raise ConfigError(f"{document.origin}: there is no section `{SECTION}`, which says how to compress the model")
    return resolve({**source, "train_micro_batch_size_per_gpu": 1}).config.compression_methods


def nearest(name: str, pattern: str, model: nn.Module) -> tuple[str, nn.Module]:
    """Return the module that a pattern of `related_modules` finds for a module: of all matches the one with the longest
    common part of the name. Raises ConfigError without a match, or with several.
    """
    own = name.split(".")

    def common(other: str) -> int:
        pairs = zip(own, other.split("."), strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), len(own))

    found = [(other, m) for other, m in model.named_modules() if re.search(pattern, other) and other != name]
    most = max((common(other) for other, _ in found), default=0)
    best = [pair for pair in found if common(pair[0]) == most]
    if len(best) != 1:
        what = ", ".join(other for other, _ in best[:4]) or "no module"
        raise ConfigError(
            f"{SECTION}: related_modules {pattern!r} has to name one module next to {name!r}, and finds {what}"
        )
    return best[0]


class Compression:
    """Compression of one model: its modules and its schedule. An engine advances it with its steps.

    Attributes:
        section: the section of the configuration.
        modules: the compressed modules by name.
        related: name and method of a module -> names and modules that are cleaned with it.
        reduced: True once layers of a teacher have been copied.
    """

    def __init__(self, section: CompressionTraining) -> None:
        self.section = section
        self.clock = Clock()
        self.modules: dict[str, Compressed] = {}
        self.related: dict[tuple[str, str], list[tuple[str, nn.Module]]] = {}
        self.reduced = False
        self._bits: dict[str, int] = {}

    @staticmethod
    def of(model: nn.Module) -> Compression | None:
        """Return the compression of a model, or of a part of it; None without. Raises UsageError for several parts."""
        found = {name: module for name, module in model.named_modules() if ATTRIBUTE in vars(module)}
        if len(found) > 1:
            raise UsageError(
                f"init_compression() has prepared {len(found)} parts of the model ({', '.join(map(repr, found))}). "
                "Prepare the whole model once, or end the compression of the others with redundancy_clean()"
            )
        return next((vars(module)[ATTRIBUTE] for module in found.values()), None)

    def prefix(self, model: nn.Module) -> str:
        """Return what precedes this compression's names in those of a model, a part of which it may be of."""
        names = (name for name, module in model.named_modules() if vars(module).get(ATTRIBUTE) is self)
        return f"{name}." if (name := next(names, "")) else ""

    @classmethod
    def start(cls, model: nn.Module, section: CompressionTraining) -> Compression:
        """Install what a section says on a model.

        Raises ConfigError for patterns that match no module, and values that do not fit the model.
        """
        compression = cls(section)
        try:
            for method, settings in section.methods.items():
                for name, group in settings.different_groups.items():
                    compression._add(model, method, settings.shared_parameters, name, group)
        except BaseException:
            compression.remove(model, inputs=True)
            raise
        for compressed in compression.modules.values():
            compressed.install()
        setattr(model, ATTRIBUTE, compression)
        return compression

    def remove(self, model: nn.Module, *, inputs: bool) -> None:
        """Remove masks and hooks from the model; quantization of inputs stays without `inputs`."""
        for one in self.modules.values():
            for mask in one.own.values():
                delattr(one.module, mask.key)
            if inputs:
                one.module._buffers.pop("input_bounds", None)
                one.inputs = None
            one.remove()
        for module in model.modules():
            vars(module).pop(ATTRIBUTE, None)

    @property
    def step(self) -> int:
        """The step of the schedules."""
        return self.clock.step

    @property
    def last_step(self) -> int:
        """First step from which the schedules change nothing."""
        found = [0]
        for one in self.modules.values():
            found += [mask.begins for mask in one.own.values()]
            found += [one.weights.last_step()] if one.weights is not None else []
            found += [one.inputs.begins] if one.inputs is not None else []
        return max(found)

    def advance(self, step: int, ranks: Communicator | None = None) -> None:
        """Set the step: decide masks that begin, and move static bounds of inputs to those of all ranks.

        All ranks call it between steps; an engine does. `ranks`: those that have run the model; None: this process.
        """
        self._warn_of_unused(step)
        self.clock.step = step
        for one in self.modules.values():
            for mask in one.own.values():
                if step >= mask.begins and not mask.decided:
                    mask.read(one.module)  # a script may have filled the buffer
                if step >= mask.begins and not mask.decided:
                    weight = one.module.get_parameter("weight")
                    with GatheredParameters(weight):
                        mask.decide(one.module, weight)
        self._move_bounds(ranks)
        self._log_bits(step)

    def share(self, ranks: Communicator) -> None:
        """Take over masks that the first rank has loaded, as parameters are taken over from it (all ranks call)."""
        own = [(mask, one.module) for one in self.modules.values() for mask in one.own.values() if not mask.learned]
        if not own:
            return
        buffers = [module.get_buffer(mask.key).view(torch.uint8) for mask, module in own]
        flat = torch.cat(buffers)
        ranks.broadcast(flat, 0, "masks").wait()
        for (mask, module), buffer, values in zip(own, buffers, flat.split([len(b) for b in buffers]), strict=True):
            buffer.copy_(values)
            mask.read(module)

    def loaded(self, step: int, names: Collection[str], ranks: Communicator | None = None) -> None:
        """Go on at the step of loaded state; `names` of parameters and buffers that were loaded.

        A mask is decided again if only its weight was loaded.
        """
        for one in self.modules.values():
            for mask in one.own.values():
                if f"{one.name}.weight" in names and f"{one.name}.{mask.key}" not in names:
                    mask.clear(one.module)
                mask.read(one.module)
        self.clock.step = step
        self.advance(step, ranks)

    def scores(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that were added to the model, by name."""
        for one in self.modules.values():
            for mask in one.own.values():
                if mask.learned:
                    yield f"{one.name}.{mask.key}", one.module.get_parameter(mask.key)

    def check_divided(self) -> None:
        """Raise UsageError for modules whose division over ranks would change results."""
        for one in self.modules.values():
            part, group = part_of(one.module.get_parameter("weight")), getattr(one.module, "group", None)
            if part.ranks is None:
                continue
            if group is None:
                raise UsageError(
                    f"{SECTION}: only some ranks have the weight of {one.name!r} (experts); leave it out of `modules`"
                )
            if any(mask.learned for mask in one.own.values()):
                raise ConflictError(
                    f"{SECTION}: {one.name!r} is divided by tensor parallelism, and scores of the method "
                    '"topk" are not; write "l1"'
                )
            split = getattr(one.module, "cut", None)
            if one.inputs is not None and not one.inputs.static and split is not None and split.kind == "row":
                raise ConflictError(
                    f"{SECTION}.activation_quantization: tensor parallelism divides the inputs of {one.name!r}, and "
                    'no rank knows their range; write `range_calibration` "static", or leave it out of `modules`'
                )
            if one.weights is not None:
                weight = one.module.get_parameter("weight")
                one.weights.scales(one.module, part_for(weight, weight), weight.device)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _add(self, model: nn.Module, method: str, shared: Any, group_name: str, group: Group) -> None:
        path = f"{SECTION}.{method}.different_groups.{group_name}"
        for number, pattern in enumerate(group.modules):
            found = list(_matches(model, method, pattern, getattr(shared, "excluded_modules", ())))
            if not found:
                kinds = _KINDS[method][1]
                known = [name for name, module in model.named_modules() if _KINDS[method][0](module)]
                raise ConfigError(
                    f"{path}.modules: {pattern!r} matches no {kinds}. The model has {', '.join(known[:6]) or 'none'}"
                    f"{f' and {len(known) - 6} more' if len(known) > 6 else ''}"
                )
            for name, module in found:
                self._compress(model, path, method, shared, group, name, module)
                patterns = group.related_modules[number] if group.related_modules else []
                self._relate(model, method, name, module, patterns)

    def _compress(
        self, model: nn.Module, path: str, method: str, shared: Any, group: Any, name: str, module: nn.Module
    ) -> None:
        one = self.modules.setdefault(name, Compressed(name, module, self.clock))
        weight = module.get_parameter("weight")
        shape = tuple(weight.shape)
        taken = {"weight_quantization": one.weights, "activation_quantization": one.inputs}
        if taken.get(method) is not None or method.removesuffix("_pruning") in one.own:
            raise ConfigError(f"{path}.modules: {name!r} is in another group of `{SECTION}.{method}`; keep one")
        if method == "weight_quantization":
            one.weights = WeightQuantizer(name, shared, group.params)
            one.weights.scales(module, part_for(weight, weight), weight.device)
            return
        if method == "activation_quantization":
            one.inputs = InputQuantizer(
                group.params.bits,
                shared.quantization_type == "symmetric",
                shared.range_calibration == "static",
                shared.schedule_offset,
                is_convolution(module),
            )
            one.inputs.attach(module)
            return
        dim = outputs_dim(module)
        kind = method.removesuffix("_pruning")
        if kind == "head":
            dim = 1 - dim
            if shape[dim] % shared.num_heads:
                raise ConfigError(
                    f"{SECTION}.head_pruning.shared_parameters.num_heads: {shared.num_heads} heads do not divide the "
                    f"{shape[dim]} inputs of {name!r}"
                )
        parts = {"sparse": 0, "head": getattr(shared, "num_heads", 0)}.get(kind, shape[dim])
        mask = Mask(kind, shared.method == "topk", group.params.dense_ratio, shared.schedule_offset, shape, parts, dim)
        if mask.learned and weight.is_meta:
            raise UsageError(
                f"{path}: scores of {name!r} begin as the sizes of its weight, which is on the meta device; build the "
                "model under shardwise.zero.Init instead"
            )
        with GatheredParameters([weight] if mask.learned else []):
            mask.attach(module, weight)
        one.own[kind] = mask

    def _relate(self, model: nn.Module, method: str, name: str, module: nn.Module, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            other_name, other = nearest(name, pattern, model)
            self.related.setdefault((name, method), []).append((other_name, other))
            if isinstance(other, NORMS) and method == "channel_pruning":
                # A normalized channel of zeros would be the bias.
                one = self.modules.setdefault(other_name, Compressed(other_name, other, self.clock))
                one.others.append((module, self.modules[name].own["channel"]))

    # -- schedule ------------------------------------------------------------------------------------------------------

    def _move_bounds(self, ranks: Communicator | None) -> None:
        static = [one for one in self.modules.values() if one.inputs is not None and one.inputs.static]
        if not static:
            return
        device = static[0].module.get_buffer("input_bounds").device
        nothing = numbers_on(device, [float("inf"), float("-inf")], torch.float32)
        signs = numbers_on(device, [-1.0, 1.0], torch.float32)
        found = torch.stack([nothing if (seen := one.inputs.seen) is None else seen for one in static])  # type: ignore[union-attr]
        if ranks is not None and ranks.world > 1:
            found = _largest((found * signs).flatten(), ranks, "input_bounds").view_as(found) * signs
        found = torch.where(found.isinf(), float("nan"), found)
        for one, seen in zip(static, found, strict=True):
            assert one.inputs is not None
            one.inputs.update(one.module, seen)

    def _log_bits(self, step: int) -> None:
        for one in self.modules.values():
            if one.weights is not None and one.weights.shared.quantize_verbose:
                now = one.weights.bits(step)
                if now is not None and self._bits.get(one.name) != now[0]:
                    self._bits[one.name] = now[0]
                    logger.info("step %d: the weight of %s is quantized to %d bits", step, one.name, now[0])

    def _warn_of_unused(self, step: int) -> None:
        unused = [one.name for one in self.modules.values() if not one.called]
        if step > self.step and unused:
            warn_once(
                f"{SECTION}: {len(unused)} modules have not been called ({', '.join(unused[:4])}): code that uses "
                "their weights without calling them gets the weights themselves, neither pruned nor quantized"
            )


def _largest(own: torch.Tensor, ranks: Communicator, label: str) -> torch.Tensor:
    """Return the largest numbers of all ranks, or NaN; the received bytes do not grow with the ranks."""
    given = nn.functional.pad(own, (0, -len(own) % ranks.world))
    parts, every = torch.empty_like(given), torch.empty_like(given)
    sizes = [len(given) // ranks.world] * ranks.world
    ranks.all_to_all(parts, given, sizes, sizes, label).wait()
    ranks.all_gather([(every, parts.view(ranks.world, -1).amax(0))], label, "explicit").wait()
    return every[: len(own)]


def _matches(
    model: nn.Module, method: str, pattern: str, excluded: Sequence[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    fits, _ = _KINDS[method]
    for name, module in model.named_modules():
        # Attention of torch reads this layer's weight, and does not call it.
        if not fits(module) or type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
            continue
        by_pattern = not isinstance(module, nn.Embedding) if pattern == "*" else re.search(pattern, name)
        if by_pattern and not any(re.search(other, name) for other in excluded):
            yield name, module


def compression_for(model: nn.Module, section: CompressionTraining) -> Compression | None:
    """Return the compression of a model that `initialize` was given: that of `init_compression`, or a new one.

    Raises:
        UsageError: `layer_reduction` needs a teacher, and `init_compression` was not called.
        ConflictError: `init_compression` was called with another section.
        ConfigError: as `init_compression`.
    """
    found = Compression.of(model)
    if section.layer_reduction.enabled and (found is None or not found.reduced):
        raise UsageError(
            f"{SECTION}.layer_reduction needs a teacher: call shardwise.compression.init_compression(model, config, "
            "teacher_model=teacher) before initialize()"
        )
    if found is not None and section.enabled and found.section != section:
        raise ConflictError(
            f"{SECTION}: init_compression() was called with another section than initialize(). Pass both the same"
        )
    return Compression.start(model, section) if found is None and section.enabled else found
