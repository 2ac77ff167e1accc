"""Draw the results in bench/results: time and memory of each system, communication, largest batch, growth, offload.

python bench/plot.py [--results bench/results]

A plot whose measurements are missing is left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from harness import RESULTS, Row, load
from matplotlib.axes import Axes
from matplotlib.patches import Patch

plt.style.use(Path(__file__).with_name("plots.mplstyle"))
COLOURS = {"alone": "#888888", "DDP": "#444444", "FSDP2": "#4c78a8", "DeepSpeed": "#e1812c", "shardwise": "#2a9d5c"}
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
MARKS = ("o", "s", "^", "D")

TAB10: Sequence[Any] = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]

Rows = list[Row]


class Absent(Exception):
    """A file with measurements is not there."""


def record(folder: Path, name: str) -> Row:
    """Return a result file."""
    found = load(folder, name)
    if found is None:
        raise Absent(name)
    return found


def rows(folder: Path, name: str) -> Rows:
    """Return the rows of a result file."""
    found: Rows = record(folder, name)["rows"]
    return found


def _colour(system: str) -> str:
    return COLOURS[system.split()[0]]


def _mark(system: str) -> str:
    stage = re.search(r" (\d)", system)
    return MARKS[int(stage.group(1))] if stage else "x"


def _name(system: str) -> str:
    return "no communication" if system == "alone" else system


def bars(axes: Axes, found: Rows, field: str, label: str, form: str = "{:.2f}", colours: Sequence[Any] = ()) -> None:
    """Draw a horizontal bar for each system that has the field, the first on top."""
    kept = [row for row in found if row.get(field) is not None]
    values = [row[field] for row in kept]
    drawn = axes.barh(range(len(kept)), values, color=colours or [_colour(row["system"]) for row in kept], height=0.7)
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(kept)), [_name(row["system"]) for row in kept], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.15 * max(values))


def lines(axes: Axes, found: Rows, x: str, y: str, scale: float = 1) -> None:
    """Draw a metric of each system by another."""
    for system in dict.fromkeys(row["system"] for row in found):
        points = [(row[x], row[y] * scale) for row in found if row["system"] == system]
        axes.plot(*zip(*points, strict=True), label=_name(system), color=_colour(system), marker=_mark(system))
    axes.set_ylim(bottom=0)


def losses(axes: Axes, found: Rows, label: str, colours: Sequence[Any]) -> None:
    """Draw the loss of each system by steps."""
    for row, colour in zip(found, colours, strict=False):
        axes.plot(row["steps"], row["loss"], label=row["system"], color=colour)
    axes.set_xlabel("steps")
    axes.set_ylabel(label)
    axes.legend()


def time_and_memory(folder: Path) -> None:
    """Step time over DDP's, and peak memory, of each system."""
    panels = [
        ("time_zero_27M_fp32_2", "ratio", "step time over DDP's\nfp32, 27M parameters, 2 ranks"),
        ("time_zero_27M_bf16_2", "ratio", "step time over DDP's\nbf16, 27M parameters, 2 ranks"),
        (
            "memory_zero_98M_bf16_4",
            "peak_bytes_a_parameter",
            "peak memory, bytes a parameter\nbf16, 98M parameters, 4 ranks",
        ),
    ]
    _, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    for place, (name, field, label) in zip(axes, panels, strict=True):
        bars(place, rows(folder, name), field, label)
        if field == "ratio":
            place.axvline(1, color="black", linewidth=0.8, linestyle=":")


def communication(folder: Path) -> None:
    """Step time over DDP's, and the part of it blocked in collectives, by number of ranks."""
    worlds = (1, 2, 4, 8)
    found = [row | {"ranks": world} for world in worlds for row in rows(folder, f"time_zero_7M_fp32_{world}")]
    found = [row for row in found if row["system"] not in ("DDP", "FSDP2 no reshard")]
    _, axes = plt.subplots(1, 2, figsize=(13, 4.4))
    for place, field, scale in ((axes[0], "ratio", 1), (axes[1], "blocked_share", 100)):
        lines(place, [row for row in found if row.get(field) is not None], "ranks", field, scale)
        place.set_xscale("log", base=2)
        place.set_xticks(worlds, [str(world) for world in worlds])
        place.set_xlabel("ranks")
    axes[0].axhline(1, color=COLOURS["DDP"], linewidth=1)
    axes[0].set_ylabel("step time over DDP's")
    axes[1].set_ylabel("per cent of the step blocked in collectives")
    axes[0].legend(**BESIDE)


def largest_batch(folder: Path) -> None:
    """Largest batch under the limit, and how fast it trains."""
    found = rows(folder, "largest_batch_27M_fp32_2")
    _, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    bars(axes[0], found, "batch_per_rank", "largest batch of a rank under the limit", "{:.0f}")
    bars(axes[1], found, "train_samples_per_s", "samples trained a second, all ranks", "{:.1f}")


def growth(folder: Path) -> None:
    """Processor time of a layer by number of layers."""
    _, axes = plt.subplots(figsize=(7.5, 4.4))
    lines(axes, rows(folder, "growth_layers_2"), "layers", "a_layer_us")
    axes.set_xlabel("layers")
    axes.set_ylabel("processor time of a step over layers, µs")
    axes.legend(**BESIDE)


