"""Curricula, sampling by difficulty, batches by tokens, and layers and tokens that are left out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardwise.errors import ConfigError, ConflictError

from .base import Arguments, At, ConfigSection, Contradictions, Int, Ints, as_list, key, section
from .tables import with_unused_keys

_Numbers = Annotated[list[Annotated[float, Field(ge=0)]], BeforeValidator(as_list)]
_ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class DifficultySchedule(Arguments):
    """`schedule_config`: how a difficulty grows."""

    total_curriculum_step: Int | None = key(None, "Steps until the largest difficulty (linear, root).", gt=0)
    difficulty_step: Int | None = key(None, "Difficulties are multiples of this (linear, root).", gt=0)
    root_degree: Int | None = key(None, "2: the difficulty grows with the square root of the step (root).", gt=0)
    difficulty: _Numbers | None = key(None, "The difficulties (discrete).")
    max_step: Ints | None = key(None, "Last step of each difficulty but the last (discrete).")


class Curriculum(Arguments):
    """Difficulties of a curriculum: bounds, and how they grow."""

    min_difficulty: Int | None = key(None, "The first difficulty.", gt=0)
    max_difficulty: Int | None = key(None, "The largest difficulty.", gt=0)
    schedule_type: _ScheduleType | None = key(
        None,
        "How the difficulty grows with the step: linear, as a root, by a list, or as the script says "
        "(`engine.set_custom_curriculum_learning_schedule`).",
    )

    def incomplete(self, schedule: DifficultySchedule, at: At) -> Contradictions:
        """Yield the keys that an enabled curriculum lacks."""
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, name) is None:
                yield name, "is needed by a curriculum; add it", ConfigError
        yield from self.ordered("min_difficulty", "max_difficulty", at)
        needed = {
            "fixed_linear": ("total_curriculum_step", "difficulty_step"),
            "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
            "fixed_discrete": ("difficulty", "max_step"),
        }.get(self.schedule_type or "", ())
        missing = [name for name in needed if getattr(schedule, name) is None]
        for name in missing:
            where = f"schedule_config.{name}"
            yield where, f'is needed by {at("schedule_type")} "{self.schedule_type}"; add it', ConfigError
        if self.schedule_type == "fixed_discrete" and not missing:
            levels, ends = schedule.difficulty or [], schedule.max_step or []
            if len(ends) != len(levels) - 1:
                message = f"has {len(ends)} steps for {len(levels)} difficulties; give one for each but the last"
                yield "schedule_config.max_step", message, ConflictError
            for name, values in (("difficulty", levels), ("max_step", ends)):
                if sorted(values) != list(values):
                    yield f"schedule_config.{name}", f"is {values}; give ascending values", ConfigError


class CurriculumLearning(Curriculum):
    """`curriculum_learning`: sequences of training batches that begin short (Li et al. 2021)."""

    enabled: bool = key(False, "Truncate the sequences of training batches to a length that grows.")
    curriculum_type: Literal["seqlen"] | None = key(None, "What the difficulty is: the length of sequences.")
    schedule_config: DifficultySchedule = section(DifficultySchedule, "Parameters of the schedule.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield what an enabled curriculum lacks."""
        if self.enabled:
            if self.curriculum_type is None:
                yield "curriculum_type", 'is needed by a curriculum; write "seqlen"', ConfigError
            yield from self.incomplete(self.schedule_config, at)


