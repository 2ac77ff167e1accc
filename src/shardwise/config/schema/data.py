"""Data efficiency, curricula, layer dropping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .base import ConfigSection, Int, Ints, as_list, key, section

_Numbers = Annotated[list[int | float], BeforeValidator(as_list)]


_NO_SAMPLER = "training_data is drawn from in torch's order"


class CurriculumScheduleConfig(ConfigSection):
    """`schedule_config` of a curriculum."""

    total_curriculum_step: Int | None = key(None, "Step at which full difficulty is reached (linear, root).", gt=0)
    difficulty_step: Int | None = key(None, "Difficulty grows in multiples of this (linear, root).", gt=0)
    root_degree: Int | None = key(None, "Degree of the root (root).", gt=0)
    difficulty: _Numbers | None = key(None, "Difficulties (discrete).")
    max_step: _Numbers | None = key(None, "Last step of each difficulty but the last (discrete).")


class LegacyCurriculum(ConfigSection):
    """`curriculum_learning` at top level: sequence-length curriculum."""

    enabled: bool = key(False, "Grow the sequence length over training.")
    curriculum_type: str | None = key(None, "seqlen. Required when enabled.")
    min_difficulty: Int | None = key(None, "First sequence length. Required when enabled.", gt=0)
    max_difficulty: Int | None = key(None, "Last sequence length. Required when enabled.", gt=0)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = key(
        None, "How difficulty grows. Required when enabled."
    )
    schedule_config: CurriculumScheduleConfig = section(CurriculumScheduleConfig, "Arguments of the schedule.")


class CurriculumMetric(ConfigSection):
    """`curriculum_metrics.<name>`."""

    index_to_sample_path: str | None = key(None, "Index from metric value to samples.")
    index_to_metric_path: str | None = key(None, "Index from sample to metric value.")
    difficulty_type: Literal["value", "percentile"] | None = key(None, "What difficulty counts.")
    clustering_type: Literal["schedule_based", "single_cluster"] | None = key(None, "How samples are grouped.")
    min_difficulty: Int | None = key(None, "First difficulty.")
    max_difficulty: Int | None = key(None, "Last difficulty.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = key(
        None, "How difficulty grows."
    )
    schedule_config: CurriculumScheduleConfig = section(CurriculumScheduleConfig, "Arguments of the schedule.")


class SamplingCurriculum(ConfigSection):
    """`data_efficiency.data_sampling.curriculum_learning`."""

    enabled: bool = key(False, "Choose samples by difficulty.")
    data_cluster_path: str | None = key(None, "Directory for clusters. Required when enabled.")
    curriculum_metrics: dict[str, CurriculumMetric] = key({}, "Metrics by name. Required when enabled.")


class DynamicBatching(ConfigSection):
    """`data_efficiency.data_sampling.dynamic_batching`: batches of equal token count."""

    enabled: bool = key(False, "Pack batches by token count.")
    max_tokens: Int | None = key(None, "Tokens per batch. Required when enabled.", gt=0)
    metrics_path: str | None = key(None, "File of sample lengths.")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key("linear", "How the learning rate follows batch size.")
    min_batch_size: Int = key(1, "Fewest samples in a batch.", gt=0)
    max_batch_size: Int | None = key(None, "Most samples in a batch.", gt=0)
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = key("dataloader", "Order of samples.")
    verbose: bool = key(False, "Print batch sizes.")


class DataSampling(ConfigSection):
    """`data_efficiency.data_sampling`."""

    enabled: bool = key(False, "Control sampling.")
    num_epochs: Int = key(1000, "Epochs.", gt=0, no_effect=_NO_SAMPLER)
    num_workers: Int = key(0, "Loader processes.", ge=0, no_effect=_NO_SAMPLER)
    pin_memory: bool = key(False, "Page-lock loaded batches.", no_effect=_NO_SAMPLER)
    curriculum_learning: SamplingCurriculum = section(SamplingCurriculum, "Choose samples by difficulty.")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "Batches of equal token count.")


class LTDScheduleConfig(ConfigSection):
    """`random_ltd_schedule.schedule_config`."""

    require_steps: Int | None = key(None, "Steps until nothing is dropped.", gt=0)
    seq_per_step: Int | None = key(None, "Kept tokens grow by this.", gt=0)


class LTDSchedule(ConfigSection):
    """`random_ltd.random_ltd_schedule`."""

    min_value: Int | None = key(None, "Tokens kept at first.", gt=0)
    max_value: Int | None = key(None, "Tokens kept at last.", gt=0)
    schedule_type: Literal["fixed_linear"] | None = key(None, "How the number of kept tokens grows.")
    schedule_config: LTDScheduleConfig = section(LTDScheduleConfig, "Arguments of the schedule.")


class LayerTokenLR(ConfigSection):
    """`random_ltd.layer_token_lr_schedule`."""

    enabled: bool = key(False, "Scale the learning rate by tokens seen per layer.")
    total_layer_tokens: Int | None = key(None, "Tokens over all layers.", gt=0)
    warmup_type: str | None = key(None, "Form of the warm-up.")
    warmup_layer_tokens: Int | None = key(None, "Tokens of the warm-up.", ge=0)


class RandomLTD(ConfigSection):
    """`data_efficiency.data_routing.random_ltd`: random layerwise token dropping."""

    enabled: bool = key(False, "Drop tokens in middle layers.")
    total_layer_num: Int | None = key(None, "Layers of the model.", gt=0)
    random_ltd_layer_num: Int | None = key(None, "Layers that drop tokens.", gt=0)
    random_ltd_layer_id: Ints | None = key(None, "Their indices.")
    model_mask_name: str | None = key(None, "Name of the attention-mask argument of forward.")
    model_type: Literal["decoder", "encoder"] | None = key(None, "Kind of model.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(None, "Order of dimensions.")
    random_ltd_schedule: LTDSchedule = section(LTDSchedule, "How many tokens are kept over time.")
    layer_token_lr_schedule: LayerTokenLR = section(LayerTokenLR, "Learning rate by tokens seen.")


class DataRouting(ConfigSection):
    """`data_efficiency.data_routing`."""

    enabled: bool = key(False, "Control which tokens layers see.")
    random_ltd: RandomLTD = section(RandomLTD, "Random layerwise token dropping.")


class DataEfficiency(ConfigSection):
    """`data_efficiency`: master switch of sampling and routing."""

    enabled: bool = key(False, "Use the sections below.")
    seed: Int = key(1234, "Seed of sampling.", no_effect=_NO_SAMPLER)
    data_sampling: DataSampling = section(DataSampling, "Which samples are seen.")
    data_routing: DataRouting = section(DataRouting, "Which tokens layers see.")


class ProgressiveLayerDrop(ConfigSection):
    """`progressive_layer_drop`."""

    enabled: bool = key(False, "Skip layers with growing probability.")
    theta: float | None = key(None, "Smallest probability of keeping a layer.", ge=0, le=1)
    gamma: float | None = key(None, "Speed of the decay.", ge=0)
