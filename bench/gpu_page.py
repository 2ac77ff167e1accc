"""The page of one GPU, docs/gpu.md: tables of bench/results/gpu.json, and what was asked of a device beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Parts = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure that is asked for.

    Attributes:
        what: in words.
        asked: the bound.
        found: the figure; None: not measured.
        least: the bound is the least, not the most.
    """

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

    def __str__(self) -> str:
        return "{:66s} asked {:8s} found {:8s} {}".format(*self.cells())


def rows(parts: Parts, part: str) -> list[dict[str, Any]]:
    """Return the rows of a part, or none."""
    found: list[dict[str, Any]] = parts.get(part, {}).get("rows", [])
    return found


def value(parts: Parts, part: str, name: str, field: str, key: str = "system") -> float | None:
    """Return a figure of a row, or None."""
    return next((row.get(field) for row in rows(parts, part) if row.get(key) == name), None)


def over(parts: Parts, part: str, mine: str, other: str, field: str) -> float | None:
    """Return a figure over the same of another row, or None."""
    first, second = value(parts, part, mine, field), value(parts, part, other, field)
    return first / second if first is not None and second else None


def best(figures: Sequence[float | None], which: Callable[..., float]) -> float | None:
    """Return the least or the greatest figure of those that there are."""
    there = [figure for figure in figures if figure is not None]
    return which(there) if there else None


def targets(parts: Parts) -> list[Target]:
    """Return what is asked of one device, and what was found."""
    found = []
    for size in ("163M", "1.4B"):
        part = f"train {size} bf16"
        found.append(Target(f"step of {size}, over plain PyTorch's", 1.02, value(parts, part, "shardwise", "ratio")))
        forced = over(parts, part, "shardwise 3 forced", "FSDP2", "ratio")
        found.append(Target(f"step of {size}, stage 3 forced, over FSDP2's", 1.00, forced))
    imagined = over(parts, "train 163M bf16 8 ranks", "shardwise 3", "FSDP2", "ratio")
    found.append(Target("step of 163M, stage 3, one of 8 imagined ranks, over FSDP2's", 1.00, imagined))
    host = over(parts, "host", "shardwise 3", "FSDP2", "whole_ms")
    found.append(Target("host's time a layer, stage 3, over FSDP2's", 1.00, host))
    adam = best([row.get("of_copy") for row in rows(parts, "optimizer") if row.get("asked")], min)
    found.append(Target("AdamW's step, of what a copy reaches", 0.90, adam, least=True))
    slack = [
        row.get("slack") for part in parts for row in rows(parts, part) if row.get("system", "").startswith("shardwise")
    ]
    found.append(Target("reserved and never allocated, over reserved, random lengths", 0.05, best(slack, max)))
    limited = [
        row for row in rows(parts, "offload limited") if row.get("model") == "13B" and row.get("limit_gib") == 32
    ]
    speed = best([row.get("as_v100") for row in limited], max)
    found.append(Target("13 B under 32 GiB, TFLOP/s on a card as fast as a V100", 30.0, speed, least=True))
    ratios = [row.get("over_deepspeed") for row in rows(parts, "offload cost")]
    found.append(Target("step with state on the host, over DeepSpeed's", 0.60, best(ratios, max)))
    return found


# -- tables ------------------------------------------------------------------------------------------------------------

Column = tuple[str, str]
"""Of a table: what it is called, and the field of a row."""

