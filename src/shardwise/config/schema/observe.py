"""Watching a run: comms logger, monitors, timers, profiler, anomalies."""

from __future__ import annotations

from typing import Literal

from shardwise.errors import ConflictError

from .base import At, ConfigSection, Contradictions, Int, Ints, Strings, key, section


class CommsLoggerOptions(ConfigSection):
    """`comms_logger`: record every collective."""

    enabled: bool = key(
        False,
        "Record collectives for comm.log_summary().",
        default_note="in DeepSpeed the presence of the section switches it on",
    )
    verbose: bool = key(False, "Print every collective.")
    prof_all: bool = key(True, "Record all operations.")
    prof_ops: Strings = key([], "Operations to record when prof_all is false.")
    debug: bool = key(False, "Append the calling function to the name of the operation.")
    path: str = key("", "Directory: each rank also writes a line for every collective to path/rank_N.jsonl.")


class Throughput(ConfigSection):
    """`timers.throughput`: samples per second."""

    enabled: bool = key(
        True, "Print samples, tokens and (after the FLOPs profiler) operations per second with `steps_per_print`."
    )
    synchronized: bool = key(True, "Wait for the device before each print, for exact times; no step waits in between.")


class Timers(ConfigSection):
    """`timers`."""

    throughput: Throughput = section(Throughput, "Samples per second.")


class FlopsProfiler(ConfigSection):
    """`flops_profiler`: floating-point operations, parameters and time per module."""

    enabled: bool = key(False, "Profile one step.")
    recompute_fwd_factor: float = key(0.0, "Extra forward passes because of recomputation.", ge=0)
    profile_step: Int = key(1, "Step to profile.", ge=0)
    module_depth: Int = key(-1, "Depth of modules to print; -1: the deepest.", ge=-1)
    top_modules: Int = key(1, "Modules to list per depth.", gt=0)
    detailed: bool = key(True, "Print the profile of every module.")
    output_file: str | None = key(None, "File to write; null: standard output.")


class Timeline(ConfigSection):
    """`timeline`: a trace of some steps, for ui.perfetto.dev and chrome://tracing."""

    enabled: bool = key(False, "Record a timeline of some steps.")
    path: str | None = key(
        None,
        "Directory; each rank writes timeline-RRRRR.json there; null: that of the run log, or timeline.",
        min_length=1,
    )
    start_step: Int = key(2, "Steps of this process before the first one that is recorded.", ge=0)
    steps: Int = key(3, "Steps to record.", gt=0)
    ranks: Ints | None = key(None, "Ranks that record; null: all.")
    max_events: Int = key(
        200_000, "Most ranges and collectives that a rank keeps; the file has the number left out.", gt=0
    )


class TensorBoard(ConfigSection):
    """`tensorboard`."""

    enabled: bool = key(False, "Write TensorBoard events.")
    output_path: str = key("", "Directory; events go to output_path/job_name.")
    job_name: str = key("DeepSpeedJobName", "Name of the run.")


class WandB(ConfigSection):
    """`wandb`."""

    enabled: bool = key(False, "Log to Weights & Biases.")
    group: str | None = key(None, "Group of the run.")
    team: str | None = key(None, "Team or user (entity).")
    project: str = key("deepspeed", "Project.")


class CSVMonitor(ConfigSection):
    """`csv_monitor`."""

    enabled: bool = key(False, "Write one CSV file per metric.")
    output_path: str = key("", "Directory; files go to output_path/job_name.")
    job_name: str = key("DeepSpeedJobName", "Name of the run.")


class JSONLMonitor(ConfigSection):
    """`jsonl_monitor`."""

    enabled: bool = key(False, "Write all metrics to one file of JSON lines.")
    output_path: str = key("", "Directory; the file is output_path/job_name/events.jsonl.")
    job_name: str = key("DeepSpeedJobName", "Name of the run.")


