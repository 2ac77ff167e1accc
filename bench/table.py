"""Write the tables of numbers in the README and the docs from the files in bench/results.

    python bench/table.py README.md docs/numbers.md

A page has its tables between the lines <!-- numbers --> and <!-- /numbers -->: the README the most important ones, any
other page all of them, with the plots, which are copied beside it into images/. What has not been measured is "-".
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu import FILE as GPU
from _jobs import parser, read
from gpu_page import page_lines
from pipeline_page import lines_of

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
NAMES = {"alone": "no communication"}
README_SYSTEMS = ("DDP", "FSDP2", "DeepSpeed 2", "DeepSpeed 3", *(f"shardwise {stage}" for stage in range(4)))
PLOTS = {
    "time_and_memory": "Step time and peak memory of each system",
    "communication": "Step time over DDP's, and the part of it blocked in collectives, on 1 to 8 ranks",
    "largest_batch": "Largest batch under the limit, and samples trained a second",
    "offload_step": "Memory of the device, of the host and on the disk over one step",
    "growth": "Processor time of a step over the number of layers, by number of layers",
    **{
        f"convergence_{group}": "Training loss by steps, and bytes sent"
        for group in ("onebit", "compression", "zeropp", "precision", "optimizers")
    },
}

Record = dict[str, Any]
Cell = tuple[str, str, str]
"""Of a table: what it is called, name of the result file, field of its rows."""


class Results:
    """The result files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Record | None:
        """Return a result file, or None."""
        path = self.folder / f"{name}.json"
        found: Record | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def value(self, name: str, system: str, field: str) -> float | None:
        """Return a figure of a system, or None if it was not measured."""
        record = self.find(name)
        rows = record["rows"] if record else []
        return next((row.get(field) for row in rows if row.get("system") == system), None)


def shown(value: float | None) -> str:
    """Return a number with as many digits as are worth reading, or "-".

    >>> [shown(value) for value in (None, 0.256, 12.34, 1234.5, 12)]
    ['-', '0.26', '12.3', '1234', '12']
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)  # a count
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def by_system(results: Results, systems: Sequence[str], cells: Sequence[Cell]) -> list[str]:
    """Return a table with a row for each system; one of which nothing was measured is left out."""
    rows = []
    for system in systems:
        values = [results.value(name, system, field) for _, name, field in cells]
        if any(value is not None for value in values):
            rows.append([NAMES.get(system, system), *map(shown, values)])
    return grid(["", *(head for head, _, _ in cells)], rows)


def paragraphs(*texts: str) -> list[str]:
    """Return paragraphs, each after an empty line, in lines of at most 120 characters."""
    return [line for text in texts for line in ("", textwrap.fill(text, 120, break_on_hyphens=False))]


def where(record: Record) -> str:
    """Return a sentence about the machine of a record and its versions."""
    machine = record["machine"]
    versions = f"torch {machine['torch']}"
    if machine.get("deepspeed"):
        versions += f", DeepSpeed {machine['deepspeed']}"
    return f"{machine.get('gpu') or machine['processor']}, {machine['cores']} cores, {versions}"


# -- the README --------------------------------------------------------------------------------------------------------

README_CELLS: list[Cell] = [
    ("step time, fp32", "step_time_27M_fp32_2", "ratio"),
    ("step time, bf16", "step_time_27M_bf16_2", "ratio"),
    ("peak memory, bytes per parameter", "memory_98M_bf16_4", "peak"),
]
README_PLOT = "time_and_memory"


def short(results: Results) -> str:
    """Return the README's table and plot with what they were measured on."""
    lines = []
    for system in README_SYSTEMS:
        values = [results.value(name, system, field) for _, name, field in README_CELLS]
        lines.append([NAMES.get(system, system), *map(shown, values)])
    table = grid(["", *(head for head, _, _ in README_CELLS)], lines)
    record = results.find("step_time_27M_fp32_2")
    spread = [
        f"single steps of DDP took {row['lowest_ms']:.0f} to {row['highest_ms']:.0f} ms, so a few per cent mean nothing"
        for row in (record["rows"] if record else [])
        if row["system"] == "DDP"
    ]
    about = (
        "Numbers after a name are ZeRO stages. Step times are relative to DistributedDataParallel (GPT of 26 million "
        "parameters, AdamW, 2 ranks); memory is the highest resident size above the bare process (GPT of 98 million "
        "parameters, AdamW in bf16, 4 ranks, batch 1 x 64)."
    )
    place = f"Measured on CPU ranks over Gloo: {'; '.join([where(record), *spread])}." if record else ""
    no_gpu = "" if results.find(GPU) else " Nothing has been measured on GPUs."
    plot = (results.folder / f"{README_PLOT}.png").exists()
    picture = ["", f"![{PLOTS[README_PLOT]}](docs/images/{README_PLOT}.png)"] if plot else []
    return "\n".join(table + paragraphs(about, place + no_gpu) + picture)


