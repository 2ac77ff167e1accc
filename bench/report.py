"""Tables of the README and the docs from the files in bench/results.

    python bench/report.py README.md docs/numbers.md docs/convergence.md docs/pipeline.md docs/gpu.md docs/frameworks.md
        docs/inference.md docs/local-sgd.md docs/memory.md docs/model-compression.md docs/unequal.md docs/zeropp.md
        docs/articles.md docs/sparse-attention.md docs/kernels.md

A page has a table between `<!-- table NAME -->` and `<!-- /table -->`; everything else is written by hand. Figures that
have not been measured are "-". `<!-- table machine -->` names the machine of most tables of a page; the others name
theirs. Plots that a page shows are copied beside it into images/.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness import RESULTS, Row, load

BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NAMES = {"alone": "no communication"}
V100_PEAK = 125e12
"""FLOP/s in fp16 of the card that the papers on offloading have used."""


class C(NamedTuple):
    """A column of a table.

    Attributes:
        head: its title.
        value: a metric, or a template of metrics such as "{step_s:.2f} s".
        where: settings of the rows that it is made of.
        fold: which of several rows counts: "first", "min", "max", or their "sum", "count" or "join".
    """

    head: str
    value: str
    where: Mapping[str, Any] = {}
    fold: str = "first"


@dataclass(frozen=True)
class Table:
    """A table: a row for each different value of the columns of `by`.

    Attributes:
        files: names of result files; rows have the name of theirs as "file".
        columns: in order.
        by: values that tell rows of the table apart.
        only: systems that have a row, measured or not; default: those of the files.
        keep: rows of the files that count.
        turned: the table has a row for each column.
    """

    files: Sequence[str]
    columns: Sequence[C]
    by: Sequence[str] = ("system",)
    only: Sequence[str] = ()
    keep: Callable[[Row], bool] = field(default=lambda row: True)
    turned: bool = False

    def lines(self, folder: Path) -> list[str]:
        """Return the lines of the table in Markdown."""
        records = [(name, record) for name in self.files if (record := load(folder, name))]
        if not records and not self.only:
            return ["Not measured yet."]
        rows = [{**row, "file": name} for name, record in records for row in record["rows"]]
        groups: dict[tuple[Any, ...], list[Row]] = {(name,): [] for name in self.only}
        for row in filter(self.keep, rows):
            key = tuple(row.get(name) for name in self.by)
            if not self.only or key in groups:
                groups.setdefault(key, []).append(row)
        columns = [
            c for c in self.columns if self.only or any(cell(c, own) != "-" for own in groups.values()) or not groups
        ]
        cells = [
            [cell(c, own) if own or c.value != "system" else key[0] for c in columns] for key, own in groups.items()
        ]
        failed = [f"*{row['system']}*: {row['failed']}" for own in groups.values() for row in own if "failed" in row]
        if self.turned:
            cells = [[c.head, *found] for c, found in zip(columns, zip(*cells, strict=True), strict=True)]
            return grid(["", *("" for _ in groups)], cells)
        return [*grid([c.head for c in columns], cells), *(line for text in failed for line in ("", text))]


def cell(column: C, rows: Sequence[Row]) -> str:
    """Return a cell made of the rows of a group."""
    wanted = [row for row in rows if all(row.get(key) == value for key, value in column.where.items())]
    if column.fold == "count":
        return str(len(wanted))
    if "{" in column.value:
        texts = []
        for row in wanted:
            try:
                texts.append(column.value.format(**row))
            except (KeyError, TypeError):
                continue
        if column.fold in ("min", "max") and texts:
            return (min if column.fold == "min" else max)(texts, key=float)
        return texts[0] if texts else "-"
    values = [row[column.value] for row in wanted if row.get(column.value) is not None]
    if not values:
        return "-"
    if column.fold == "join":
        return "; ".join(sorted(set(map(str, values))))
    return shown({"first": lambda v: v[0], "min": min, "max": max, "sum": sum}[column.fold](values))


def shown(value: Any) -> str:
    """Return a figure with as many digits as are worth reading.

    >>> [shown(value) for value in (0.256, 12.34, 1234.5, 12, "alone")]
    ['0.26', '12.3', '1234', '12', 'no communication']
    """
    if not isinstance(value, float):
        return NAMES.get(value, str(value))
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


# -- the tables --------------------------------------------------------------------------------------------------------

SYSTEM = C("", "system")
README_SYSTEMS = ("DDP", "FSDP2", "DeepSpeed 2", "DeepSpeed 3", *(f"shardwise {stage}" for stage in range(4)))
STEP = {
    "fp32": "time_zero_27M_fp32_2",
    "bf16": "time_zero_27M_bf16_2",
    "accumulation 4": "time_zero_27M_fp32_2_accumulation4",
}
RANKS = {world: f"time_zero_7M_fp32_{world}" for world in (1, 2, 4, 8)}
MEMORY, PIPELINE = "memory_zero_98M_bf16_4", ("pipeline_idle_m16", "pipeline_idle_m8_uneven")
ELSEWHERE = [f"time_{place}_98M_bf16_{world}" for place in ("host", "disk") for world in (1, 2)]
TIERS = ("device", "host", "disk")


def of_files(value: str, files: Mapping[Any, str], form: str = "{}") -> list[C]:
    """Return a column of a metric for each file; `form` makes its title of the file's label."""
    return [C(form.format(label), value, {"file": name}) for label, name in files.items()]


