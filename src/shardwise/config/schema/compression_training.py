"""Section of model compression: quantization-aware training, pruning and layer reduction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from shardwise.errors import ConfigError, ConflictError

from .base import At, ConfigSection, Contradictions, Int, Ints, Names, Strings, key, section
from .tables import with_unused_keys

_PATTERNS = (
    "Modules of the group: regular expressions that are searched in their names (embeddings, too); `*`: all linear "
    "layers and convolutions."
)
_START = "First step (`global_steps`) with the method."
_SNIP = (
    'is "snip_momentum", whose scores need the whole gradient of each step on every rank; write "topk", which learns '
    'scores by their gradients, or "l1"'
)
Ratio = Annotated[float, Field(gt=0, le=1)]


class Group(ConfigSection):
    """A group of modules: what is common to all methods."""

    modules: Names = key(["*"], _PATTERNS)
    related_modules: list[Strings] | None = key(
        None,
        "For each pattern of `modules`, patterns of the modules that lose inputs or outputs with it when the model is "
        "cleaned; each finds the module nearest in the model.",
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield patterns that are no regular expressions, and lists of different lengths."""
        related = self.related_modules or []
        for name, patterns in (("modules", self.modules), *(("related_modules", some) for some in related)):
            for pattern in patterns:
                try:
                    re.compile("" if pattern == "*" else pattern)
                except re.error as error:
                    message = f"has {pattern!r}, which is no regular expression ({error}); a part of a name is one"
                    yield name, message, ConfigError
        if related and len(related) != len(self.modules):
            message = f"has {len(related)} lists, and {at('modules')} {len(self.modules)} patterns; write one for each"
            yield "related_modules", message, ConfigError


class WeightQuantizationParams(ConfigSection):
    """`params` of a group of `weight_quantization`."""

    doubles: ClassVar[bool] = False
    """True if the period doubles with each bit."""

    start_bits: Int = key(8, "Bits at `schedule_offset`.", ge=1, le=16)
    target_bits: Int = key(8, "Bits in the end. Symmetric weights of 1 bit are binary, of 2 ternary.", ge=1, le=16)
    quantization_period: Int = key(1, "Steps until there is one bit less.", ge=0)

    def contradictions(self, at: At) -> Contradictions:
        """Yield bits that would grow."""
        yield from self.ordered("target_bits", "start_bits", at)


class ActivationQuantizationParams(ConfigSection):
    """`params` of a group of `activation_quantization`."""

    bits: Int = key(8, "Bits of the inputs.", ge=4, le=16)


class PruningParams(ConfigSection):
    """`params` of a group of a pruning method."""

    dense_ratio: Ratio = key(0.5, "Part that is kept.")


class WeightQuantizationGroup(Group):
    """A group of `weight_quantization`."""

    params: WeightQuantizationParams = section(WeightQuantizationParams, "Values of the group.")


class ActivationQuantizationGroup(Group):
    """A group of `activation_quantization`."""

    params: ActivationQuantizationParams = section(ActivationQuantizationParams, "Values of the group.")


class PruningGroup(Group):
    """A group of a pruning method."""

    params: PruningParams = section(PruningParams, "Values of the group.")


class MixedQuantize(ConfigSection):
    """`fp16_mixed_quantize`: a mean of the weight and the quantized weight."""

    enabled: bool = key(False, "Use a mean, in which the quantized weight counts more each step, up to 1.")
    quantize_change_ratio: float = key(
        0.001, "What it counts when the bits have changed, and how much more each step.", gt=0, le=1
    )


class Shared(ConfigSection):
    """`shared_parameters`: what is common to all methods."""

    enabled: bool = key(False, "Use the method.")
    schedule_offset: Int = key(1000, _START, ge=0)


@with_unused_keys
class WeightQuantizationShared(Shared):
    """`shared_parameters` of `weight_quantization`."""

    schedule_offset: Int = key(0, _START, ge=0)
    quantize_groups: Int = key(1, "Groups of consecutive elements of a weight, each with a scale.", gt=0)
    quantize_verbose: bool = key(False, "Log changes of the number of bits.")
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Levels around 0, or from min to max.")
    rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "Stochastic: up or down at random, equal on all ranks and by step."
    )
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "A mean of weight and quantized weight.")


