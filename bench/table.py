"""Write the README's tables of numbers from the files in bench/results.

python bench/table.py README.md            # between the lines <!-- numbers --> and <!-- /numbers -->
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
COLUMNS = {
    "alone": "no communication",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "shardwise 0": "stage 0",
    "shardwise 1": "stage 1",
    "shardwise 2": "stage 2",
    "shardwise 3": "stage 3",
}


def read(name: str) -> dict[str, Any]:
    """Return a result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _cells(record: dict[str, Any], field: str) -> list[str]:
    by_system = {row["system"]: row[field] for row in record["rows"]}
    return [f"{by_system[system]:.2f}" if system in by_system else "-" for system in COLUMNS]


def tables() -> str:
    """Return the tables with what they were measured on."""
    times = {dtype: read(f"step_time_27M_{dtype}_2") for dtype in ("fp32", "bf16")}
    memory = read("memory_98M_bf16_4")
    rule = "|---" * (len(COLUMNS) + 1) + "|"
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", rule]
    for dtype, record in times.items():
        lines.append(f"| step time, {dtype} | " + " | ".join(_cells(record, "ratio")) + " |")
        lines.append(f"| processor time, {dtype} | " + " | ".join(_cells(record, "processor_ratio")) + " |")
    lines.append("| peak memory, bf16 | " + " | ".join(_cells(memory, "peak")) + " |")
    ddp = {dtype: next(row for row in r["rows"] if row["system"] == "DDP") for dtype, r in times.items()}
    machine = times["fp32"]["machine"]
    spread = ", ".join(f"{row['lowest_ms']:.0f} to {row['highest_ms']:.0f} ms in {d}" for d, row in ddp.items())
    about = (
        "Times of one training step are over those of DistributedDataParallel: GPT of 26 million parameters, AdamW, "
        f"batch 4 x 128, 2 ranks over Gloo, medians of {times['fp32']['rounds']} alternating rounds in one run. "
        "Processor time is that of all threads, which a busy machine disturbs less. DDP computes bf16 by autocast on "
        "fp32 weights. Memory is the highest resident size above the bare process in bytes per parameter: GPT of 98 "
        "million parameters, AdamW, batch 1 x 64, 4 ranks, the model built in fp32 on every rank first."
    )
    where = (
        f"Machine: {machine['processor']}, {machine['cores']} cores, shared with others; torch {machine['torch']}. "
        f"Single steps of DDP took {spread}, so a few per cent mean nothing."
    )
    for paragraph in (about, where):
        lines += ["", textwrap.fill(paragraph, 120, break_on_hyphens=False)]
    return "\n".join(lines)


def fill(text: str) -> str:
    """Return a page with the tables between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text()))
