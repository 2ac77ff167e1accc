"""Draw the learning-rate schedules for docs/schedules.md, from the classes themselves.

python bench/schedules.py [--images docs/images]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from shardwise.schedules import StepSchedule, build

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLES = (("#2a9d5c", "-"), ("#4c78a8", "--"), ("#e1812c", ":"))
"""Colour and dashes of each curve: where curves coincide, both are seen."""
STEPS = 1000


@dataclass
class Plot:
    """One picture of one schedule.

    Attributes:
        name: the schedule.
        params: what all curves have in common.
        curves: label and own arguments of each curve.
        momentum: also draw the momentum, in a panel of its own.
    """

    name: str
    params: dict[str, Any]
    curves: dict[str, dict[str, Any]]
    momentum: bool = False


PLOTS = {
    "schedule_lr_range_test": Plot(
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5.0},
        {"steadily": {}, "lr_range_test_staircase": {"lr_range_test_staircase": True}},
    ),
    "schedule_one_cycle": Plot(
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 300,
            "cycle_second_step_size": 400,
            "decay_step_size": 100,
            "decay_lr_rate": 1.0,
            "decay_mom_rate": 0.02,
        },
        {"straight": {}, "cycle_first_stair_count: 5": {"cycle_first_stair_count": 5}},
        momentum=True,
    ),
    "schedule_warmup": Plot(
        "WarmupLR",
        {"warmup_max_lr": 1e-3, "warmup_num_steps": 400},
        {"warmup_type: log": {}, "warmup_type: linear": {"warmup_type": "linear"}},
    ),
    "schedule_warmup_decay": Plot(
        "WarmupDecayLR",
        {"warmup_max_lr": 1e-3, "warmup_num_steps": 200, "total_num_steps": 900},
        {"warmup_type: log": {}, "warmup_type: linear": {"warmup_type": "linear"}},
    ),
    "schedule_warmup_cosine": Plot(
        "WarmupCosineLR",
        {"warmup_num_steps": 200, "total_num_steps": 900, "warmup_type": "linear"},
        {
            "cos_min_ratio: 1e-4": {},
            "cos_min_ratio: 0.1": {"cos_min_ratio": 0.1},
            "cos_min_ratio: 0.3, warmup_min_ratio: 0.2": {"cos_min_ratio": 0.3, "warmup_min_ratio": 0.2},
        },
    ),
}


def schedule_of(plot: Plot, params: dict[str, Any]) -> StepSchedule:
    """Build a schedule for an optimizer whose own rate is 1e-3."""
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1e-3)
    made = build(plot.name, optimizer, {**plot.params, **params})
    assert isinstance(made, StepSchedule)
    return made


def _axes(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_xlim(0, STEPS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def draw(plot: Plot) -> None:
    """Draw the rate over the step number, and the momentum below it."""
    panels = 1 + plot.momentum
    _, found = plt.subplots(panels, 1, figsize=(7.5, 2.7 * panels), layout="constrained", sharex=True, squeeze=False)
    rates, *rest = found[:, 0]
    for number, (label, params) in enumerate(plot.curves.items()):
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
    rates.set_title(plot.name, loc="left", fontsize=11)
    rates.legend(fontsize=8, frameon=False)


def main() -> None:
    """Draw every schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=IMAGES, help="where the pictures go; default docs/images")
    images = parser.parse_args().images
    for name, plot in PLOTS.items():
        draw(plot)
        plt.savefig(images / f"{name}.png", dpi=110, metadata={"Software": None})
        plt.close("all")
        print(images / f"{name}.png")


if __name__ == "__main__":
    main()