class ActivationQuantizationShared(Shared):
    """`shared_parameters` of `activation_quantization`."""

    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Levels around 0, or from min to max.")
    range_calibration: Literal["dynamic", "static"] = key(
        "dynamic",
        "Range of each token (vectors of the last dimension) or image; or a moving mean over training steps and ranks.",
        default_note="dynamic in DeepSpeed's code, static in its documentation",
    )


@with_unused_keys
class SparsePruningShared(Shared):
    """`shared_parameters` of `sparse_pruning`."""

    method: Literal["l1", "topk", "snip_momentum"] = key(
        "l1", "Elements are kept by size at `schedule_offset`, or by scores that are trained (movement pruning)."
    )
    excluded_modules: Strings = key([], "Patterns of modules that are not pruned.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield the method that is refused."""
        if self.enabled and self.method == "snip_momentum":
            yield "method", _SNIP, ConfigError


class StructuredPruningShared(Shared):
    """`shared_parameters` of `row_pruning` and `channel_pruning`."""

    method: Literal["l1", "topk"] = key(
        "l1", "Kept by size at `schedule_offset`, or by scores that are trained (movement pruning)."
    )


class HeadPruningShared(Shared):
    """`shared_parameters` of `head_pruning`."""

    method: Literal["topk", "l1"] = key(
        "topk", "Kept by size at `schedule_offset`, or by scores that are trained (movement pruning)."
    )
    num_heads: Int | None = key(None, "Heads of a layer; required.", gt=0)

    def contradictions(self, at: At) -> Contradictions:
        """Yield the absence of the number of heads."""
        if self.enabled and self.num_heads is None:
            yield "num_heads", "is missing; give the number of heads of the model's layers", ConfigError


class Method(ConfigSection):
    """A method: shared parameters, and groups of modules."""

    def contradictions(self, at: At) -> Contradictions:
        """Yield the absence of groups."""
        method: Any = self
        if method.shared_parameters.enabled and not method.different_groups:
            message = 'is empty; name a group of modules: {"group": {"params": {...}, "modules": ["*"]}}'
            yield "different_groups", message, ConfigError


_GROUPS = "Groups of modules by any name."


class QuantizedWeights(Method):
    """`compression_training.weight_quantization`: weights are rounded to few levels where they are used."""

    shared_parameters: WeightQuantizationShared = section(WeightQuantizationShared, "Values of all groups.")
    different_groups: dict[str, WeightQuantizationGroup] = key({}, _GROUPS)


class QuantizedInputs(Method):
    """`compression_training.activation_quantization`: inputs of modules are rounded to few levels."""

    shared_parameters: ActivationQuantizationShared = section(ActivationQuantizationShared, "Values of all groups.")
    different_groups: dict[str, ActivationQuantizationGroup] = key({}, _GROUPS)


class SparsePruning(Method):
    """`compression_training.sparse_pruning`: single elements of weights are 0."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "Values of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, _GROUPS)


class RowPruning(Method):
    """`compression_training.row_pruning`: outputs of linear layers are removed."""

    shared_parameters: StructuredPruningShared = section(StructuredPruningShared, "Values of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, _GROUPS)


class HeadPruning(Method):
    """`compression_training.head_pruning`: heads of attention are removed; modules are output projections."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "Values of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, _GROUPS)