# -- the page of all numbers -------------------------------------------------------------------------------------------

STEP_FILES = {
    "fp32": "step_time_27M_fp32_2",
    "bf16": "step_time_27M_bf16_2",
    "accumulation 4": "step_time_27M_fp32_2_accumulation4",
}
RANK_FILES = {world: f"step_time_7M_fp32_{world}" for world in (1, 2, 4, 8)}
STARTUP = "startup_27M_fp32_2"
MONITORING = {world: f"monitoring_7M_fp32_{world}" for world in (1, 2)}
COLLECTIVE_BYTES = (64 * 1024, 32 * 1024 * 1024)
Table = Callable[[Results], list[str]]


def compare(*cells: Cell) -> Table:
    """Return a function that makes a table with a row for each system of the files."""

    def table(results: Results) -> list[str]:
        records = [record for _, name, _ in cells if (record := results.find(name))]
        systems = dict.fromkeys(row["system"] for record in records for row in record["rows"])
        return by_system(results, list(systems), cells)

    return table


def startup(results: Results) -> list[str]:
    """Return the tables of imports and of first steps."""
    record = results.find(STARTUP)
    imports = record["imports"] if record else []
    first = compare(("build, s", STARTUP, "build_s"), ("first step, s", STARTUP, "first_step_s"))(results)
    rows = [[row["import"], shown(row["seconds_over_torch"])] for row in imports]
    return [*grid(["import", "s over torch"], rows), "", *first]


def layers(results: Results) -> list[str]:
    """Return the table of processor time by number of layers."""
    record = results.find("growth_layers_2")
    rows = record["rows"] if record else []
    depths = list(rows[0]["microseconds_per_layer"]) if rows else []
    lines = [[row["system"], *(shown(row["microseconds_per_layer"][depth]) for depth in depths)] for row in rows]
    return grid(["microseconds a layer", *(f"{depth} layers" for depth in depths)], lines)


def host_time(results: Results) -> list[str]:
    """Return the table of what a layer costs the host."""
    record = results.find("host_time")
    phases = ("forward_ms", "backward_ms", "step_ms", "whole_ms", "over_alone", "over_fsdp2")
    lines = [
        [
            row["system"],
            row["dtype"],
            str(row["world"]),
            *(shown(row.get(phase)) for phase in phases),
        ]
        for row in (record["rows"] if record else [])
        if row["beside"]
    ]
    head = ["", "precision", "ranks", "forward, ms", "backward, ms", "step, ms", "whole, ms"]
    return grid([*head, "over alone", "over FSDP2"], lines)


def watching(results: Results) -> list[str]:
    """Return the table of what watching a run costs, by number of ranks."""
    lines = []
    for world, name in MONITORING.items():
        record = results.find(name)
        fields = ("processor_ms", "processor_over_percent", "median_ms", "over_percent")
        for row in record["rows"] if record else []:
            rounds = row["processor_over_percent_of_rounds"]  # sorted
            quarter = len(rounds) // 4
            half = f"{rounds[quarter]:.1f} to {rounds[-1 - quarter]:.1f}"
            lines.append([row["system"], str(world), *(shown(row[field]) for field in fields), half])
    head = ["switched on", "ranks", "processor, ms", "over nothing, %", "step, ms", "over nothing, %"]
    return grid([*head, "processor, half of the rounds, %"], lines)


def collectives(results: Results) -> list[str]:
    """Return the table of Gloo collectives."""
    record = results.find("comm_gloo")
    rows = []
    for row in record["rows"] if record else []:
        if row["bytes"] not in COLLECTIVE_BYTES:
            continue
        size = f"{row['bytes'] // 1024} KiB"
        times = [shown(row["ms"][name]["min"]) for name in ("torch", "messages", "memory")]
        rows.append([row["op"], str(row["ranks"]), size, *times])
    return grid(["", "ranks", "buffer", "torch, ms", "messages, ms", "memory, ms"], rows)