class CurriculumMetric(Curriculum):
    """`curriculum_metrics.<name>`: a measure of the difficulty of samples."""

    index_to_sample_path: str | None = key(None, "Samples in the order of the metric, as an analyzer writes them.")
    index_to_metric_path: str | None = key(None, "Values of the metric, as an analyzer writes them.")
    difficulty_type: Literal["value", "percentile"] | None = key(
        None, "A difficulty is a value of the metric, or a percentage of the samples."
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = key(
        None, "Samples are drawn up to the difficulty; or from all, and the script acts upon the difficulty."
    )

    @property
    def selects(self) -> bool:
        """Whether the difficulty decides which samples are drawn."""
        return self.clustering_type != "single_cluster"

    def contradictions(self, at: At) -> Contradictions:
        """Yield files and types that are missing."""
        needed = ["difficulty_type", "clustering_type"]
        if self.selects:
            needed += ["index_to_sample_path", *(["index_to_metric_path"] if self.difficulty_type == "value" else [])]
        for name in needed:
            if getattr(self, name) is None:
                yield name, "is needed by a curriculum; add it", ConfigError
        if self.difficulty_type == "percentile" and (self.max_difficulty or 0) > 100:
            yield "max_difficulty", f"is {self.max_difficulty}; percentiles end at 100", ConfigError


@with_unused_keys
class SampledCurriculum(ConfigSection):
    """`data_efficiency.data_sampling.curriculum_learning`: samples by difficulty."""

    enabled: bool = key(False, "Draw samples up to difficulties that grow (Li et al. 2022).")
    curriculum_metrics: dict[str, dict[str, object]] = key(
        {},
        "By name of a metric: `index_to_sample_path`, `index_to_metric_path`, `difficulty_type` (value, percentile), "
        "`clustering_type` (schedule_based, single_cluster), and the keys of `curriculum_learning`.",
        free_form=True,
    )


class DynamicBatching(ConfigSection):
    """`data_efficiency.data_sampling.dynamic_batching`: micro-batches of a number of tokens."""

    enabled: bool = key(False, "Fill micro-batches up to `max_tokens`, and scale the learning rate with their samples.")
    max_tokens: Int | None = key(None, "Most tokens of a micro-batch of a rank.", gt=0)
    metrics_path: str | None = key(
        None, "Lengths of the samples, as an analyzer writes them (sample to metric); null: the script gives them."
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "Factor of the learning rate for samples / train_batch_size: itself, its root, or 1."
    )
    min_batch_size: Int = key(1, "Least samples of a micro-batch; smaller ones are left out.", gt=0)
    max_batch_size: Int | None = key(None, "Most samples of a micro-batch.", gt=0)
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = key(
        "dataloader", "Order in which micro-batches are filled: random, by length, or as in the dataset."
    )
    verbose: bool = key(False, "Log the number of micro-batches of an epoch (rank 0).")

    def contradictions(self, at: At) -> Contradictions:
        """Yield a missing number of tokens, and bounds that exclude each other."""
        if self.enabled and self.max_tokens is None:
            yield "max_tokens", "is needed by dynamic batching; add it", ConfigError
        yield from self.ordered("min_batch_size", "max_batch_size", at)


@with_unused_keys
class DataSampling(ConfigSection):
    """`data_efficiency.data_sampling`: which samples a batch has."""

    enabled: bool = key(False, "Switch for the section.")
    num_epochs: Int = key(1000, "Passes over the dataset after which a curriculum's loader ends.", gt=0)
    num_workers: Int = key(0, "Prefetching processes of the engine's training loader.", ge=0)
    curriculum_learning: SampledCurriculum = section(SampledCurriculum, "Samples by difficulty.")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "Batches by tokens.")


class TokenDropSteps(ConfigSection):
    """`random_ltd_schedule.schedule_config`: growth of the number of tokens."""

    require_steps: Int | None = key(None, "Steps until `max_value`.", gt=0)
    seq_per_step: Int | None = key(None, "Numbers of tokens are multiples of this.", gt=0)


class TokenDropSchedule(ConfigSection):
    """`random_ltd_schedule`: number of tokens that a layer computes."""

    min_value: Int | None = key(None, "Tokens at first.", gt=0)
    max_value: Int | None = key(None, "Tokens at last; sequences that are not longer are whole.", gt=0)
    schedule_type: Literal["fixed_linear"] | None = key(None, "Linear growth.")
    schedule_config: TokenDropSteps = section(TokenDropSteps, "Parameters of the schedule.")


@with_unused_keys
class LayerTokenRates(ConfigSection):
    """`layer_token_lr_schedule`: a learning rate by the tokens of layers."""

    enabled: bool = key(False, "Refused: DeepSpeed's engine raises, too.")


