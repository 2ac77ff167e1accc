"""Well-known programs with shardwise in DeepSpeed's place, and without: their losses, on two CPU ranks.

    python bench/programs.py [--only nanoGPT,TRL] [--stages 3] [--precisions bf16] [--keep] [--write]

Programs, launchers and settings are those of tests/dropin. Each program is run at stages 1 to 3 in fp32 and bf16, the
launchers taking turns, so that each of them starts each program; and without DeepSpeed, on DistributedDataParallel.
What is installed decides which programs run. `--write` also puts the table into docs/frameworks.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _jobs import ROOT, parser, read
from _machine import save

sys.path.insert(0, str(ROOT))

from tests.dropin.clients import as_deepspeed, own_ranks
from tests.dropin.launching import ALL, LAUNCHERS, PRECISIONS, RTOL, STAGES, Place, differences, plainly
from tests.harness.pool import RankFailure

BEGIN, END = "<!-- programs: made by python bench/programs.py --write -->", "<!-- end of programs -->"


def cases(names: list[str]) -> list[tuple[str, str, int, str]]:
    """Program, launcher, stage and precision of each run."""
    return [
        (name, LAUNCHERS[(stage + number + PRECISIONS.index(precision)) % len(LAUNCHERS)], stage, precision)
        for number, name in enumerate(names)
        for precision in PRECISIONS
        for stage in STAGES
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| Program | Launcher | Stage | Precision | Last loss | Without | Largest relative difference |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    lines += [
        f"| {row['program']} | `{row['launcher']}` | {row['stage']} | {row['precision']} | {row['loss']:.5f} | "
        f"{row['without']:.5f} | {row['difference']:.1e} |"
        for row in rows
    ]
    return "\n".join(lines)


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """Return docs/frameworks.md with the table in it."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Run the programs; return the exit code: 1 if losses differ by more than the tests allow."""
    found = parser(__doc__)
    found.add_argument("--only", default="", help="parts of names of programs, separated by commas")
    found.add_argument(
        "--keep", action="store_true", help="keep the rows of the last run that this one does not measure"
    )
    found.add_argument("--stages", default="1,2,3", help="separated by commas")
    found.add_argument("--precisions", default="fp32,bf16", help="separated by commas")
    found.add_argument("--write", action="store_true", help="put the table into docs/frameworks.md")
    options = read(found)
    wanted = options.only.split(",")
    names = [name for name in ALL if any(part in name for part in wanted) and not ALL[name].missing]
    limits = options.stages.split(","), options.precisions.split(",")
    chosen = [
        case for case in cases(list(ALL)) if case[0] in names and str(case[2]) in limits[0] and case[3] in limits[1]
    ]
    chosen = chosen[:1] if options.quick else chosen
    file = options.results / "programs.json"
    former = json.loads(file.read_text())["rows"] if options.keep and file.exists() else []
    rows = {(row["program"], row["launcher"], row["stage"], row["precision"]): row for row in former}
    failed = 0
    plain: dict[tuple[Any, ...], Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextmanager(own_ranks)(as_deepspeed) as ranks:
        place = Place(Path(folder))
        for case in chosen:
            name, launcher, stage, precision = case
            try:
                way = (name, precision, stage == 3 and name == "run_clm, from scratch")
                if way not in plain:
                    plain[way] = ranks(plainly, 2, *place.without(name, stage, precision))[0]
                without = plain[way]
                told = place.run(name, launcher, stage, precision)
                difference = max(differences(told, without))
            except (AssertionError, RankFailure) as error:
                print(*case, "failed:", error, file=sys.stderr)
                failed += 1
                continue
            failed += difference > RTOL[precision]
            rows[case] = {
                **dict(zip(("program", "launcher", "stage", "precision"), case, strict=True)),
                "loss": told["losses"][-1],
                "without": without["losses"][-1],
                "difference": difference,
                "losses": told["losses"],
                "losses_without": without["losses"],
            }
            print(*case, f"{difference:.1e}", flush=True)
            order = [rows[key] for key in cases(list(ALL)) if key in rows]
            save(options.results, "programs", order)
    if options.write:
        docs = ROOT / "docs" / "frameworks.md"
        docs.write_text(page(docs.read_text(), json.loads(file.read_text())["rows"]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