def bytes_a_parameter(*columns: tuple[str, str]) -> list[C]:
    """Return columns of metrics in bytes a parameter."""
    return [C(head, f"{metric}_bytes_a_parameter") for head, metric in columns]


TABLES: dict[str, Table] = {
    "readme": Table(
        [STEP["fp32"], STEP["bf16"], MEMORY],
        [
            SYSTEM,
            C("step time, fp32", "ratio", {"file": STEP["fp32"]}),
            C("step time, bf16", "ratio", {"file": STEP["bf16"]}),
            C("peak memory, bytes per parameter", "peak_bytes_a_parameter"),
        ],
        only=README_SYSTEMS,
    ),
    "step_time": Table(
        list(STEP.values()),
        [
            SYSTEM,
            *of_files("median_ms", STEP, "{}, ms"),
            *of_files("ratio", STEP, "{}, ratio"),
        ],
    ),
    "ranks": Table(
        list(RANKS.values()),
        [SYSTEM, *of_files("ratio", RANKS, "ratio, {}"), *of_files("blocked_share", RANKS, "blocked, {}")[1:]],
    ),
    "inference": Table(
        ["inference"],
        [
            C("weights", "system"),
            C("tokens/s", "tokens_per_s"),
            *(C(f"{kind}, MiB a rank", f"{kind}_mib") for kind in ("weights", "resident", "peak")),
        ],
    ),
    "groups": Table(
        ["time_groups_27M_bf16_4_accumulation4"],
        [
            SYSTEM,
            C("step, ms", "median_ms"),
            C("ratio", "ratio"),
            *bytes_a_parameter(("within", "within"), ("between", "between")),
        ],
    ),
    "tensor": Table(
        [f"{what}_tensor_{size}_fp32_4" for size in ("27M", "53M") for what in ("time", "memory")],
        [
            SYSTEM,
            C("model", "model"),
            C("step, ms", "median_ms"),
            C("ratio", "ratio", {"what": "time"}),
            C("processor, ratio", "processor_ratio"),
            C("peak, bytes per parameter", "peak_bytes_a_parameter"),
            C("ratio", "ratio", {"what": "memory"}),
            C("loss differs by", "{loss_differs:.0e}"),
        ],
        by=("model", "system"),
    ),
    "longest": Table(
        ["longest_sequence_2", "longest_sequence_4"],
        [
            SYSTEM,
            C("ranks", "ranks"),
            C("limit, MiB", "limit_mib"),
            C("tokens", "tokens"),
            C("over plain", "over_plain"),
            C("peak, MiB", "peak_mib"),
            C("step, s", "step_s"),
        ],
        by=("ranks", "system"),
    ),
    "memory": Table(
        [MEMORY],
        [
            SYSTEM,
            *bytes_a_parameter(
                ("resident peak", "peak"),
                ("resident while building", "building"),
                ("tensors, peak", "tracked"),
                ("tensors while building", "tracked_building"),
            ),
        ],
    ),
    "largest_batch": Table(
        ["largest_batch_27M_fp32_2"],
        [
            SYSTEM,
            C("batch", "batch_per_rank"),
            C("peak, MiB", "peak_mib"),
            C("training step, ms", "train_ms"),
            C("samples/s", "train_samples_per_s"),
            C("evaluation, ms", "eval_ms"),
            C("samples/s", "eval_samples_per_s"),
        ],
    ),
    "imports": Table(
        ["start_zero_27M_fp32_2"],
        [C("import", "system"), C("s over torch", "over_torch_s")],
        keep=lambda row: row["of"] == "import",
    ),
    "start": Table(
        ["start_zero_27M_fp32_2"],
        [SYSTEM, C("build, s", "build_s"), C("first step, s", "first_step_s")],
        keep=lambda row: row["of"] == "first step",
    ),
    "monitoring": Table(
        ["monitoring_7M_fp32_1", "monitoring_7M_fp32_2"],
        [
            C("switched on", "system"),
            C("ranks", "ranks"),
            C("processor, ms", "processor_ms"),
            C("over nothing, %", "processor_over_percent"),
            C("step, ms", "median_ms"),
            C("over nothing, %", "over_percent"),
            C("processor, half of the rounds, %", "{half_of_rounds[0]:.1f} to {half_of_rounds[1]:.1f}"),
        ],
        by=("ranks", "system"),
    ),
    "growth_layers": Table(
        ["growth_layers_2"],
        [
            C("microseconds a layer", "system"),
            *(C(f"{count} layers", "a_layer_us", {"layers": count}) for count in (4, 8, 16, 32, 64, 96)),
        ],
    ),
    "growth_lengths": Table(
        ["growth_lengths_2"],
        [SYSTEM, C("early, MiB", "early_mib"), C("late, MiB", "late_mib"), C("grown, MiB", "grown_mib")],
    ),
    "host_time": Table(
        ["host_time"],
        [
            SYSTEM,
            C("precision", "dtype"),
            C("ranks", "ranks"),
            *(C(f"{phase}, ms", f"{phase}_ms") for phase in ("forward", "backward", "step", "whole")),
            C("over alone", "over_alone"),
            C("over FSDP2", "over_fsdp2"),
        ],
        by=("dtype", "ranks", "system"),
        keep=lambda row: row["as_device"],
    ),
    "checkpoint_io": Table(
        ["checkpoint_io_1", "checkpoint_io_2"],
        [
            SYSTEM,
            C("ranks", "ranks"),
            C("save, GB/s", "save_gb_per_s"),
            C("load, GB/s", "load_gb_per_s"),
            C("load cold, GB/s", "load_cold_gb_per_s"),
            C("save, processor s/GB", "save_processor_s_per_gb"),
            C("load, processor s/GB", "load_processor_s_per_gb"),
            C("save, memory", "save_memory"),
            C("load, memory", "load_memory"),
        ],
        by=("ranks", "system"),
    ),
    "checkpoint_async": Table(
        ["checkpoint_async_2", "checkpoint_async_2_cached"],
        [
            SYSTEM,
            C("written", "writer"),
            C("training stops, s", "blocked_s"),
            C("in copies", "over_copy"),
            C("of a save in the foreground", "over_foreground"),
            C("a step meanwhile", "slowdown"),
            C("GB/s", "written_gb_per_s"),
            C("first save, in copies", "first_over_copy"),
        ],
        by=("writer", "system"),
        keep=lambda row: row["writer"] == "direct" or row["system"] == "background",
    ),
    "memory_copies": Table(
        ["memory_copies_2"], [SYSTEM, C("seconds", "slowest_s"), C("GB/s and rank", "a_rank_gb_per_s")]
    ),
    "checkpoint_memory": Table(
        ["checkpoint_memory"],
        [
            SYSTEM,
            C("ranks", "ranks"),
            C("held after", "held"),
            C("highest", "highest"),
            C("above what is held", "above"),
        ],
        by=("ranks", "system"),
    ),
    "matrix": Table(
        ["checkpoint_matrix"],
        [C("optimizers", "system", fold="join"), C("pairs, each", "pairs"), C("wrong", "wrong")],
        by=("pairs", "wrong"),
    ),
    "deepspeed_import": Table(
        ["deepspeed_import"],
        [
            C("saved by DeepSpeed", "kind"),
            C("stages", "saved_stage", fold="join"),
            C("compared with", "against"),
            C("loads", "", fold="count"),
            C("elements", "compared", fold="sum"),
            C("differ", "differing", fold="sum"),
            C("losses", "{loss_gap:.0e}", fold="max"),
        ],
        by=("kind", "against"),
    ),
    "soak": Table(
        ["soak"],
        [
            C("killed while saving, while training", "{killed_saving}, {killed_training}"),
            C("ranks, steps", "{ranks}, {steps}"),
            C("resumed from memory, from disk", "{resumed_from_memory}, {resumed_from_disk}"),
            C("states lost, different or left behind", "lost"),
            C("recovery, s: median, worst", "{recovery_median_s:.2f}, {recovery_worst_s:.2f}"),
            C("of it beyond the start of processes", "{beyond_start_median_s:.2f}, {beyond_start_worst_s:.2f}"),
        ],
        turned=True,
    ),
    "hostile": Table(
        ["hostile"],
        [
            C("minutes", "minutes"),
            C("runs of training, steps", "{episodes}, {steps}"),
            C("calls by strangers, kinds, ports", "{calls}, {kinds}, {ports}"),
            C("units fetched over the side channel", "rescues"),
            C("runs that differ from the undisturbed one", "episodes_that_differ"),
            C("resident size, first and last, MiB", "{resident_mib[0]}, {resident_mib[2]}"),
        ],
        turned=True,
    ),
    "cpu_adam": Table(
        ["cpu_adam"],
        [
            SYSTEM,
            C("bytes", "bytes"),
            C("median, ns", "median_ns"),
            C("lowest, ns", "lowest_ns"),
            C("of a copy's", "over_copy"),
        ],
    ),
    "offload_step": Table(
        ["offload_step"],
        [SYSTEM, C("GB/s", "moved_gb_per_s"), C("of a copy's", "of_copy"), C("of a triad's", "of_triad")],
    ),
    "offload_disk": Table(
        ["offload_disk"],
        [
            SYSTEM,
            C("GB/s", "moved_gb_per_s"),
            C("highest, GB/s", "highest_gb_per_s"),
            C("of the fastest loop's", "of_plain"),
        ],
    ),
    "offload_overlap": Table(
        ["offload_overlap"],
        [
            SYSTEM,
            C("resident, ms", "resident_ms"),
            C("moving, ms", "moving_ms"),
            C("together, ms", "with_ms"),
            C("hidden", "hidden"),
            C("of waiting", "hidden_of_waiting"),
        ],
    ),
    "offload_time": Table(
        ELSEWHERE,
        [
            SYSTEM,
            C("turns of", "set"),
            C("ranks", "ranks"),
            C("step, ms", "median_ms"),
            C("over resident", "ratio"),
            C("over DeepSpeed", "over_deepspeed"),
            C("passes, ms", "passes_ms"),
            C("update, ms", "update_ms"),
        ],
        by=("set", "ranks", "system"),
    ),
    "offload_memory": Table(
        ["memory_host_98M_bf16_1", "memory_disk_98M_bf16_1"],
        [
            SYSTEM,
            *bytes_a_parameter(
                ("resident peak", "peak"),
                *((f"{tier}, {kind}", f"{kind}_{tier}") for tier in TIERS for kind in ("planned", "counted")),
            ),
        ],
    ),
    **{
        f"convergence_{group}": Table(
            [f"convergence_{group}"],
            [
                SYSTEM,
                C("training loss", "{last_loss:.3f}"),
                C("held-out loss", "{held_out:.3f}"),
                C("bytes sent, all steps", "{sent_bytes_a_parameter:.3f}"),
                C("bytes sent, last steps", "{last_sent_bytes_a_parameter:.3f}"),
            ],
        )
        for group in ("onebit", "compression", "zeropp", "precision", "optimizers")
    },
    "distillation": Table(
        ["distillation"],
        [SYSTEM, C("parameters", "{parameters:,}"), C("steps", "{steps[-1]}"), C("held-out loss", "{held_out:.3f}")],
    ),
    "convergence_local_sgd": Table(
        ["convergence_local_sgd"],
        [
            SYSTEM,
            C("training loss", "{last_loss:.3f}"),
            C("held-out loss", "{held_out:.3f}"),
            C("bytes sent to other replicas", "{replicas_sent_bytes_a_parameter:.3f}"),
        ],
    ),
    "curriculum": Table(
        ["curriculum"],
        [
            SYSTEM,
            C("tokens to the loss", "tokens_to_target"),
            C("held-out loss at the end", "{held_out:.3f}"),
            C("steps", "steps"),
            C("time, s", "{taken_s:.0f}"),
        ],
    ),
    "layer_drop": Table(
        ["layer_drop"],
        [SYSTEM, C("layers computed", "{kept:.2f}"), C("step, ms", "median_ms")],
    ),
    "plan_memory_errors": Table(
        ["plan_memory_errors"],
        [
            C("", "system"),
            C("error: median", "{median_error_percent:.2f} %"),
            C("up to 2 %", "{within}"),
            C("largest", "{largest_error_percent:.1f} %"),
            C("fits or not, right", "{right} of {of}"),
        ],
    ),
    "plan_steps_errors": Table(
        ["plan_steps_errors"],
        [
            C("", "system"),
            C("median error", "{median_error_percent:.1f} %"),
            C("90 % have less than", "{high_error_percent:.1f} %"),
            C("pairs in the right order", "{pairs_percent:.0f} %"),
            C("s to measure the machine", "{machine_s:.0f}"),
        ],
    ),
    "articles": Table(
        ["articles"],
        [C("claim", "system"), C("the article", "says"), C("here", "here"), C("made by", "how")],
    ),
    "unequal_4": Table(
        ["unequal_4"],
        [
            C("one rank of 4 takes", "system"),
            C("ms per step, equal parts", "{equal_ms:.0f}"),
            C("by speed", "{unequal_ms:.0f}"),
            C("of it for samples, at least", "{best_ms:.0f}"),
        ],
    ),
    **{
        f"{prefix}sparse_attention": Table(
            [f"{prefix}sparse_attention"],
            [
                C("layout", "system"),
                *(
                    C(f"{tokens // 1024}k: {head}", value, {"tokens": tokens})
                    for tokens in (4096, 8192, 16384)
                    for head, value in (("share", "{share:.0%}"), ("s", "{time_s:.2f}"), ("MiB", "{memory_mib:.0f}"))
                ),
            ],
        )
        for prefix in ("", "gpu_")
    },
    **{
        f"{prefix}kernels": Table(
            [f"{prefix}kernels"],
            [
                C("kernel", "system"),
                *(
                    C(f"{way}, ms", f"{{{way}_ms:.2f}}")
                    for way in ("eager", "compiled", "foreach", "fused", "shardwise")
                ),
                C("compiler", "compiler"),
            ],
        )
        for prefix in ("", "gpu_")
    },
    "machines_throttled": Table(
        ["machines_throttled"],
        [
            C("", "system"),
            C("MB per machine and step", "{sent_mb:.1f}"),
            C("s per step", "{step_s:.2f}"),
            C("with 20 ms", "{far_step_s:.2f}"),
        ],
    ),
    "machines_start": Table(["machines_start"], [C("4 ranks on", "system"), C("s to the first step", "{start_s:.1f}")]),
    "machines_lost": Table(
        ["machines_lost"],
        [
            C("", "system"),
            C("times", "count"),
            C("s until three machines train again: median", "{recovery_s:.1f}"),
            C("longest", "{longest_s:.1f}"),
            C("median without start of processes and imports", "{beyond_start_s:.1f}"),
        ],
    ),
    "pipeline_idle": Table(
        [PIPELINE[0]],
        [
            C("", "`{system}`"),
            *(C(f"{count} ranks", "{step_s:.2f} s, {idle_share:.0%}", {"ranks": count}) for count in (2, 4, 6, 8)),
            C(
                "activations on 8 ranks, MB",
                "{activations_mb:.1f} ({simulated_activations_mb:.1f})",
                {"ranks": 8},
            ),
        ],
    ),
    "pipeline_simulated": Table(
        PIPELINE,
        [
            C("times of layers", "layers"),
            C("step over the simulated one, least", "ratio", fold="min"),
            C("most", "ratio", fold="max"),
            C("idle shares differ by, points", "{idle_differs_percent:.1f}", fold="max"),
            C("those of single ranks", "{rank_idle_differs_percent:.1f}", fold="max"),
        ],
        by=("layers",),
    ),
    "pipeline": Table(
        ["pipeline_27M_fp32_2_m8"],
        [SYSTEM, C("step", "ratio"), C("memory of a step", "{memory_mb:.0f} MB"), C("idle", "{idle_share:.0%}")],
    ),
    "programs": Table(
        ["programs"],
        [
            C("Program", "system"),
            C("Launcher", "`{launcher}`"),
            C("Stage", "stage"),
            C("Precision", "precision"),
            C("Last loss", "{loss:.5f}"),
            C("Without", "{without:.5f}"),
            C("Largest relative difference", "{difference:.1e}"),
        ],
        by=("system", "launcher", "stage", "precision"),
    ),
}

