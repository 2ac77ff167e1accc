"""Model compression: quantization-aware training, pruning, layer reduction."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .base import ConfigSection, ExactInt, Int, Ints, Names, Strings, as_list, key, section

_Symmetry = Literal["symmetric", "asymmetric"]


class MixedQuantize(ConfigSection):
    """`fp16_mixed_quantize`: blend quantized and fp16 weights."""

    enabled: bool = key(False, "Blend.")
    quantize_change_ratio: float = key(0.001, "How fast the blend changes.", ge=0)


class WeightQuantShared(ConfigSection):
    """`compression_training.weight_quantization.shared_parameters`."""

    enabled: bool = key(False, "Quantize weights in training.")
    quantizer_kernel: bool = key(False, "Use the compiled kernel.")
    schedule_offset: Int = key(0, "First step.", ge=0)
    quantize_groups: Int = key(1, "Groups per tensor.", gt=0)
    quantize_verbose: bool = key(False, "Print what happens.")
    quantization_type: _Symmetry = key("symmetric", "Range of the codes.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "Rounding.")
    quantize_weight_in_forward: bool = key(False, "Quantize in forward (needed with an fp32 optimizer).")
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "Blend with fp16 weights.")


class ActivationQuantShared(ConfigSection):
    """`compression_training.activation_quantization.shared_parameters`."""

    enabled: bool = key(False, "Quantize activations.")
    quantization_type: _Symmetry = key("symmetric", "Range of the codes.")
    range_calibration: Literal["dynamic", "static"] = key("dynamic", "How the range is found.")
    schedule_offset: Int = key(1000, "First step.", ge=0)


class SparsePruningShared(ConfigSection):
    """`compression_training.sparse_pruning.shared_parameters`."""

    enabled: bool = key(False, "Prune single weights.")
    method: Literal["l1", "topk", "snip_momentum"] = key("l1", "Criterion.")
    schedule_offset: Int = key(1000, "First step.", ge=0)
    schedule_offset_end: Int | None = key(None, "Last step; null: the first.", ge=0)
    schedule_offset_stride: Int = key(1, "Steps between prunings.", gt=0)
    block_pattern: str = key("4x1", "Block shape (4x1) or n:m pattern (2:4).")
    dense_ratio: float = key(0.1, "Fraction that is kept.", gt=0, lt=1)
    excluded_modules: Strings = key([], "Modules that are not pruned.")


class RowPruningShared(ConfigSection):
    """`compression_training.row_pruning` and `channel_pruning`: `shared_parameters`."""

    enabled: bool = key(False, "Prune rows or channels.")
    method: Literal["l1", "topk"] = key("l1", "Criterion.")
    schedule_offset: Int = key(1000, "First step.", ge=0)


class HeadPruningShared(ConfigSection):
    """`compression_training.head_pruning.shared_parameters`."""

    enabled: bool = key(False, "Prune attention heads.")
    method: Literal["topk", "l1"] = key("topk", "Criterion.")
    schedule_offset: Int = key(1000, "First step.", ge=0)
    num_heads: Int | None = key(None, "Heads per layer. Required when enabled.", gt=0)


class WeightQuantParams(ConfigSection):
    """`params` of a weight-quantization group."""

    start_bits: Int | None = key(None, "Bits at first.", gt=0)
    target_bits: Int | None = key(None, "Bits at last.", gt=0)
    quantization_period: Int = key(1, "Steps per bit.", gt=0)


class ActivationQuantParams(ConfigSection):
    """`params` of an activation-quantization group."""

    bits: Int | None = key(None, "Bits.", ge=4)


class PruningParams(ConfigSection):
    """`params` of a pruning group."""

    dense_ratio: float | None = key(None, "Fraction that is kept.", gt=0, le=1)


class _Group(ConfigSection):
    modules: Names = key(["*"], "Names of modules; * matches all.")
    related_modules: Annotated[list[Any], BeforeValidator(as_list)] | None = key(
        None, "Modules whose inputs shrink with these."
    )


class WeightQuantGroup(_Group):
    """`different_groups.<name>` of weight quantization."""

    params: WeightQuantParams = section(WeightQuantParams, "Settings of the group.")


class ActivationQuantGroup(_Group):
    """`different_groups.<name>` of activation quantization."""

    params: ActivationQuantParams = section(ActivationQuantParams, "Settings of the group.")


class PruningGroup(_Group):
    """`different_groups.<name>` of pruning."""

    params: PruningParams = section(PruningParams, "Settings of the group.")


class WeightQuantTraining(ConfigSection):
    """`compression_training.weight_quantization`."""

    shared_parameters: WeightQuantShared = section(WeightQuantShared, "Settings of all groups.")
    different_groups: dict[str, WeightQuantGroup] = key({}, "Groups by name.")


class ActivationQuantTraining(ConfigSection):
    """`compression_training.activation_quantization`."""

    shared_parameters: ActivationQuantShared = section(ActivationQuantShared, "Settings of all groups.")
    different_groups: dict[str, ActivationQuantGroup] = key({}, "Groups by name.")


class SparsePruning(ConfigSection):
    """`compression_training.sparse_pruning`."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "Settings of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups by name.")


