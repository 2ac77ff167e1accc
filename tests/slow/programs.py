"""Well-known programs with shardwise in DeepSpeed's place, and without: their losses, on two CPU ranks.

    python -m tests.slow.programs [--only nanoGPT,TRL] [--stages 3] [--precisions bf16] [--keep]

Programs, launchers and settings are those of tests/dropin. Each program is run at stages 1 to 3 in fp32 and bf16, the
launchers taking turns, so that each of them starts each program; and without DeepSpeed, on DistributedDataParallel.
What is installed decides which programs run. `python bench/report.py docs/frameworks.md` writes the table.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dropin.clients import as_deepspeed, own_ranks
from tests.dropin.launching import ALL, LAUNCHERS, PRECISIONS, RTOL, STAGES, Place, differences, plainly
from tests.harness.pool import RankFailure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import load, options_of, save


def cases(names: list[str]) -> list[tuple[str, str, int, str]]:
    """Program, launcher, stage and precision of each run."""
    return [
        (name, LAUNCHERS[(stage + number + PRECISIONS.index(precision)) % len(LAUNCHERS)], stage, precision)
        for number, name in enumerate(names)
        for precision in PRECISIONS
        for stage in STAGES
    ]


def main() -> int:
    """Run the programs; return the exit code: 1 if losses differ by more than the tests allow."""
    options = options_of(__doc__, only="", keep=False, stages="1,2,3", precisions="fp32,bf16")
    wanted = options.only.split(",")
    names = [name for name in ALL if any(part in name for part in wanted) and not ALL[name].missing]
    limits = options.stages.split(","), options.precisions.split(",")
    every = cases(list(ALL))
    chosen = [case for case in every if case[0] in names and str(case[2]) in limits[0] and case[3] in limits[1]]
    former = (load(options.results, "programs") or {"rows": []})["rows"] if options.keep else []
    keys = ("launcher", "stage", "precision")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in former:
        setting = {key: row.pop(key) for key in keys}
        rows[(row["system"], *setting.values())] = {**row, "setting": setting}
    failed = 0
    plain: dict[tuple[Any, ...], Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextmanager(own_ranks)(as_deepspeed) as ranks:
        place = Place(Path(folder))
        for case in chosen[:1] if options.quick else chosen:
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
            row = {"system": name, "setting": dict(zip(keys, case[1:], strict=True)), "difference": difference}
            row |= {"loss": told["losses"][-1], "without": without["losses"][-1]}
            rows[case] = row | {"losses": told["losses"], "losses_without": without["losses"]}
            print(*case, f"{difference:.1e}", flush=True)
            save(options, "programs", [rows[key] for key in every if key in rows])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
