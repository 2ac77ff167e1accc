"""Pictures of the docs that show no measurement: learning-rate schedules, and a step of timelines as a viewer shows it.

python bench/pictures.py schedules [--images docs/images]
python bench/overhead.py --what timeline --keep DIR; python bench/pictures.py timeline DIR [--step 60]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from harness import data_of
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch

from shardwise.profile.trace import merge, read
from shardwise.schedules import StepSchedule, build

plt.style.use(Path(__file__).with_name("plots.mplstyle"))
COLOURS = {
    "compute": "#4c78a8",
    "step": "#54a24b",
    "wait": "#d62728",
    "gather": "#9ecae9",
    "reduce": "#f2a65a",
    "collective": "#b39ddb",
    "move": "#e8c547",
    "idle": "#d9d9d9",
    "stage": "#59a89c",
    "message": "#eeeeee",
}


def timeline(directory: Path, step: int | None, output: Path) -> None:
    """Draw a step of the timelines of a directory; None: the last one."""
    timelines = read(directory)
    events = merge(timelines)
    complete = [event for event in events if event["ph"] == "X"]
    step = max(event["args"]["step"] for event in complete) if step is None else step
    inside = [event for event in complete if event["args"]["step"] == step and event["cat"] in ("compute", "step")]
    start = min(event["ts"] for event in inside)
    stop = max(event["ts"] + event["dur"] for event in inside)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    seen = {(e["pid"], e["tid"]) for e in complete if e["ts"] < stop and e["ts"] + e["dur"] > start}
    tracks = sorted(seen, key=lambda track: (track[0], track[1]))
    place = {track: number + 0.8 * track[0] for number, track in enumerate(tracks)}
    figure, axes = plt.subplots(figsize=(13, 0.33 * len(tracks) + 1.4))
    for event in complete:
        draw_event(axes, event, place, start, stop)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f" and start <= event["ts"] <= stop and begins[event["id"]]["ts"] >= start:
            begin = begins[event["id"]]
            ends = [((e["ts"] - start) / 1e3, place[e["pid"], e["tid"]]) for e in (begin, event)]
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="->", mutation_scale=8, lw=0.7, color="#222222"))
    labels = [
        names[track] if names[track].startswith("stage ") else f"rank {track[0]}: {names[track]}" for track in tracks
    ]
    axes.set_yticks([place[track] for track in tracks], labels)
    axes.set_ylim(max(place.values()) + 0.7, -0.7)
    axes.set_xlim(0, (stop - start) / 1e3)
    axes.set_xlabel(f"milliseconds from the beginning of step {step}")
    used = {event["cat"] for event in complete if (event["pid"], event["tid"]) in seen}
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    figure.legend(handles=patches, ncols=len(patches), loc="outside upper center", fontsize="medium")
    figure.savefig(output)


def draw_event(
    axes: Any, event: dict[str, Any], place: dict[tuple[int, int], float], start: float, stop: float
) -> None:
    """Draw one event; what lies in another one is drawn less high."""
    left, right = max(event["ts"], start), min(event["ts"] + event["dur"], stop)
    track = event["pid"], event["tid"]
    if right <= left or track not in place:
        return
    whole = event["name"] in ("forward", "backward", "end of the window")
    small = event["name"].startswith("launch")
    height = 0.85 if whole else 0.3 if small else 0.6
    colour = COLOURS[event["cat"]]
    bar = axes.barh(
        place[track],
        (right - left) / 1e3,
        left=(left - start) / 1e3,
        height=height,
        color=colour,
        alpha=0.35 if whole else 1.0,
        edgecolor="white",
        linewidth=0.4,
    )
    unit = event["args"]["unit"].removeprefix("blocks.")
    if unit and not small and (right - left) / (stop - start) > 0.008 + 0.006 * len(unit):
        axes.bar_label(bar, [unit], label_type="center", fontsize=6)


# -- schedules ---------------------------------------------------------------------------------------------------------

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLES = (("#2a9d5c", "-"), ("#4c78a8", "--"), ("#e1812c", ":"))
"""Colour and dashes of each curve: where curves coincide, both are seen."""
STEPS = 1000


PLOTS: dict[str, Any] = data_of("pictures.toml")


def schedule_of(plot: dict[str, Any], params: dict[str, Any]) -> StepSchedule:
    """Build a schedule for an optimizer whose own rate is 1e-3."""
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1e-3)
    made = build(plot["name"], optimizer, {**plot["params"], **params})
    assert isinstance(made, StepSchedule)
    return made


def _axes(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_xlim(0, STEPS)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def draw_schedule(plot: dict[str, Any]) -> None:
    """Draw the rate over the step number, and the momentum below it."""
    panels = 1 + plot.get("momentum", False)
    _, found = plt.subplots(panels, 1, figsize=(7.5, 2.7 * panels), sharex=True, squeeze=False)
    rates, *rest = found[:, 0]
    for number, (label, params) in enumerate(plot["curves"].items()):
        schedule = schedule_of(plot, params)
        colour, dashes = STYLES[number]
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.8, "label": label}
        rates.plot(range(STEPS + 1), [schedule.lr(k)[0] for k in range(STEPS + 1)], **style)
        for axes in rest:
            axes.plot(range(STEPS + 1), [schedule.momentum(k)[0] for k in range(STEPS + 1)], **style)
    _axes(rates, "learning rate")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set_ylim(bottom=0)
    for axes in rest:
        _axes(axes, "momentum (betas[0])")
    found[-1, 0].set_xlabel("updates made before")
    rates.set_title(plot["name"], loc="left", fontsize=11)
    rates.legend()


def main() -> None:
    """Draw every schedule, or a step of timelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schedules", "timeline"))
    parser.add_argument("directory", type=Path, nargs="?", help="of timelines")
    parser.add_argument("--step", type=int, help="number of the step of timelines; default: the last one")
    parser.add_argument("--images", type=Path, default=IMAGES, help="where the pictures go; default docs/images")
    options = parser.parse_args()
    if options.what == "timeline":
        timeline(options.directory, options.step, options.images / "timeline.png")
        return
    for name, plot in PLOTS.items():
        draw_schedule(plot)
        plt.savefig(options.images / f"{name}.png", metadata={"Software": None})
        plt.close("all")
        print(options.images / f"{name}.png")


if __name__ == "__main__":
    main()