TRAINED: list[Column] = [
    ("step, ms", "median_ms"),
    ("over plain", "ratio"),
    ("launched after, ms", "launch_ms"),
    ("update, ms", "update_ms"),
    ("launches", "launches"),
    ("tokens/s", "tokens_per_s"),
    ("TFLOP/s", "tflops"),
    ("of the peak", "of_peak"),
    ("held, GiB", "held_gib"),
    ("allocated, GiB", "allocated_gib"),
    ("reserved, GiB", "reserved_gib"),
    ("slack", "slack"),
]
OFFLOADED: list[Column] = [
    ("parameters, 10^9", "billions"),
    ("batch", "rows"),
    ("step, s", "step_s"),
    ("passes, s", "passes_s"),
    ("update, s", "update_s"),
    ("tokens/s", "tokens_per_s"),
    ("TFLOP/s", "tflops"),
    ("planned, GiB", "planned_gib"),
    ("allocated, GiB", "allocated_gib"),
    ("host, GiB", "host_gib"),
]


@dataclass(frozen=True)
class Table:
    """A table of a part.

    Attributes:
        title, about: what stands above it.
        part: of the results.
        names: field of a row that has its name.
        columns: the others.
    """

    title: str
    about: str
    part: str
    names: str
    columns: list[Column]


TABLES = [
    Table(
        "What the device does at best",
        "Random numbers. A copy on the device counts bytes read and written, one to or from the host its bytes once.",
        "device",
        "what",
        [("TFLOP/s", "tflops"), ("GB/s", "gb_per_s"), ("microseconds", "microseconds")],
    ),
    *(
        Table(
            f"A step of a GPT of {name} parameters in {dtype}",
            "Batch 8 x 1024. Systems take turns in one process; *over plain*: over plain PyTorch in the same turn. "
            "*launched after*: when the host has launched the step. *slack*: the part of reserved memory that was "
            "never allocated in steps of random lengths. *forced*: one rank that gathers, releases and reduces as "
            "several do.",
            f"train {size} {dtype}",
            "system",
            TRAINED,
        )
        for size, name, dtype in (
            ("163M", "163 million", "bf16"),
            ("163M", "163 million", "fp16"),
            ("1.4B", "1.4 billion", "bf16"),
        )
    ),
    Table(
        "The same as one of 8 ranks of which 7 are imagined",
        "Everything is launched as by one of 8 ranks, and nothing is sent: what a system costs beside its collectives.",
        "train 163M bf16 8 ranks",
        "system",
        TRAINED,
    ),
    Table(
        "Time of the host",
        "Milliseconds a layer of models so small that the device takes no time: the step with 24 layers less that with "
        "8, over 16.",
        "host",
        "system",
        [
            ("forward", "forward_ms"),
            ("backward", "backward_ms"),
            ("step", "step_ms"),
            ("whole", "whole_ms"),
            ("launches a layer", "launches"),
        ],
    ),
    Table(
        "The optimizer's step",
        "200 million elements in 150 pieces; bytes that each must move over its time, and that over a copy's.",
        "optimizer",
        "system",
        [("bytes an element", "bytes"), ("ms", "median_ms"), ("GB/s", "gb_per_s"), ("of a copy's", "of_copy")],
    ),
    Table(
        "Checkpoints",
        "A GPT of 406 million parameters in bf16, 14 bytes a parameter. *blocked*: for so long the script does not go "
        "on. *slowdown*: of steps while bytes are written.",
        "checkpoint",
        "way",
        [
            ("blocked, s", "blocked_s"),
            ("first time, s", "first_s"),
            ("written, s", "written_s"),
            ("slowdown", "slowdown"),
            ("GB/s", "gb_per_s"),
        ],
    ),
    Table(
        "State elsewhere: what it costs",
        "A GPT of 1.4 billion parameters in bf16, blocks recomputed.",
        "offload cost",
        "setting",
        [*OFFLOADED, ("over resident", "over_resident"), ("over DeepSpeed", "over_deepspeed")],
    ),
    Table(
        "State elsewhere: a small device",
        "The device is limited to so many GiB. Settings are tried from the one that keeps most digits of the state; "
        "the first that fits this machine is trained. *as a V100*: TFLOP/s times a V100's peak over this device's.",
        "offload limited",
        "setting",
        [("limit, GiB", "limit_gib"), *OFFLOADED, ("as a V100", "as_v100")],
    ),
    Table(
        "State elsewhere: the largest model",
        "The deepest GPT of width 4096 whose plan fits device, memory and disk of this machine.",
        "offload largest",
        "setting",
        OFFLOADED,
    ),
]
TRACES = {
    "forced 3": "A step at stage 3, forced, of a GPT of 163 million parameters",
    "offload": "The same with parameters and optimizer on the host",
}