@with_unused_keys
class RandomLTD(ConfigSection):
    """`data_efficiency.data_routing.random_ltd`: layers that compute a random part of the tokens (Yao et al. 2022)."""

    enabled: bool = key(False, "Let layers compute a random part of the tokens; others pass by unchanged.")
    total_layer_num: Int | None = key(None, "Layers of the model.", gt=0)
    random_ltd_layer_num: Int | None = key(None, "Layers that drop tokens.", gt=0)
    random_ltd_layer_id: Ints | None = key(None, "Numbers of these layers, from 0.")
    model_mask_name: str | None = key(None, "Name of the layers' argument for the attention mask.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(None, "Dimensions of hidden states.")
    random_ltd_schedule: TokenDropSchedule = section(TokenDropSchedule, "Number of tokens.")
    layer_token_lr_schedule: LayerTokenRates = section(LayerTokenRates, "Learning rate by tokens.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield what enabled dropping lacks."""
        if not self.enabled:
            return
        if self.layer_token_lr_schedule.enabled:
            message = "is not supported; remove it, and set the rate by `scheduler`"
            yield "layer_token_lr_schedule.enabled", message, ConfigError
        schedule, at_schedule = self.random_ltd_schedule, "random_ltd_schedule."
        needed: dict[str, tuple[ConfigSection, tuple[str, ...]]] = {
            "": (self, ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "hidden_state_order")),
            at_schedule: (schedule, ("min_value", "max_value", "schedule_type")),
            f"{at_schedule}schedule_config.": (schedule.schedule_config, ("require_steps", "seq_per_step")),
        }
        missing = [
            where + name for where, (held, names) in needed.items() for name in names if getattr(held, name) is None
        ]
        for name in missing:
            yield name, "is needed by random layer-token dropping; add it", ConfigError
        if missing:
            return
        layers = self.random_ltd_layer_id or []
        if len(set(layers)) != self.random_ltd_layer_num or not set(layers) <= set(range(self.total_layer_num or 0)):
            message = (
                f"is {layers}; give {at('random_ltd_layer_num')} = {self.random_ltd_layer_num} different numbers from "
                f"0 to {(self.total_layer_num or 0) - 1}"
            )
            yield "random_ltd_layer_id", message, ConflictError
        if (schedule.min_value or 0) > (schedule.max_value or 0):
            message = f"is {schedule.min_value}, above max_value = {schedule.max_value}; exchange them"
            yield "random_ltd_schedule.min_value", message, ConflictError


class DataRouting(ConfigSection):
    """`data_efficiency.data_routing`: which layers compute which tokens."""

    enabled: bool = key(False, "Switch for the section.")
    random_ltd: RandomLTD = section(RandomLTD, "Random layer-token dropping.")


class DataEfficiency(ConfigSection):
    """`data_efficiency`: less data or computation for the same quality."""

    enabled: bool = key(False, "Switch for the section.")
    seed: Int = key(1234, "Seed of samples and tokens that are drawn.", ge=0)
    data_routing: DataRouting = section(DataRouting, "Layers and tokens.")
    data_sampling: DataSampling = section(DataSampling, "Samples.")

    @property
    def curriculum(self) -> SampledCurriculum | None:
        """The curriculum by metrics, if enabled."""
        sampling = self.data_sampling
        on = self.enabled and sampling.enabled and sampling.curriculum_learning.enabled
        return sampling.curriculum_learning if on else None

    @property
    def token_batches(self) -> DynamicBatching | None:
        """Batches by tokens, if enabled."""
        sampling = self.data_sampling
        on = self.enabled and sampling.enabled and sampling.dynamic_batching.enabled
        return sampling.dynamic_batching if on else None

    @property
    def token_drop(self) -> RandomLTD | None:
        """Random layer-token dropping, if enabled."""
        routing = self.data_routing
        return routing.random_ltd if self.enabled and routing.enabled and routing.random_ltd.enabled else None

    def contradictions(self, at: At) -> Contradictions:
        """Yield two ways of forming batches."""
        if self.curriculum is not None and self.token_batches is not None:
            where = "data_sampling.dynamic_batching.enabled"
            message = f"both form the batches: switch this or {at('data_sampling.curriculum_learning.enabled')} off"
            yield where, message, ConflictError
        if self.curriculum is not None and not self.curriculum.curriculum_metrics:
            where = "data_sampling.curriculum_learning.curriculum_metrics"
            yield where, "has no metric; add one, or switch the curriculum off", ConfigError


class ProgressiveLayerDropping(ConfigSection):
    """`progressive_layer_drop`: layers that are skipped at random, more and more of them (Zhang and He 2020)."""

    enabled: bool = key(False, "Skip layers of training passes at random.")
    theta: float | None = key(None, "Part of the layers' outputs that is kept at last; null: 0.5.", ge=0, le=1)
    gamma: float | None = key(
        None, "Speed: the part at step t is (1 - theta) exp(-gamma t) + theta; null: 0.001.", ge=0
    )