def checkpoints(results: Results) -> list[str]:
    """Return the tables of checkpoint speeds: one for each number of ranks."""
    lines: list[str] = []
    for world in (1, 2):
        name = f"checkpoint_io_{world}"
        if results.find(name) is None:
            continue
        cells = [
            (f"{title}{unit}", name, f"{field}{ending}")
            for unit, ending in ((", GB/s", "_gb_per_s"), (", processor s/GB", "_processor"), (", memory", "_memory"))
            for title, field in (("save", "save"), ("load", "load"), ("load cold", "load_cold"))
            if ending == "_gb_per_s" or field != "load_cold"
        ]
        lines += ["", f"On {world} rank{'s' * (world > 1)}:", "", *compare(*cells)(results)]
    return lines[1:]


def loading_memory(results: Results) -> list[str]:
    """Return the table of memory while loading, by stage and number of ranks."""
    record = results.find("checkpoint_memory")
    rows = record["rows"] if record else []
    head = ["", "ranks", "held after", "highest", "above what is held"]
    fields = ("held", "highest", "above")
    return grid(head, [[f"stage {r['stage']}", str(r["ranks"]), *(shown(r[field]) for field in fields)] for r in rows])


def background_saves(results: Results) -> list[str]:
    """Return the table of how long training stands while it saves."""
    head = [
        "",
        "training stops, s",
        "in copies",
        "of a save in the foreground",
        "a step meanwhile",
        "GB/s",
        "first save, in copies",
    ]
    fields = ("blocked", "over_copy", "over_foreground", "slowdown", "gb_per_s", "first_over_copy")
    lines = []
    for name, told in (("checkpoint_async_2", ""), ("checkpoint_async_2_cached", ", cached")):
        record = results.find(name)
        rows = [row for row in record["rows"] if not told or row["save"] == "background"] if record else []
        lines += [[row["save"] + told, *(shown(row.get(field)) for field in fields)] for row in rows]
    return grid(head, lines)


def memory_copies(results: Results) -> list[str]:
    """Return the table of copies of the state in memory."""
    record = results.find("memory_copies_2")
    rows = record["rows"] if record else []
    lines = [[row["operation"], shown(row["seconds"]), shown(row["gb_per_s_and_rank"])] for row in rows]
    return grid(["", "seconds", "GB/s and rank"], lines)


def killed(results: Results) -> list[str]:
    """Return what the soak has shown."""
    record = results.find("soak")
    if record is None:
        return []
    (row,) = record["rows"]
    beyond, whole, source = row["recovery_beyond_process_start_s"], row["recovery_s"], row["resumed_from"]
    lost = len(row["wrong"]) + len(row["differ_from_undisturbed"]) + len(row["left_in_memory"])
    facts = {
        "killed while saving, while training": f"{row['kills']['save']}, {row['kills']['train']}",
        "ranks, steps": f"{row['ranks']}, {row['steps']}",
        "resumed from memory, from disk": f"{source['memory']}, {source['disk']}",
        "states lost, different or left behind": str(lost),
        "recovery, s: median, worst": f"{whole['median']:.2f}, {whole['worst']:.2f}",
        "of it beyond the start of processes": f"{beyond['median']:.2f}, {beyond['worst']:.2f}",
    }
    return grid(["", ""], [[name, value] for name, value in facts.items()])


def strangers(results: Results) -> list[str]:
    """Return what the training among strangers has shown."""
    record = results.find("hostile")
    if record is None:
        return []
    (row,) = record["rows"]
    calls = row["strangers"]["calls"]
    facts = {
        "minutes": shown(row["minutes"]),
        "runs of training, steps": f"{row['episodes']}, {row['steps']}",
        "calls by strangers, kinds, ports": f"{sum(calls.values())}, {len(calls)}, {row['strangers']['ports']}",
        "units fetched over the side channel": str(row["rescues"]),
        "runs that differ from the undisturbed one": str(row["episodes_that_differ"]),
        "resident size, first and last, MiB": f"{row['resident_mib'][0]}, {row['resident_mib'][-1]}",
    }
    return grid(["", ""], [[name, value] for name, value in facts.items()])


def layouts(results: Results) -> list[str]:
    """Return the table of the matrix of layouts: optimizers with as many pairs share a row."""
    record = results.find("checkpoint_matrix")
    found: dict[tuple[int, int], list[str]] = {}
    for row in record["rows"] if record else []:
        found.setdefault((row["pairs"], row["wrong"]), []).append(row["optimizer"])
    rows = [["; ".join(sorted(names)), str(pairs), str(wrong)] for (pairs, wrong), names in found.items()]
    return grid(["optimizers", "pairs, each", "wrong"], rows)