def _with_units(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with bytes in GiB besides."""
    more = {
        "billions": row["parameters"] / 1e9 if "parameters" in row else None,
        **{
            f"{name}_gib": row[key] / 2**30
            for name, key in (("planned", "planned_device"), ("allocated", "allocated"), ("host", "host"))
            if isinstance(row.get(key), int | float)
        },
    }
    return {**more, **row}


def table_lines(table: Table, parts: Parts, shown: Callable[[Any], str], grid: Callable[..., list[str]]) -> list[str]:
    """Return a table; a row that failed has its reason below."""
    there = [_with_units(row) for row in rows(parts, table.part)]
    columns = [(head, field) for head, field in table.columns if any(row.get(field) is not None for row in there)]
    good = [row for row in there if "failed" not in row or any(row.get(field) is not None for _, field in columns)]
    lines = [[_name(table, row), *(shown(row.get(field)) for _, field in columns)] for row in good]
    found = grid(["", *(head for head, _ in columns)], lines)
    for row in there:
        if "failed" in row:
            found += ["", f"*{_name(table, row)}*: {row['failed']}"]
    return found


def _name(table: Table, row: dict[str, Any]) -> str:
    """Return what a row is called."""
    found = f"{row['model']}, {row[table.names]}" if "model" in row else str(row[table.names])
    if "world" in row:
        found += f", {row['dtype']}, {row['world']} rank{'s' if row['world'] > 1 else ''}"
    return found + (", as on a device" if row.get("beside") else "")


def page_lines(
    record: dict[str, Any] | None,
    shown: Callable[[Any], str],
    grid: Callable[..., list[str]],
    paragraphs: Callable[..., list[str]],
    pictures: Callable[[str], bool],
) -> list[str]:
    """Return the lines of the page.

    Args:
        record: the file of results; None: there is none.
        shown, grid, paragraphs: of table.py.
        pictures: whether there is a picture of a name.
    """
    parts: Parts = record["parts"] if record else {}
    lines = ["", "## Asked and found"]
    if record is None:
        lines += paragraphs("Nothing has been measured on a GPU yet.")
    else:
        machine = record["machine"]
        text = f"Measured on {machine['gpu'] or 'no GPU'}, {machine['cores']} cores, torch {machine['torch']}."
        lines += paragraphs(text)
    lines += ["", *grid(["", "asked", "found", "met"], [target.cells() for target in targets(parts)])]
    for table in TABLES:
        if table.part in parts:
            command = f"`{parts[table.part]['command']}`"
            lines += ["", f"## {table.title}", *paragraphs(f"{table.about} {command}"), ""]
            lines += table_lines(table, parts, shown, grid)
    for row in rows(parts, "trace"):
        name = f"gpu_trace_{row['way'].replace(' ', '_')}"
        if "failed" in row or not pictures(name):
            continue
        lines += ["", f"## {TRACES[row['way']]}"]
        text = f"The device computes {row['computing']:.0%} of the time, and does anything {row['anything']:.0%} of it."
        lines += [*paragraphs(f"{text} The longest intervals in which it computes nothing:"), ""]
        gaps = [
            [gap["host_in"] or "-", shown(gap["us"]), ", ".join(gap["others_run"]) or "-", f"`{gap['next'][:48]}`"]
            for gap in row["gaps"][:5]
        ]
        lines += grid(["the host is in", "microseconds", "other streams", "next"], gaps)
        lines += ["", f"![{TRACES[row['way']]}](images/{name}.png)"]
    return lines