class RowPruning(ConfigSection):
    """`compression_training.row_pruning` and `channel_pruning`."""

    shared_parameters: RowPruningShared = section(RowPruningShared, "Settings of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups by name.")


class HeadPruning(ConfigSection):
    """`compression_training.head_pruning`."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "Settings of all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups by name.")


class LayerReduction(ConfigSection):
    """`compression_training.layer_reduction`: a student with fewer layers."""

    enabled: bool = key(False, "Reduce layers.")
    keep_number_layer: Int | None = key(None, "Layers of the student. Required when enabled.", gt=0)
    module_name_prefix: str | None = key(None, "Prefix of layer names. Required when enabled.")
    teacher_layer: Ints | None = key(None, "Teacher layers that initialise the student. Required when enabled.")
    other_module_name: Strings | None = key(None, "Other modules to copy. Required when enabled.")


class CompressionTraining(ConfigSection):
    """`compression_training`."""

    weight_quantization: WeightQuantTraining = section(WeightQuantTraining, "Quantized weights.")
    activation_quantization: ActivationQuantTraining = section(ActivationQuantTraining, "Quantized activations.")
    sparse_pruning: SparsePruning = section(SparsePruning, "Single weights removed.")
    row_pruning: RowPruning = section(RowPruning, "Rows removed.")
    head_pruning: HeadPruning = section(HeadPruning, "Attention heads removed.")
    channel_pruning: RowPruning = section(RowPruning, "Channels removed.")
    layer_reduction: LayerReduction = section(LayerReduction, "Layers removed.")


class QuantizedTensor(ConfigSection):
    """Settings of one quantized weight."""

    num_bits: Annotated[Literal[4, 8], ExactInt] = key(8, "Bits.")
    group_size: Int = key(512, "Elements per scale.", gt=0)
    group_dim: Int = key(0, "Dimension of the groups.", ge=0)
    symmetric: bool = key(False, "Symmetric range.")


class WeightQuantization(ConfigSection):
    """`weight_quantization` at top level: store weights quantized."""

    enabled: bool = key(True, "Quantize.")
    num_bits: Int = key(8, "Bits.", gt=0)
    q_type: _Symmetry = key("symmetric", "Range of the codes.")
    q_groups: Int = key(1, "Groups per tensor.", gt=0)
    quantized_initialization: QuantizedTensor | None = key(None, "Quantize while the model is built.")
    post_init_quant: dict[str, QuantizedTensor] = key({}, "Quantize afterwards, by module name.")


class Eigenvalue(ConfigSection):
    """`eigenvalue`: curvature per layer, which steers quantization."""

    enabled: bool = key(False, "Estimate the largest eigenvalues.")
    verbose: bool = key(False, "Print them.")
    max_iter: Int = key(100, "Power iterations.", gt=0)
    tol: float = key(1e-2, "Relative tolerance.", gt=0)
    stability: float = key(1e-6, "Added to divisors.", ge=0)
    gas_boundary_resolution: Int = key(1, "Boundaries between estimates.", gt=0)
    layer_name: str = key("bert.encoder.layer", "Name of the layer list.")
    layer_num: Int = key(0, "Number of layers.", ge=0)


class QuantizeBits(ConfigSection):
    """`quantize_training.quantize_bits`."""

    start_bits: Int = key(16, "Bits at first.", gt=0)
    target_bits: Int = key(8, "Bits at last.", gt=0)


class QuantizeSchedule(ConfigSection):
    """`quantize_training.quantize_schedule`."""

    quantize_period: Int = key(100, "Steps per bit.", gt=0)
    schedule_offset: Int = key(100, "First step.", ge=0)


class QuantizeTraining(ConfigSection):
    """`quantize_training`: the first form of quantization-aware training."""

    enabled: bool = key(False, "Quantize in training.")
    quantize_verbose: bool = key(False, "Print what happens.")
    quantizer_kernel: bool = key(False, "Use the compiled kernel.")
    quantize_type: _Symmetry = key("symmetric", "Range of the codes.")
    quantize_bits: QuantizeBits = section(QuantizeBits, "Bits over time.")
    quantize_schedule: QuantizeSchedule = section(QuantizeSchedule, "When bits change.")
    quantize_groups: Int = key(1, "Groups per tensor.", gt=0)
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "Blend with fp16 weights.")
    eigenvalue: Eigenvalue = section(Eigenvalue, "Curvature per layer.")
