"""Splitting the model itself: pipeline, tensor, expert parallelism, and sparse attention layouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .base import ConfigSection, ExactInt, Int, Strings, as_list, key
from .tables import with_unused_keys


@with_unused_keys
class Pipeline(ConfigSection):
    """`pipeline`: options of a PipelineModule."""

    enabled: bool | None = key(None, "true: split the model into pipeline stages.")
    stages: Literal["auto"] | Int = key("auto", "Number of pipeline stages; auto: the PipelineModule decides.")
    partition: str = key("best", "How layers are divided over pipeline stages (best, uniform, parameters, type:REGEX).")
    schedule: str = key(
        "1f1b",
        "Order of forward and backward passes: naive, gpipe, 1f1b, interleaved, zb-h1, zbv, v-half, v-min, dualpipe-v.",
    )
    chunks: Int | None = key(None, "Stages of each rank; null: the fewest that the schedule has.", ge=1)
    dynamic_shape: bool = key(False, "Shapes of activations depend on more than the shapes of the inputs.")
    unsharded_for: Literal["pass", "run", "step"] = key(
        "pass",
        "How long ZeRO stage 3 keeps the parameters of a stage unsharded: a unit at a time in each pass of a "
        "micro-batch, in a run of passes of the same stage, or from the first to the last micro-batch of a step. The "
        "longer, the fewer all-gathers; run and step need the memory of all parameters of the stage.",
    )
    activation_checkpoint_interval: Int = key(
        0, "Recompute activations of every so many layers; 0: as the PipelineModule says.", ge=0
    )

    @property
    def has_stages(self) -> bool:
        """True if the configuration asks for a pipeline."""
        return self.stages not in ("auto", 1)


class TPSize(ConfigSection):
    """`tensor_parallel.tp`: nested form of the tensor-parallel degree."""

    tp_size: Int = key(1, "Tensor-parallel degree.", ge=1)
    tp_grain_size: Int = key(
        1, "Ranks have multiples of so many features of MLPs and words of heads; the last has the rest.", ge=1
    )
    mpu: Any = key(None, "Model-parallel unit object; pass it to `initialize(mpu=...)`.")
    tp_group: Any = key(None, "Process group of the tensor-parallel ranks; adjacent ranks.")


@with_unused_keys
class LayerSpec(ConfigSection):
    """`tensor_parallel.partition_config.layer_specs[]`: how parameters that match are split."""

    patterns: Strings = key(
        [], "Regular expressions found in parameter names; the names that adapters add are left out."
    )
    partition_type: Literal["row", "column", "skip", "norm", "whole"] = key(
        "column",
        "column: output features are split (of an embedding: words); row: input features (the width), and outputs are "
        "summed; skip: every rank has the layer. With sequence_parallel also norm, for norms before divided layers and "
        "the last one, and whole, for other modules behind such norms that are not divided (then patterns may match "
        "modules' names).",
    )
    shape: Annotated[list[Any], BeforeValidator(as_list)] | None = key(
        None,
        "Shape in which the weight is seen before it is split, for several parts in one. At `partition_dim`: a list of "
        "the parts' sizes, or in the first dimension their number; each is split. Before it: how often they repeat.",
    )
    partition_dim: Int | None = key(
        None,
        "Dimension that is split, of the weight as it is stored, or of `shape`; null: as `partition_type` says. Of "
        "norm and whole that of the tokens; null: -2.",
    )
    model_types: Strings | None = key(
        None, "Values of `model_type` in the configuration of transformers' models that this rule is for; null: all."
    )
    gather_output: bool = key(False, "column: gather the layer's output on every rank.")


class PartitionConfig(ConfigSection):
    """`tensor_parallel.partition_config`: rules for splitting layers."""

    use_default_specs: bool = key(
        True, "Layers that no rule matches are split as without rules; false: every rank has them."
    )
    tp_size: Int = key(1, "Tensor-parallel degree; autotp_size wins.", ge=1)
    embedding_partition_dim: Int = key(
        1,
        "1: embeddings of words are split by their width; 0: by words, as those that are tied to the head always are.",
        ge=0,
        le=1,
    )
    lm_head_patterns: Strings = key(
        ["lm_head", "embed_out"], "Regular expressions for the last parts of the names of output heads."
    )
    strict_mode: bool = key(False, "A matrix without a rule is an error, and so is a pattern without a match.")
    layer_specs: Annotated[list[LayerSpec], BeforeValidator(as_list)] = key([], "Rules, first match wins.")


@with_unused_keys
class TensorParallel(ConfigSection):
    """`tensor_parallel`: split matrices over ranks during training."""

    enabled: bool | None = key(None, "false: ignore the sizes below.")
    autotp_size: Int = key(0, "Tensor-parallel degree; 0 or 1: off.", names=("size",), ge=0)
    sequence_parallel: bool = key(
        False,
        "Between divided layers each rank has some of the tokens: norms and the residual stream take 1/size of the "
        "memory, and the same bytes are sent.",
    )
    tp: TPSize | None = key(None, "Nested form of the degree.", names=("tensor_parallel",))
    injection_policy_tuple: Annotated[list[Any], BeforeValidator(as_list)] | None = key(
        None,
        "Last parts of the names of layers that are split by input features, and whose outputs are summed; the layers "
        "that lead to these are split by output features. It stands for the model's own plan.",
    )
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = key(
        None, "Split the blocks that are called as those of this family, and do not look at the model's own plan."
    )
    partition_config: PartitionConfig | None = key(None, "Rules for splitting layers.")
    check_division: bool = key(
        True,
        "Compare each kind of split block with the unsplit block on some tokens of the first forward. false: never.",
    )
    kernel_inject: bool = key(False, "Replace layers by fused kernels.", names=("replace_with_kernel_inject",))
    vocab_parallel_lm_head: bool | None = key(
        None,
        "true: in training logits stay split by words, and the model's loss is computed from the parts; null or false: "
        "they are gathered.",
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch", "Cross entropy of split logits; there is the library's own, which is `torch`."
    )

    @property
    def size(self) -> int:
        """Size of the tensor-parallel group: the first written degree above 1, else 1."""
        if self.enabled is False:
            return 1
        nested = self.tp.tp_size if self.tp is not None else 1
        rules = self.partition_config.tp_size if self.partition_config is not None else 1
        return next((size for size in (self.autotp_size, nested, rules) if size > 1), 1)


@with_unused_keys
class ExpertParallel(ConfigSection):
    """`expert_parallel`: distribute the experts of a model of transformers over ranks."""

    enabled: bool = key(False, "Distribute experts.")
    autoep_size: Int = key(1, "Ranks over which the experts of a layer are divided.", ge=1)
    expert_tensor_parallel_size: Annotated[Literal[1], ExactInt] = key(
        1, "Tensor-parallel degree inside an expert; only 1."
    )
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None = key(
        None, "Divide the blocks of this model family only."
    )
    moe_layer_pattern: str | None = key(
        None, "Regular expression found in the names of the blocks to be divided; null: all."
    )
    expert_pattern: str | None = key(None, "Name of a block's child that holds the experts; null: experts.")
    router_pattern: str | None = key(None, "Name of a block's child that routes; null: gate, or router.")
    use_grouped_mm: bool = key(True, "Compute all local experts in one grouped matrix product, where torch can.")
    route_norm: bool | None = key(None, "Normalise the weights of the chosen experts.")
    route_scale: float = key(1.0, "Factor on routing weights.")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "Apply routing weights before or after the experts.")
    num_expert_groups: Int | None = key(None, "Groups of experts for group-limited routing.", gt=0)
    num_limited_groups: Int | None = key(None, "Groups that a token may use.", gt=0)
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "Routing score.")
    top_k: Literal["auto"] | Int = key("auto", "Experts per token.")
    load_balance_coeff: None = key(None, "Only null.")
    routed_scaling_factor: Literal["auto"] | float = key("auto", "Factor on routed outputs.")
    expert_w1: str | None = key(
        None, "Name of the stacked gate projections, or of gate and up projections in one; null: gate_up_proj."
    )
    expert_w2: str | None = key(None, "Name of the stacked down projections; null: down_proj.")
    expert_w3: str | None = key(None, "Name of the stacked up projections; null: fused with the gate.")
    num_experts_attr: str | None = key(
        None, "Attribute of the model's config with the number of experts, which is checked."
    )
    comm_backend: Literal["comm", "deepep"] = key("comm", "Library that exchanges tokens.")
    expert_activation: str | None = key(
        None, "Activation of the experts, by its name in torch.nn.functional or transformers; null: the model's."
    )


@with_unused_keys
class ActivationCheckpointing(ConfigSection):
    """`activation_checkpointing`: how `shardwise.checkpointing.checkpoint` keeps the inputs of recomputed functions."""

    partition_activations: bool = key(False, "Split saved inputs over tensor-parallel ranks.")
    contiguous_memory_optimization: bool = key(
        False, "With `cpu_checkpointing`: keep the host memory of saved inputs from pass to pass."
    )
    cpu_checkpointing: bool = key(False, "Move saved inputs to host memory.")
    synchronize_checkpoint_boundary: bool = key(False, "Wait for the CUDA device at every checkpoint.")
    profile: bool = key(False, "Time checkpointed functions; logged with `steps_per_print`.")
    selective: Literal["attention", "every_second_matmul", "matmuls"] | None = key(
        None,
        "Keep outputs of fused attention, or also of every second or of all products with a weight, instead of "
        "computing them again.",
    )