def imports(results: Results) -> list[str]:
    """Return the table of DeepSpeed's checkpoints: stages that were compared with the same share a row."""
    record = results.find("deepspeed_import")
    found: dict[tuple[str, str], list[Record]] = {}
    for row in record["rows"] if record else []:
        against = "module" if row["parameters_of"] == "module" else "debugging functions"
        if row["state_of"] in ("optimizer", "flat"):
            against += ", optimizer"
        elif row["state_of"] is None:
            against += " alone"
        found.setdefault((row["saved"].split(" ", 2)[2], against), []).append(row)
    lines = []
    for (kind, against), rows in found.items():
        stages = ", ".join(sorted({row["saved"].split()[1] for row in rows}))
        sums = (str(len(rows)), str(sum(row["compared"] for row in rows)), str(sum(row["differing"] for row in rows)))
        lines.append([f"{kind}, stage {stages}", against, *sums, f"{max(row['loss_gap'] for row in rows):.0e}"])
    return grid(["saved by DeepSpeed", "compared with", "loads", "elements", "differ", "losses"], lines)


def convergence(group: str) -> Table:
    """Return a function that makes the table of a group of `convergence.py`."""

    def table(results: Results) -> list[str]:
        record = results.find(f"convergence_{group}")
        lines = []
        for row in record["rows"] if record else []:
            sent, steps, parameters = row["sent_bytes"], row["steps"], row["parameters"]
            last = (sent[-1] - sent[-2]) / (steps[-1] - steps[-2]) / parameters
            figures = (row["loss"][-1], row["held_out"], sent[-1] / steps[-1] / parameters, last)
            lines.append([row["name"], *(f"{figure:.3f}" for figure in figures)])
        return grid(["", "training loss", "held-out loss", "bytes sent, all steps", "bytes sent, last steps"], lines)

    return table


@dataclass(frozen=True)
class Section:
    """A section of the page: its title and explanation, the files that it shows, how, and the name of a plot."""

    title: str
    about: str
    files: Sequence[str]
    table: Table
    plot: str | None = None

    def lines(self, results: Results, usual: str = "") -> list[str]:
        """Return the section; what was measured on the `usual` machine does not say so again."""
        lines = ["", f"## {self.title}", *paragraphs(self.about)]
        records = [record for name in self.files if (record := results.find(name))]
        if not records:
            return [*lines, "", "Not measured yet."]
        lines += ["", *self.table(results)]
        if self.plot and (results.folder / f"{self.plot}.png").exists():
            lines += ["", f"![{PLOTS[self.plot]}](images/{self.plot}.png)"]
        for place in dict.fromkeys(where(record) for record in records):
            if not usual.startswith(place):
                lines += paragraphs(f"Measured on {place}.")
        return lines


def common(results: Results, names: Sequence[str]) -> str:
    """Return on what most results were measured, with the version of DeepSpeed."""
    places = Counter(where(record) for name in names if (record := results.find(name)))
    return max(places, key=lambda place: (place.count(","), places[place]), default="no machine yet")


GROUPS = "groups_27M_bf16_4_accumulation4"
OFFLOAD_TIMES = {
    (place, world): f"offload_time_{place}_98M_bf16_{world}" for place in ("host", "disk") for world in (1, 2)
}
OFFLOAD_MEMORY = "offload_memory_98M_bf16_1"


def offload_times(results: Results) -> list[str]:
    """Return the table of steps with state elsewhere: rows of the host, then of a disk."""
    fields = ("median_ms", "over_resident", "over_deepspeed", "passes_ms", "update_ms")
    lines = []
    for (place, world), name in OFFLOAD_TIMES.items():
        record = results.find(name)
        for row in record["rows"] if record else []:
            lines.append([row["system"], place, str(world), *(shown(row[field]) for field in fields)])
    head = ["", "turns of", "ranks", "step, ms", "over resident", "over DeepSpeed", "passes, ms", "update, ms"]
    return grid(head, lines)


def offload_memory(results: Results) -> list[str]:
    """Return the table of bytes a parameter by tier."""
    record = results.find(OFFLOAD_MEMORY)
    tiers = ("device", "host", "disk")
    fields = ["peak", *(f"{kind}_{tier}" for tier in tiers for kind in ("planned", "counted"))]
    head = ["", "resident peak", *(f"{tier}, {kind}" for tier in tiers for kind in ("planned", "counted"))]
    rows = record["rows"] if record else []
    return grid(head, [[row["system"], *(shown(row.get(field)) for field in fields)] for row in rows])


TENSOR = {size: f"tensor_{size}_fp32_4" for size in ("27M", "53M")}
LONGEST = {world: f"longest_sequence_{world}" for world in (2, 4)}


