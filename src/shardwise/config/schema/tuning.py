"""Sections of the autotuner, and of what a training may cost."""

from __future__ import annotations

from typing import Any, Literal

from shardwise.errors import ConfigError, ConflictError

from .base import At, ConfigSection, Contradictions, Int, key, section
from .tables import with_unused_keys


@with_unused_keys
class ModelInfo(ConfigSection):
    """`autotuning.model_info`: facts about the model."""

    profile: bool = key(
        False,
        "Take one step, write facts and planned memory of the model to `autotuning.model_info_path`, and end. "
        "`--autotuning` sets it for the first run.",
    )


@with_unused_keys
class Autotuning(ConfigSection):
    """`autotuning`: the search of `shardwise run --autotuning`, and the measured steps of its runs."""

    enabled: bool = key(
        False, "In a run that `--autotuning` has started: measure some steps, and end. No effect in other runs."
    )
    fast: bool = key(
        True, "Tune ZeRO stage and micro-batch size only; false: also offloading, where it is needed, and buckets."
    )
    results_dir: str = key("autotuning_results", "Directory of results.", min_length=1)
    exps_dir: str = key("autotuning_exps", "Directory of the configurations and logs of each run.", min_length=1)
    overwrite: bool = key(
        True,
        "Measure everything again; false: keep results of equal configurations and commands in `results_dir`.",
        default_note="true in DeepSpeed's code, false in its documentation",
    )
    start_profile_step: Int = key(3, "First measured step; the first step of a run is never measured.", ge=0)
    end_profile_step: Int = key(5, "Last measured step, after which the run ends.", ge=0)
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "Most samples per second, least seconds of a step, or most floating-point operations per second."
    )
    metric_path: str | None = key(None, "File of a run's result; set by `--autotuning`.", min_length=1)
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "gridsearch",
        "Order of the runs: by stage and micro-batch size, at random, or by planned time (without `rates`: by what a "
        "step communicates).",
        default_note="gridsearch in DeepSpeed's code, model_based in its documentation",
    )
    tuner_early_stopping: Int = key(5, "End after so many runs without a better result.", gt=0)
    tuner_num_trials: Int = key(50, "Most runs.", gt=0)
    arg_mappings: dict[str, Any] | None = key(
        None, "Arguments of the script that repeat keys, as {key: argument}; each run sets them.", free_form=True
    )
    max_train_batch_size: Int | None = key(None, "Largest `train_batch_size`, if the configuration gives none.", gt=0)
    min_train_batch_size: Int = key(1, "Smallest `train_batch_size`, if the configuration gives none.", gt=0)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Largest micro-batch size.", gt=0)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro-batch size.", gt=0)
    num_tuning_micro_batch_sizes: Int = key(3, "Micro-batch sizes of each stage.", gt=0)
    model_info: ModelInfo = section(ModelInfo, "Facts about the model.")
    model_info_path: str | None = key(None, "File of the first run's result; set by `--autotuning`.", min_length=1)
    time_limit: float = key(600.0, "Most seconds of a run.", gt=0)
    rates: str | None = key(
        None,
        "File of `shardwise bench machine`: of candidates that are planned to be slower than the best by more than the "
        "plan's error none is run.",
        min_length=1,
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield bounds that exclude every value."""
        if not self.enabled:
            return
        least = max(2, self.start_profile_step)
        if self.end_profile_step < least:
            message = f"is {self.end_profile_step}; write {least} or more: step {least} is the first that is measured"
            yield "end_profile_step", message, ConflictError
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            yield from self.ordered(f"min_{name}", f"max_{name}", at)
        wrong = {name: flag for name, flag in (self.arg_mappings or {}).items() if not isinstance(flag, str)}
        if wrong:
            name, flag = next(iter(wrong.items()))
            message = f'maps {name} to {flag!r}; write an argument of the script, such as "--{name}"'
            yield "arg_mappings", message, ConflictError


class CostBudget(ConfigSection):
    """`cost_budget`: a plan of time has to say that the training costs no more, else nothing begins. Not a section of
    DeepSpeed.
    """

    amount: float | None = key(None, "Most that the training may cost, in any currency; null: any.", gt=0)
    rank_hour: float = key(1.0, "Price of a rank for an hour.", gt=0)
    steps: Int | None = key(None, "Steps of the training.", gt=0)
    rates: str | None = key(
        None,
        'File of `shardwise bench machine`. With it, what is left to "auto" is the fastest that fits, also without '
        "an amount; without it the cheapest in memory tiers and bytes sent.",
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield an amount that nothing can be compared with."""
        for name in ("steps", "rates"):
            if self.amount is not None and getattr(self, name) is None:
                yield "amount", f"needs {at(name)}: a price is steps x time of a step x ranks", ConfigError