class ChannelPruning(Method):
    """`compression_training.channel_pruning`: output channels of convolutions are removed."""

    shared_parameters: StructuredPruningShared = section(StructuredPruningShared, "Values of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, _GROUPS)


class LayerReduction(ConfigSection):
    """`compression_training.layer_reduction`: a student begins with some layers of its teacher."""

    enabled: bool = key(False, "Copy the layers; `init_compression(teacher_model=...)` does.")
    keep_number_layer: Int | None = key(None, "Layers of the student; with `module_name_prefix`.", gt=0)
    module_name_prefix: str | None = key(None, "Name of the list of layers, in both models.", min_length=1)
    teacher_layer: Ints | None = key(None, "Numbers, from 0, of the teacher's layers, in order.")
    other_module_name: Strings = key([], "Names of modules that are copied as they are.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield absent keys, and another number of layers."""
        if not self.enabled:
            return
        of_layers: Sequence[str] = ("module_name_prefix", "teacher_layer", "keep_number_layer")
        if not self.other_module_name or any(getattr(self, name) is not None for name in of_layers):
            for name in of_layers:
                if getattr(self, name) is None:
                    yield name, f"is missing; {type(self).model_fields[name].description}", ConfigError
        if None not in (self.teacher_layer, self.keep_number_layer):
            found = len(self.teacher_layer or ())
            if found != self.keep_number_layer:
                message = f"has {found} layers, and {at('keep_number_layer')} is {self.keep_number_layer}"
                yield "teacher_layer", message, ConflictError


class CompressionTraining(ConfigSection):
    """`compression_training`: a model that becomes smaller while it is trained."""

    weight_quantization: QuantizedWeights = section(QuantizedWeights, "Rounded weights.")
    activation_quantization: QuantizedInputs = section(QuantizedInputs, "Rounded inputs of modules.")
    sparse_pruning: SparsePruning = section(SparsePruning, "Elements of weights.")
    row_pruning: RowPruning = section(RowPruning, "Outputs of linear layers.")
    head_pruning: HeadPruning = section(HeadPruning, "Heads of attention.")
    channel_pruning: ChannelPruning = section(ChannelPruning, "Channels of convolutions.")
    layer_reduction: LayerReduction = section(LayerReduction, "Layers from a teacher.")

    @property
    def methods(self) -> dict[str, Any]:
        """The methods that are switched on, by name, without layer reduction."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "layer_reduction"}
        return {name: method for name, method in named.items() if method.shared_parameters.enabled}

    @property
    def enabled(self) -> bool:
        """True if any method is switched on."""
        return bool(self.methods) or self.layer_reduction.enabled


# -- MoQ ---------------------------------------------------------------------------------------------------------------


class _DoublingPeriod(WeightQuantizationParams):
    doubles: ClassVar[bool] = True


class QuantizeBits(ConfigSection):
    """`quantize_training.quantize_bits`."""

    start_bits: Int = key(16, "Bits at `schedule_offset`.", ge=1, le=16)
    target_bits: Int = key(8, "Bits in the end.", ge=1, le=16)

    contradictions = WeightQuantizationParams.contradictions


class QuantizeSchedule(ConfigSection):
    """`quantize_training.quantize_schedule`."""

    quantize_period: Int = key(100, "Steps until there is one bit less; twice as many with each bit.", gt=0)
    schedule_offset: Int = key(100, _START, ge=0)


@with_unused_keys
class QuantizeEigenvalue(ConfigSection):
    """`quantize_training.eigenvalue`: periods by eigenvalues of layers."""

    enabled: bool = key(False, "Longer periods for layers with larger eigenvalues.")


@with_unused_keys
class QuantizeTraining(ConfigSection):
    """`quantize_training`: the older form of `compression_training.weight_quantization` (MoQ), for all layers."""

    enabled: bool = key(False, "Quantize the weights of all linear layers and convolutions.")
    quantize_verbose: bool = key(False, "Log changes of the number of bits.")
    quantize_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Levels around 0, or from min to max.")
    quantize_bits: QuantizeBits = section(QuantizeBits, "First and last number of bits.")
    quantize_schedule: QuantizeSchedule = section(QuantizeSchedule, "When bits fall.")
    quantize_groups: Int = key(1, "Groups of consecutive elements of a weight, each with a scale.", gt=0)
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "A mean of weight and quantized weight.")
    eigenvalue: QuantizeEigenvalue = section(QuantizeEigenvalue, "Periods by eigenvalues.")

    @property
    def method(self) -> QuantizedWeights:
        """The same as a method of `compression_training`."""
        bits, schedule = self.quantize_bits, self.quantize_schedule
        shared = WeightQuantizationShared(
            enabled=True,
            schedule_offset=schedule.schedule_offset,
            quantize_groups=self.quantize_groups,
            quantize_verbose=self.quantize_verbose,
            quantization_type=self.quantize_type,
            fp16_mixed_quantize=self.fp16_mixed_quantize,
        )
        params = _DoublingPeriod(
            start_bits=bits.start_bits, target_bits=bits.target_bits, quantization_period=schedule.quantize_period
        )
        group = WeightQuantizationGroup.model_construct(modules=["*"], related_modules=None, params=params)
        return QuantizedWeights.model_construct(shared_parameters=shared, different_groups={"quantize_training": group})