def tensor(results: Results) -> list[str]:
    """Return the table of tensor parallelism: a row for each system and size."""
    fields = ("median_ms", "ratio", "processor_ratio", "peak", "memory_ratio", "loss_differs")
    lines = []
    for size, name in TENSOR.items():
        record = results.find(name)
        for row in record["rows"] if record else []:
            figures = [shown(row.get(field)) for field in fields[:-1]]
            differs = row.get("loss_differs")
            lines.append([row["system"], size, *figures, "-" if differs is None else f"{differs:.0e}"])
    head = [
        "",
        "model",
        "step, ms",
        "ratio",
        "processor, ratio",
        "peak, bytes per parameter",
        "ratio",
        "loss differs by",
    ]
    return grid(head, lines)


def longest(results: Results) -> list[str]:
    """Return the table of the longest sequences, by number of ranks."""
    lines = []
    for world, name in LONGEST.items():
        record = results.find(name)
        for row in record["rows"] if record else []:
            figures = [row["tokens"], row["over_plain"], row["peak_mib"], row["seconds"]]
            lines.append([row["way"], str(world), f"{record['limit']:g}", *map(shown, figures)])
    return grid(["", "ranks", "limit, MiB", "tokens", "over plain", "peak, MiB", "step, s"], lines)


MEMORY, LARGEST, LENGTHS = "memory_98M_bf16_4", "largest_batch_27M_fp32_2", "growth_lengths_2"
SECTIONS = [
    Section(
        "Step time",
        "GPT of 26 million parameters, batch 4 x 128 per rank, 2 ranks; medians, and ratios to DDP, which computes "
        "bf16 by autocast. Processor time is that of all threads of a rank.",
        list(STEP_FILES.values()),
        compare(
            *((f"{title}, ms", name, "median_ms") for title, name in STEP_FILES.items()),
            *((f"{title}, ratio", name, "ratio") for title, name in STEP_FILES.items()),
            *((f"{title}, processor ratio", name, "processor_ratio") for title, name in STEP_FILES.items()),
        ),
        "time_and_memory",
    ),
    Section(
        "Time and communication by number of ranks",
        "GPT of 7 million parameters, fp32, batch 2 x 128 per rank. *ratio*: step time over DDP's with as many ranks. "
        "*blocked*: part of the step spent waiting in collectives, also for slower ranks.",
        list(RANK_FILES.values()),
        compare(
            *((f"ratio, {world}", name, "ratio") for world, name in RANK_FILES.items()),
            *((f"blocked, {world}", name, "blocked_share") for world, name in RANK_FILES.items() if world > 1),
        ),
        "communication",
    ),
    Section(
        "Groups of ranks",
        "GPT of 26 million parameters, bf16, 4 micro-batches a step, 4 ranks in groups of two (nodes, so to say; all "
        "are on one machine). *within*, *between*: bytes that a rank sends per parameter and step in its group and to "
        "the other, as if it sent directly to each rank ([HSDP and MiCS](hsdp.md)).",
        [GROUPS],
        compare(
            ("step, ms", GROUPS, "median_ms"),
            ("ratio", GROUPS, "ratio"),
            ("within", GROUPS, "bytes_within"),
            ("between", GROUPS, "bytes_between"),
        ),
    ),
    Section(
        "Tensor parallelism",
        "A copy of the model divided over 2 of 4 ranks (TP 2) or over all 4 (TP 4), fp32, batch 4 x 128 per copy: "
        "torch's `parallelize_module`, with FSDP2 over the ranks that have the same part, and shardwise with a ZeRO "
        "stage. *27M*: width 512, 8 layers; *53M*: width 1024, 4 layers. Ratios are to torch's own over as many ranks; "
        "that of times is the median of turns beside one another. Memory is the highest resident size above the bare "
        "process, of the worst rank, over the parameters of the whole model ([Tensor parallelism](tensor.md)).",
        list(TENSOR.values()),
        tensor,
    ),
    Section(
        "Longest sequence",
        "The longest sequence with which a training step of a small decoder (4 layers of width 256, 32,768 words, "
        "fp32, stage 3) keeps the memory of a rank above what the model takes within the limit. *plain*: each rank has "
        "a sequence; *recomputed*: layers are; *shared*: all ranks have parts of one sequence (Ulysses); *tensor*: all "
        "ranks have a copy of the model among them, its loss divided by words, and with *tokens* share the tokens "
        "outside of its layers. *DeepSpeed*: its `DistributedAttention`, stage 3. Steps are single ones of that "
        "length, of one run, and say little about speed ([Sequence and context parallelism](sequence.md)).",
        list(LONGEST.values()),
        longest,
    ),
    Section(
        "Memory",
        "Bytes per parameter above the bare process, of the worst rank: GPT of 98 million parameters, AdamW in bf16, "
        "batch 1 x 64, 4 ranks. *tensors* is what shardwise's accountant counts. The model is built in fp32 on every "
        "rank; with *Init* it is divided while it is built.",
        [MEMORY],
        compare(
            ("resident peak", MEMORY, "peak"),
            ("resident while building", MEMORY, "building"),
            ("tensors, peak", MEMORY, "tracked"),
            ("tensors while building", MEMORY, "tracked_building"),
        ),
    ),
    Section(
        "Largest batch",
        "GPT of 26 million parameters, fp32, sequences of 32 tokens, 2 ranks. The largest batch of a rank with which "
        "a training step stays within 640 MiB above the bare process, and times with that batch. 0: not even one "
        "sequence fits. Importing shardwise sets the C library's allocator ([Launching](launching.md)); the other "
        "systems have its defaults. With such settings for all, FSDP2 came to 45 in an earlier version of this table.",
        [LARGEST],
        compare(
            ("batch", LARGEST, "batch_per_rank"),
            ("peak, MiB", LARGEST, "peak_mib"),
            ("training step, ms", LARGEST, "train_ms"),
            ("samples/s", LARGEST, "train_samples_per_s"),
            ("evaluation, ms", LARGEST, "eval_ms"),
            ("samples/s", LARGEST, "eval_samples_per_s"),
        ),
        "largest_batch",
    ),
    Section(
        "Start",
        "Import: medians of new processes. *build* is the time of `initialize` (of the wrapper and the optimizer) for "
        "a model of 26 million parameters, on 2 ranks; most of it is torch loading its compiler.",
        [STARTUP],
        startup,
    ),
    Section(
        "Watching a run",
        "GPT of 7 million parameters, fp32, stage 3, batch 2 x 128 per rank: a step with all monitoring switched on "
        "(CSV and JSON lines, times and memory of the parts, throughput, the communication log with its file, the "
        "watch for waits; prints each 10 steps) over one with none of it. Medians of the ratios of turns beside one "
        "another. Processor time is that of all threads of a rank, those that write included. The last column says how "
        "far rounds differ: what is less than that has not been resolved.",
        list(MONITORING.values()),
        watching,
    ),
    Section(
        "Growth with layers",
        "Processor time of a step over the number of layers: GPT of width 8, batch 1 x 4, 2 ranks.",
        ["growth_layers_2"],
        layers,
        "growth",
    ),
    Section(
        "Time of the host",
        "What a layer costs the host in a step: a GPT of width 64, batch 1 x 8, with 24 layers less one with 8, by 16. "
        "Ranks are imagined, so that nothing is sent, but what torch's imagined gathers copy is among the figures. "
        "*alone* is PyTorch on one rank; *forced* are stages on one rank that does what several do. Measured on a CPU "
        "that takes shardwise's branches for a device; its streams do nothing. DDP joins all layers of so small a "
        "model in one reduction; shardwise and FSDP2 have collectives for each layer.",
        ["host_time"],
        host_time,
    ),
    Section(
        "Growth with steps",
        "Resident size of a rank that trains on sequences of random length, after 20 and after 200 steps.",
        [LENGTHS],
        compare(
            ("early, MiB", LENGTHS, "early_mib"),
            ("late, MiB", LENGTHS, "late_mib"),
            ("grown, MiB", LENGTHS, "grown_mib"),
        ),
    ),
    Section(
        "Collectives on Gloo",
        "Milliseconds of the slowest rank on loopback, fastest round (more sizes in `comm_gloo.json`).",
        ["comm_gloo"],
        collectives,
    ),
    Section(
        "Checkpoints",
        "A model and AdamW's state in fp32, sharded; 50 MB per layer. GB/s of all ranks together, medians, bytes on "
        "disk at the end of a save; *cold*: dropped from the page cache before. *disk*: files of as many bytes. "
        "*processor*: all threads and ranks. *memory*: highest resident size above that before, over the size of the "
        'checkpoint. *direct*: past the page cache (`checkpoint.writer.type` "fast"). Speeds of a virtual machine\'s '
        "page cache vary by a factor of two from minute to minute.",
        ["checkpoint_io_1", "checkpoint_io_2"],
        checkpoints,
    ),
    Section(
        "Saving in the background",
        "The same state on 2 ranks: how long training stops for a save, in seconds, relative to a plain copy of the "
        "bytes, and to a save in the foreground; a training step while bytes are written, over one between saves; GB/s "
        "until the bytes are on disk. Medians. torch's DCP has no checksums. *cached*: through the page cache "
        '(`checkpoint.writer.type` "python").',
        ["checkpoint_async_2", "checkpoint_async_2_cached"],
        background_saves,
    ),
    Section(
        "Copies of the state in memory",
        "[Copies in memory](fault-tolerance.md#copies-in-memory), by all ranks at once. *a node for each rank*: each "
        "part also travels to another rank.",
        ["memory_copies_2"],
        memory_copies,
    ),
    Section(
        "Killed ranks",
        "A random rank is killed at random moments of saves and of steps; the launcher starts the ranks again and the "
        "script resumes. In the end everything is compared, bit by bit, with an undisturbed run. Times count from the "
        "end of the rank to the end of the first step afterwards.",
        ["soak"],
        killed,
    ),
    Section(
        "Among strangers",
        "Two ranks train at stage 3 while other processes call every port with garbage, forged and replayed messages. "
        "The result is compared with an undisturbed run, bit by bit.",
        ["hostile"],
        strangers,
    ),
    Section(
        "Memory while a checkpoint is loaded",
        "A checkpoint of one rank (weights and AdamW's state in fp32), loaded into fresh engines: resident size above "
        "the bare process, of all ranks together, over the checkpoint's size.",
        ["checkpoint_memory"],
        loading_memory,
    ),
    Section(
        "Layouts of checkpoints",
        "Every stage on 1 to 4 ranks, saved and loaded at every other: pairs compared bit by bit after loading and "
        "after more training. *Meshes*: ranks also share tensors, sequences and experts, by 1 or 2 of each, on 1 to 8 "
        "ranks; bit by bit after loading, and to rounding after more training where sums have other parts.",
        ["checkpoint_matrix"],
        layouts,
    ),
    Section(
        "Checkpoints of DeepSpeed",
        "Two ranks train a small GPT with DeepSpeed 0.19.8 and save; shardwise loads that at stages 0 to 3 on 1, 2 and "
        "3 ranks (on 2 with `ep_size` and `autotp_size` 1 and 2) and trains on. Every element is compared "
        "with what DeepSpeed had in memory. *debugging functions*: `safe_get_full_fp32_param` and "
        "`safe_get_full_optimizer_state`. *module*: its own parameters. *optimizer*: state in the script's own "
        "optimizer object; where that steps flat tensors, the place of a parameter is where they have its values. "
        "*alone*: no optimizer state was compared. Values of parts and experts were put together in the job that saved "
        "them. *losses*: largest relative difference in the next 4 steps.",
        ["deepspeed_import"],
        imports,
    ),
    Section(
        "Optimizer step on a CPU",
        "Nanoseconds per element of one AdamW step on 50 million elements, one thread, and over the time of a plain "
        "copy of as many bytes. *scaled*: the gradients are multiplied by a factor as well.",
        ["cpu_adam"],
        compare(
            ("bytes", "cpu_adam", "bytes"),
            ("median, ns", "cpu_adam", "median_ns"),
            ("lowest, ns", "cpu_adam", "lowest_ns"),
            ("of a copy's", "cpu_adam", "over_copy"),
        ),
    ),
    Section(
        "Optimizer step on the host",
        "AdamW with gradients in fp32, scaled, and a bf16 copy, on 50 million elements: bytes that it cannot avoid to "
        "move over its time, beside a plain copy and a triad (a = b + c) of as many bytes with as many threads.",
        ["offload_step"],
        compare(
            ("GB/s", "offload_step", "gb_per_s"),
            ("of a copy's", "offload_step", "of_copy"),
            ("of a triad's", "offload_step", "of_triad"),
        ),
    ),
    Section(
        "State on a disk",
        "*in turn*: the optimizer's state of twelve units of 7 million parameters, on a disk, is read and written as "
        "by a step that computes nothing, with sums over all bytes. The others are plain loops that read and write as "
        "many bytes past the page cache and do nothing else: *back and forth*, each thread a block and then the same; "
        "*side by side*, half of the threads read. Bytes of both directions.",
        ["offload_disk"],
        compare(
            ("GB/s", "offload_disk", "gb_per_s"),
            ("highest, GB/s", "offload_disk", "highest_gb_per_s"),
            ("of the fastest loop's", "offload_disk", "of_plain"),
        ),
    ),
    Section(
        "Moving hidden behind computing",
        "State on a disk that is played: memory whose bytes take as long as one disk of a given speed would need, half "
        "as long as computing with everything in memory (*resident*), or as long. *hidden*: the part of the time of "
        "moving by which training does not get longer. *of waiting*: the same beside an infinitely fast disk, which "
        "leaves out the processor's own work for moving (copies, new pages). Optimizer state of twelve parts, each "
        "stepped 24 times (one step hardly takes longer than a copy); parameters of a GPT of 98 million, forward and "
        "backward. The forward pass computes a third of the time and moves half of the bytes: where moving takes as "
        "long as computing, no more than 0.83 of it can be hidden.",
        ["offload_overlap"],
        compare(
            ("resident, ms", "offload_overlap", "resident_ms"),
            ("moving, ms", "offload_overlap", "moving_ms"),
            ("together, ms", "offload_overlap", "with_ms"),
            ("hidden", "offload_overlap", "hidden"),
            ("of waiting", "offload_overlap", "hidden_of_waiting"),
        ),
    ),
    Section(
        "Step time with state elsewhere",
        "GPT of 98 million parameters, AdamW in bf16, batch 1 x 64 per rank; systems with state on the host take turns "
        "in one job, those with state on a disk in another. DeepSpeed steps with DeepSpeedCPUAdam. *over resident*: "
        "over stage 3 of shardwise with everything on the device; *over DeepSpeed*: over DeepSpeed in the same "
        "setting. On CPU ranks the device is a part of the same memory. Other programs ran on the machine: on 2 ranks "
        "single turns of one system took up to twice as long as others.",
        list(OFFLOAD_TIMES.values()),
        offload_times,
    ),
    Section(
        "Memory by tier",
        "The same on one rank, in bytes per parameter: highest resident size in training above the bare process, and "
        "what shardwise has planned before the first step and counted, without activations. DeepSpeed has 12 buffers "
        "for its optimizer and 48 for parameters on a disk; with 5 and 8 it stopped for lack of them.",
        [OFFLOAD_MEMORY],
        offload_memory,
        "offload_step",
    ),
]