# -- one CUDA device ---------------------------------------------------------------------------------------------------

TRAINED = [
    SYSTEM,
    C("step, ms", "median_ms"),
    C("over plain", "ratio"),
    C("launched after, ms", "launch_ms"),
    C("update, ms", "update_ms"),
    C("launches", "launches"),
    C("tokens/s", "tokens_per_s"),
    C("TFLOP/s", "tflops"),
    C("of the peak", "of_peak"),
    *(C(f"{kind}, GiB", f"{kind}_gib") for kind in ("held", "allocated", "reserved")),
    C("slack", "slack"),
]
OFFLOADED = [
    C("", "model"),
    C("setting", "system"),
    C("parameters, 10^9", "billions"),
    C("batch", "rows"),
    *(C(f"{part}, s", f"{part}_s") for part in ("step", "passes", "update")),
    C("tokens/s", "tokens_per_s"),
    C("TFLOP/s", "tflops"),
    *(C(f"{kind}, GiB", f"{kind}_gib") for kind in ("planned_device", "allocated", "host")),
]
GPU_STEP = {name: f"gpu_one_{name.replace(' ', '_')}_1" for name in ("163M bf16", "163M fp16", "1.4B bf16")}
IMAGINED = "gpu_imagined_163M_bf16_8"
TABLES |= {
    "gpu_device": Table(
        ["gpu_device"],
        [SYSTEM, C("TFLOP/s", "tflops"), C("GB/s", "moved_gb_per_s"), C("microseconds", "launched_us")],
    ),
    **{f"gpu_{name.replace(' ', '_')}": Table([file], TRAINED) for name, file in GPU_STEP.items()},
    "gpu_imagined": Table([IMAGINED], TRAINED),
    "gpu_host": Table(
        ["gpu_host_time"],
        [
            SYSTEM,
            C("precision", "dtype"),
            C("ranks", "ranks"),
            *(C(phase, f"{phase}_ms") for phase in ("forward", "backward", "step", "whole")),
            C("launches a layer", "launches"),
        ],
        by=("dtype", "ranks", "system"),
    ),
    "gpu_optimizer": Table(
        ["gpu_optimizer"],
        [
            SYSTEM,
            C("bytes an element", "bytes"),
            C("ms", "median_ms"),
            C("GB/s", "moved_gb_per_s"),
            C("of a copy's", "of_copy"),
        ],
    ),
    "gpu_checkpoint": Table(
        ["gpu_checkpoint"],
        [
            SYSTEM,
            C("blocked, s", "blocked_s"),
            C("first time, s", "first_s"),
            C("written, s", "written_s"),
            C("slowdown", "slowdown"),
            C("GB/s", "written_gb_per_s"),
        ],
    ),
    "gpu_cost": Table(
        ["gpu_offload_cost"],
        [*OFFLOADED, C("over resident", "over_resident"), C("over DeepSpeed", "over_deepspeed")],
    ),
    "gpu_limited": Table(
        ["gpu_offload_limited"],
        [C("limit, GiB", "limit_gib"), *OFFLOADED, C("as a V100", "as_v100")],
        by=("limit_gib", "model", "system"),
    ),
    "gpu_largest": Table(["gpu_offload_largest"], OFFLOADED, by=("model", "system")),
    "gpu_trace": Table(
        ["gpu_trace"],
        [
            SYSTEM,
            C("computes", "{computing:.0%}"),
            C("does anything", "{anything:.0%}"),
            C("gap, us", "gap_us"),
            C("the host is in", "host_in"),
            C("other streams", "others_run"),
            C("next", "`{next:.48s}`"),
        ],
        by=("system", "gap"),
    ),
}


