"""Draw a step of timelines as docs/images/timeline.png: what a viewer shows, for a page.

python bench/timeline.py --keep DIR; python bench/draw_timeline.py DIR [--step 60] [-o docs/images/timeline.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch

from shardwise.profile.trace import merge, read

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


def main() -> None:
    """Draw the step in the middle, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--step", type=int, help="number of the step; default: the last one")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/timeline.png"))
    options = parser.parse_args()
    timelines = read(options.directory)
    events = merge(timelines)
    complete = [event for event in events if event["ph"] == "X"]
    step = max(event["args"]["step"] for event in complete) if options.step is None else options.step
    inside = [event for event in complete if event["args"]["step"] == step and event["cat"] in ("compute", "step")]
    start = min(event["ts"] for event in inside)
    stop = max(event["ts"] + event["dur"] for event in inside)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    seen = {(e["pid"], e["tid"]) for e in complete if e["ts"] < stop and e["ts"] + e["dur"] > start}
    tracks = sorted(seen, key=lambda track: (track[0], track[1]))
    place = {track: number + 0.8 * track[0] for number, track in enumerate(tracks)}
    figure, axes = plt.subplots(figsize=(13, 0.33 * len(tracks) + 1.4))
    for event in complete:
        draw(axes, event, place, start, stop)
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
    figure.legend(handles=patches, ncols=len(patches), loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=110)
    print(options.output)


def draw(axes: Any, event: dict[str, Any], place: dict[tuple[int, int], float], start: float, stop: float) -> None:
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


if __name__ == "__main__":
    main()