class MLflow(ConfigSection):
    """`mlflow`."""

    enabled: bool = key(False, "Log to MLflow.")
    tracking_uri: str | None = key(None, "Server or directory; null: MLflow's default (MLFLOW_TRACKING_URI).")
    experiment: str = key("shardwise", "Experiment; it is made if there is none of this name.", min_length=1)
    run_name: str | None = key(None, "Name of the run; null: MLflow makes one up.")


class Comet(ConfigSection):
    """`comet`."""

    enabled: bool = key(False, "Log to Comet.")
    samples_log_interval: Int = key(100, "Samples between two points.", gt=0)
    project: str | None = key(None, "Project.")
    workspace: str | None = key(None, "Workspace.")
    api_key: str | None = key(None, "API key; null or `***`: that of the environment (COMET_API_KEY).", secret=True)
    experiment_name: str | None = key(None, "Name of the experiment.")
    experiment_key: str | None = key(None, "Key of an existing experiment.")
    online: bool | None = key(None, "Online or offline; null: Comet's default.")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Attach to or create an experiment.")


class RunLog(ConfigSection):
    """`run_log`: input of `shardwise report`; every rank writes its own files."""

    enabled: bool = key(False, "Write the run log.")
    path: str | None = key(
        None,
        "Directory of this run, the same on all ranks; null: runs/DATE-TIME where the job is started.",
        min_length=1,
    )
    every: Int = key(1, "Steps from one row to the next.", gt=0)
    plan: bool = key(
        True, "Plan memory by category first, to compare it with: a dry run, some 30 ms for each unit of the model."
    )


class Progress(ConfigSection):
    """`progress`: progress of the training, on standard error of the first rank."""

    mode: Literal["auto", "bar", "lines", "off"] | None = key(
        None,
        "A bar, plain lines, or nothing; auto: a bar on a terminal, lines elsewhere. null: auto where `shardwise run` "
        "has started a script that is not written for DeepSpeed, else off.",
    )
    total_steps: Int | None = key(
        None, "Steps until the end; null: `total_num_steps` of the schedule, if it has one.", gt=0
    )
    interval: float = key(10.0, "Seconds from one line to the next.", gt=0)


OnSpike = Literal["warn", "skip", "stop", "rewind", "ignore"]


class AnomalyWatch(ConfigSection):
    """`anomaly_watch`: loss spikes, growing gradients, and the module that first computes infinite or NaN values. Not
    a section of DeepSpeed.
    """

    enabled: bool = key(False, "Watch losses, gradient norms and modules.")
    trace: Literal["off", "after", "always"] = key(
        "after",
        "Watch what modules hand on, to name the one in which values become infinite or NaN: never, for `trace_steps` "
        "steps after one whose gradients were not finite, or always, which names the first one too.",
    )
    trace_steps: Int = key(100, "Steps for which modules are watched after one whose gradients were not finite.", gt=0)
    loss_spike: OnSpike = key(
        "warn",
        "A mean loss far above the last ones: warn; skip the step; stop before the update; rewind to the copy in "
        "memory (`checkpoint.memory_copies`); do not look.",
    )
    grad_norm_spike: OnSpike = key("warn", "The same of a gradient norm.")
    window: Int = key(100, "Steps with which a value is compared.", ge=4)
    min_steps: Int = key(30, "Steps before the first value is judged.", ge=3)
    threshold: float = key(
        8.0, "Deviations above the median of the window from which a value is a spike (1.4826 MAD is one).", gt=0
    )
    max_rewinds: Int = key(3, "Most rewinds; the next anomaly that requests one ends the run.", gt=0)

    def contradictions(self, at: At) -> Contradictions:
        """Yield a minimum that the window never reaches."""
        if self.min_steps > self.window:
            message = (
                f"is {self.min_steps}, and no more than {at('window')} = {self.window} steps are ever compared, so no "
                "value would be judged; lower it or widen the window"
            )
            yield "min_steps", message, ConflictError