CONVERGENCE = [
    Section(title, about, [f"convergence_{group}"], convergence(group), f"convergence_{group}")
    for group, title, about in (
        (
            "onebit",
            "1-bit optimizers",
            "ZeRO stage 0. 1-bit Adam and 1-bit LAMB freeze after 15 % of the steps; 0/1 Adam after 40 %, and then "
            "takes up to 4 local steps.",
        ),
        (
            "compression",
            "Gradient compression",
            "ZeRO stage 2: gradients are compressed; parameters are gathered as they are, which is 3 of the bytes in "
            "every row. PowerSGD and top-k begin after 15 % of the steps.",
        ),
        (
            "zeropp",
            "ZeRO++",
            "ZeRO stage 3, the four ranks taken for two nodes of two. Bytes are those of all links.",
        ),
        (
            "precision",
            "bf16 with and without fp32 masters",
            "ZeRO stage 2.",
        ),
        (
            "optimizers",
            "Optimizers",
            "ZeRO stage 2. Step sizes were chosen by hand: places mean little.",
        ),
    )
]


def fill(text: str, tables: str) -> str:
    """Return a page with tables between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def page(path: Path, results: Results) -> str:
    """Return what a page should be."""
    if path.name == "gpu.md":
        lines = page_lines(
            results.find(GPU), shown, grid, paragraphs, lambda name: (results.folder / f"{name}.png").exists()
        )
        return fill(path.read_text(), "\n".join(lines))
    if path.name == "pipeline.md":
        return fill(path.read_text(), "\n".join([*lines_of(results.find, grid, paragraphs), ""]))
    sections = CONVERGENCE if path.name == "convergence.md" else SECTIONS
    usual = common(results, [name for section in sections for name in section.files])
    place = paragraphs(f"Unless a section says otherwise, measured on {usual}.")
    long = "\n".join([*place, *(line for section in sections for line in section.lines(results, usual))])
    return fill(path.read_text(), short(results) if path.name == "README.md" else long)


def main() -> None:
    """Write the pages and copy the plots that they show; without pages print all tables."""
    found = parser(__doc__)
    found.add_argument("pages", nargs="*", type=Path)
    options = read(found)
    results = Results(options.results)
    if not options.pages:
        print(short(results), *(line for section in SECTIONS for line in section.lines(results)), sep="\n")
    for path in options.pages:
        text = page(path, results)
        path.write_text(text)
        for name in re.findall(r"\]\(images/(\w+\.png|pipeline_idle\.svg)\)", text):
            (path.parent / "images").mkdir(exist_ok=True)
            shutil.copyfile(results.folder / name, path.parent / "images" / name)


if __name__ == "__main__":
    main()