TIERS = {"device": "device", "host": "memory of the host", "disk": "disk"}
KINDS = {
    "parameters": "#4c78a8",
    "gathered window": "#9ecae9",
    "activations": "#e1812c",
    "gradients": "#b279a2",
    "communication buffers": "#888888",
    "master weights": "#2a9d5c",
    "optimizer state": "#88d27a",
    "other": "#cccccc",
}


def offload_step(folder: Path) -> None:
    """Memory by tier over one step of an engine with everything on a disk."""
    course = record(folder, "memory_disk_98M_bf16_1")["notes"]["course"]
    marks, length = course["marks"], course["interval"]
    _, axes = plt.subplots(3, 1, figsize=(10, 7), sharex=True)
    drawn = dict.fromkeys(kind for kinds in course["bytes"].values() for kind in kinds)
    for place, (tier, title) in zip(axes, TIERS.items(), strict=True):
        kinds = course["bytes"][tier]
        names = [kind for kind in KINDS if kind in kinds]
        values = [[value / 1e6 for value in kinds[name]] for name in names]
        times = [number * length for number in range(len(values[0]))] if values else []
        place.stackplot(times, values, colors=[KINDS[name] for name in names], step="post", linewidth=0)
        highest = max(map(sum, zip(*values, strict=True)), default=1)
        place.set_ylim(0, 1.18 * highest)
        place.set_ylabel(f"{title}, MB")
        for name, begin in marks.items():
            place.axvline(begin, color="black", linewidth=0.8, linestyle=":")
            if place is axes[0] and name != "end":
                place.text(begin + 0.005 * marks["end"], 1.1 * highest, name, fontsize=9, va="center")
    axes[-1].set_xlabel("seconds")
    axes[-1].set_xlim(0, marks["end"])
    patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items() if kind in drawn]
    axes[1].legend(handles=patches, **BESIDE)


def convergence(group: str) -> Callable[[Path], None]:
    """Return a function that draws the losses of a group of ways, and what they send, in one figure."""

    def draw(folder: Path) -> None:
        found = rows(folder, f"convergence_{group}")
        _, axes = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=[3, 2])
        losses(axes[0], found, "training loss, mean of ten steps", TAB10)
        label = "bytes that a rank sends, per parameter and step"
        bars(axes[1], found, "sent_bytes_a_parameter", label, colours=TAB10[: len(found)])

    return draw


def distillation(folder: Path) -> None:
    """Held-out loss of students and their teacher by steps."""
    _, axes = plt.subplots(figsize=(8, 4.2))
    losses(axes, rows(folder, "distillation"), "loss on held-out text", TAB10)


def pipeline_idle(folder: Path) -> None:
    """Step time, idle share and activations of schedules by number of ranks, measured and simulated."""
    found = rows(folder, "pipeline_idle_m16")
    panels = [
        ("step_s", 1, "seconds a step"),
        ("idle_share", 100, "idle share of all ranks, per cent"),
        ("activations_mb", 1, "peak activations of a rank, MB"),
    ]
    schedules = list(dict.fromkeys(row["system"] for row in found))
    counts = sorted({row["ranks"] for row in found})
    _, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    for place, (field, scale, label) in zip(axes, panels, strict=True):
        for schedule, colour in zip(schedules, TAB10, strict=False):
            own = [row for row in found if row["system"] == schedule]
            ranks = [row["ranks"] for row in own]
            place.plot(ranks, [row[field] * scale for row in own], "o-", color=colour, label=schedule)
            simulated = [row[f"simulated_{field}"] * scale for row in own]
            place.plot(ranks, simulated, "--", color=colour, linewidth=0.9, alpha=0.7)
        place.set_xticks(counts)
        place.set_xlabel("ranks of the pipeline")
        place.set_ylabel(label)
        if field == "step_s":
            place.set_yscale("log", base=2)
            place.set_yticks([3, 4, 6, 8, 12, 24], ["3", "4", "6", "8", "12", "24"])
        else:
            place.set_ylim(bottom=0)
    title = "— measured  - - simulated"
    axes[2].legend(title=title, **BESIDE)


PLOTS: dict[str, Callable[[Path], None]] = {
    **{
        f"convergence_{group}": convergence(group)
        for group in ("onebit", "compression", "zeropp", "precision", "optimizers")
    },
    "distillation": distillation,
    "time_and_memory": time_and_memory,
    "communication": communication,
    "largest_batch": largest_batch,
    "growth": growth,
    "offload_step": offload_step,
    "pipeline_idle.svg": pipeline_idle,
}


def main() -> None:
    """Draw every plot whose measurements are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name, draw in PLOTS.items():
        file = options.results / (name if "." in name else f"{name}.png")
        try:
            draw(options.results)
        except Absent as absent:
            print(f"{file.name} is left out: there is no {absent}.json")
        else:
            plt.savefig(file, metadata={"Date" if file.suffix == ".svg" else "Software": None})
            print(file)
        plt.close("all")


if __name__ == "__main__":
    main()
