"""Tables of docs/pipeline.md, from the results of bench/pipeline.py and bench/pipeline_idle.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rows = list[dict[str, Any]]
Grid = Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]

CONTEST = "pipeline_27M_fp32_2_m8"
THROTTLED, UNEVEN = "pipeline_idle_m16", "pipeline_idle_m8_uneven"


def lines_of(find: Callable[[str], Any], grid: Grid, paragraphs: Callable[..., list[str]]) -> list[str]:
    """Return the lines of the page; `find` returns a result file, or None."""
    contest, throttled, uneven = (find(name) for name in (CONTEST, THROTTLED, UNEVEN))
    lines: list[str] = []
    if throttled is not None:
        rows: Rows = throttled["rows"]
        lines += paragraphs(
            "Naive model parallelism against pipelines, for one model on 2 to 8 ranks, 16 micro-batches a step. Layers "
            "are throttled: each sleeps for a set time in its forward pass, and in its gradients of inputs and of "
            "weights. So eight ranks do not compete for two cores; processes, messages and the order of actions are "
            "real. Forward pass and gradients of the whole model take 480 ms each for a micro-batch. Cells: seconds a "
            "step, idle share of all ranks; activations are the peak of a rank, the simulator's in brackets "
            "(`python bench/pipeline_idle.py`, under `chrt -r 10`, because other programs kept the machine busy)."
        )
        lines += ["", *grid(*of_throttled(rows))]
        lines += paragraphs(differences("Layers of equal times", rows))
        lines += paragraphs(differences("Layers of 0.7 to 1.3 times the mean", uneven["rows"])) if uneven else []
        lines += [
            "",
            "![Step time, idle share and activations by schedule and number of ranks](images/pipeline_idle.svg)",
        ]
    if contest is not None:
        lines += paragraphs(
            "A GPT of 26 million parameters in fp32 on 2 CPU ranks with 2 cores, 8 micro-batches of 4 x 128 tokens, "
            "all systems in one job (`python bench/pipeline.py --micro-batches 8`). Step times are over the best of "
            "the other systems; memory is what a step takes over the state."
        )
        lines += ["", *grid(*of_contest(contest["rows"]))]
    return lines


def of_throttled(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of throttled layers."""
    ranks = sorted({row["ranks"] for row in rows})
    head = ["", *(f"{count} ranks" for count in ranks), f"activations on {ranks[-1]} ranks, MB"]
    cells = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        own = {row["ranks"]: row for row in rows if row["schedule"] == schedule}
        last = own[ranks[-1]]
        cells.append(
            [
                f"`{schedule}`",
                *(f"{own[count]['step_ms'] / 1e3:.2f} s, {own[count]['idle_share']:.0%}" for count in ranks),
                f"{last['activations_mb']:.1f} ({last['simulated_activations_mb']:.1f})",
            ]
        )
    return head, cells


def differences(what: str, rows: Rows) -> str:
    """Return a sentence: how far measured figures are from the simulator's."""
    least, most = (choose(row["ratio"] for row in rows) for choose in (min, max))
    points = max(abs(row["idle_share"] - row["simulated_idle_share"]) for row in rows)
    by_rank = max(
        abs(a - b) for row in rows for a, b in zip(row["idle_by_rank"], row["simulated_idle_by_rank"], strict=True)
    )
    ranks = ", ".join(map(str, sorted({row["ranks"] for row in rows})))
    return (
        f"{what} on {ranks} ranks: steps take {least:.2f} to {most:.2f} times the simulated time; idle shares differ "
        f"from the simulator's by at most {100 * points:.1f} points, those of single ranks by {100 * by_rank:.1f}."
    )


def of_contest(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of systems."""
    cells = []
    for row in rows:
        idle = "" if row["idle_share"] is None else f"{row['idle_share']:.0%}"
        system = row["system"].replace("torch ", "torch.distributed.pipelining, ").replace("shardwise ", "shardwise, ")
        cells.append([system, f"{row['ratio_to_best_other']:.2f}", f"{row['memory_mb']:.0f} MB", idle])
    return ["", "step", "memory of a step", "idle"], cells