class Target(NamedTuple):
    """A figure that is asked of one CUDA device, with the one that was found; `least`: the bound is the least."""

    what: str
    asked: float
    found: float | None
    least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the bound; None if it was not measured."""
        if self.found is None:
            return None
        return self.found >= self.asked if self.least else self.found <= self.asked

    def cells(self) -> list[str]:
        """Return a row of a table."""
        met = {None: "not measured", True: "yes", False: "**no**"}[self.met]
        bound = f"{'>=' if self.least else '<='} {self.asked:g}"
        return [self.what, bound, "-" if self.found is None else f"{self.found:.3g}", met]


def targets(folder: Path) -> list[Target]:
    """Return what is asked of one device, and what was found."""

    def values(file: str, metric: str, **where: Any) -> list[float]:
        rows = (load(folder, file) or {"rows": []})["rows"]
        return [row[metric] for row in rows if metric in row and where.items() <= row.items()]

    def value(file: str, metric: str, over: str = "", **where: Any) -> float | None:
        first, other = values(file, metric, **where), values(file, metric, **{**where, "system": over})
        return None if not first or (over and not other) else first[0] / other[0] if over else first[0]

    found = []
    for size in ("163M", "1.4B"):
        step = GPU_STEP[f"{size} bf16"]
        found.append(Target(f"step of {size}, over plain PyTorch's", 1.02, value(step, "ratio", system="shardwise")))
        forced = value(step, "ratio", "FSDP2", system="shardwise 3 forced")
        found.append(Target(f"step of {size}, stage 3 forced, over FSDP2's", 1.00, forced))
    imagined = value(IMAGINED, "ratio", "FSDP2", system="shardwise 3")
    found.append(Target("step of 163M, stage 3, one of 8 imagined ranks, over FSDP2's", 1.00, imagined))
    host = value("gpu_host_time", "whole_ms", "FSDP2", system="shardwise 3", dtype="bf16")
    found.append(Target("host's time a layer, stage 3, over FSDP2's", 1.00, host))
    adam = value("gpu_optimizer", "of_copy", asked=True)
    found.append(Target("AdamW's step, of what a copy reaches", 0.90, adam, least=True))
    rows = [row for file in (*GPU_STEP.values(), IMAGINED) for row in (load(folder, file) or {"rows": []})["rows"]]
    slack = [row["slack"] for row in rows if "slack" in row and row["system"].startswith("shardwise")]
    found.append(Target("reserved and never allocated, over reserved, random lengths", 0.05, max(slack, default=None)))
    speed = values("gpu_offload_limited", "as_v100", model="13B", limit_gib=32.0)
    what = "13 B under 32 GiB, TFLOP/s on a card as fast as a V100"
    found.append(Target(what, 30.0, max(speed, default=None), least=True))
    ratios = values("gpu_offload_cost", "over_deepspeed")
    found.append(Target("step with state on the host, over DeepSpeed's", 0.60, max(ratios, default=None)))
    return found


# -- pages -------------------------------------------------------------------------------------------------------------


def where(record: Row) -> str:
    """Return the machine of a record and its versions."""
    machine = record["machine"]
    versions = f"torch {machine['torch']}"
    if machine.get("deepspeed"):
        versions += f", DeepSpeed {machine['deepspeed']}"
    return f"{machine.get('gpu') or machine['processor']}, {machine['cores']} cores, {versions}"


def page(text: str, folder: Path) -> str:
    """Return a page with its tables."""
    names = [name for _, name, _ in BLOCK.findall(text)]
    places = {
        name: list(dict.fromkeys(where(record) for file in TABLES[name].files if (record := load(folder, file))))
        for name in names
        if name in TABLES
    }
    counts = Counter(place for own in places.values() for place in own)
    usual = max(counts, key=lambda place: (place.count(","), counts[place]), default="no machine yet")

    def block(found: re.Match[str]) -> str:
        name = found[2]
        if name == "machine":
            lines = [f"Unless a section says otherwise, measured on {usual}."]
        elif name == "gpu_targets":
            lines = grid(["", "asked", "found", "met"], [target.cells() for target in targets(folder)])
        else:
            lines = TABLES[name].lines(folder)
            for place in places[name]:
                if not usual.startswith(place) or "machine" not in names:
                    lines += ["", f"Measured on {place}."]
        return "\n".join([found[1], *lines, "", found[3]])

    return BLOCK.sub(block, text)


def main() -> None:
    """Write the pages and copy the plots that they show; without pages print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--targets", action="store_true", help="print the figures that are asked of a CUDA device")
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args()
    if options.targets:
        print(*("{:66s} asked {:8s} found {:8s} {}".format(*one.cells()) for one in targets(options.results)), sep="\n")
        return
    if not options.pages:
        for name, table in TABLES.items():
            print(f"{name}:", *table.lines(options.results), "", sep="\n")
    for path in options.pages:
        text = page(path.read_text(), options.results)
        path.write_text(text)
        for name in re.findall(r"\]\([./\w]*images/(\w+\.(?:png|svg))\)", text):
            if (options.results / name).exists() and path.parent.name == "docs":
                (path.parent / "images").mkdir(exist_ok=True)
                shutil.copyfile(options.results / name, path.parent / "images" / name)


if __name__ == "__main__":
    main()
