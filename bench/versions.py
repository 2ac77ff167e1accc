"""Install shardwise into fresh environments of several versions of Python and torch, and try it in each.

    python bench/versions.py [--only 2.13:3.11,newest:3.13] [--allow-gpu-wheels]      (make versions)

For each of torch 2.11, 2.13 and the newest, and each Python from 3.10 to 3.13 that is found on this machine: a virtual
environment, `pip install .[hf] ./dropin` with whatever versions pip chooses that day, the README's program on two
ranks, and the tests in PARTS. The environment is removed afterwards.

Wheels of torch for CUDA bring several GB. Without --allow-gpu-wheels only those combinations are tried for which pip
finds a build without CUDA. Results: bench/results/versions.json, one row for each combination; a run replaces the rows
of what it has tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
NEWEST = "newest"
TORCHES = ("2.11", "2.13", NEWEST)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TOOLS = ("accelerate>=1.15", "pytest>=8", "hypothesis>=6.100", "psutil>=5.9", "jsonschema>=4.20", "matplotlib>=3.8")
PARTS = (
    "tests/test_import.py",
    "tests/config/test_resolve.py",
    "tests/comm/test_gloo.py",
    "tests/comm/test_setup.py",
    "tests/comm/test_native.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_initialize.py",
    "tests/optim/test_elementwise.py",
    "tests/schedules/test_warmup.py",
    "tests/zero/test_loops.py",
    "tests/zero/test_mixed_precision.py",
    "tests/zero/test_init.py",
    "tests/zero/test_gathered.py",
    "tests/zero/test_transports.py",
    "tests/zero/test_sparse.py",
    "tests/zero/test_autocast.py",
    "tests/zero/test_compile.py",
    "tests/recompute/test_checkpoint.py",
    "tests/memory/test_track.py",
    "tests/checkpoint/test_resume.py",
    "tests/checkpoint/test_dcp.py",
    "tests/launch/test_run.py",
    "tests/dropin/test_trainer.py",
)
"""What meets torch most closely: collectives, hooks, storages, optimizers, checkpoints, processes, the Trainer."""

LIMIT_S = 3600
ALL_PASSED, LEFT_OUT = "all passed", "left out"


def interpreters() -> dict[str, Path]:
    """Return the interpreters of PYTHONS that are on the path or that pyenv keeps, by version."""
    found = {}
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        named = shutil.which(f"python{version}")
        places = [*sorted(kept.glob(f"{version}.*/bin/python"), reverse=True), *([Path(named)] if named else [])]
        for place in places:
            asked = [str(place), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(asked, capture_output=True, text=True)
            if answer.stdout.strip() == version:  # a pyenv shim may be there and answer nothing
                found[version] = place
                break
    return found


def run(command: Sequence[str], where: Path, limit: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory, with what it prints kept."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    variables.pop("PYTHONPATH", None)
    try:
        return subprocess.run(
            command,
            cwd=where,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as over:
        said = over.stdout.decode(errors="replace") if isinstance(over.stdout, bytes) else over.stdout or ""
        return subprocess.CompletedProcess(command, 124, f"{said}\nmore than {limit:.0f} s")


def needs_cuda(python: str, torch: str, where: Path) -> bool:
    """Whether the build of torch that pip would take brings CUDA; nothing is downloaded but its description."""
    report = where / "report.json"
    asked = [python, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--report", str(report), torch]
    done = run(asked, where)
    if done.returncode:
        raise RuntimeError(done.stdout)
    found = json.loads(report.read_text())["install"][0]["metadata"]
    return any(re.match(r"(nvidia|cuda)[-_]", needed) for needed in found.get("requires_dist", ()))


def readme_program(root: Path) -> str:
    """Return the first program of the README."""
    found = re.search(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def outcome(text: str) -> dict[str, Any]:
    """Return the counts in pytest's last line, and the names of the tests that have failed.

    >>> outcome("FAILED tests/a.py::b - x\\n== 1 failed, 2 passed, 3 skipped in 4.5s ==")
    {'passed': 2, 'failed': 1, 'skipped': 3, 'failures': ['tests/a.py::b']}
    """
    last = text.rstrip().splitlines()[-1] if text.strip() else ""
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return {
        "passed": counts.get("passed", 0),
        "failed": failed,
        "skipped": counts.get("skipped", 0),
        "failures": sorted(set(names)),
    }


def try_out(torch: str, python: Path, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Make the environment, try everything in it, remove it; return the row."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardwise-versions-", dir=options.directory) as scratch:
        place = Path(scratch)
        log = (logs / f"torch-{torch}-python-{python_version(python)}.log").open("w")

        def step(command: Sequence[str], where: Path = place) -> subprocess.CompletedProcess[str]:
            log.write(f"$ {shlex.join(command)}\n")
            done = run(command, where)
            log.write(done.stdout + "\n")
            log.flush()
            return done

        venv = place / "venv"
        bin_ = venv / "bin"
        own = str(bin_ / "python")
        for command in ([str(python), "-m", "venv", str(venv)], [own, "-m", "pip", "install", "-q", "-U", "pip"]):
            done = step(command)
            if done.returncode:
                return {"outcome": "no environment", "said": done.stdout[-2000:]}
        wanted = "torch" if torch == NEWEST else f"torch=={torch}.*"
        if not options.allow_gpu_wheels and needs_cuda(own, wanted, place):
            return {"outcome": f"{LEFT_OUT}: pip finds only builds for CUDA (--allow-gpu-wheels takes them)"}
        source = place / "source"
        shutil.copytree(
            ROOT,
            source,
            ignore=shutil.ignore_patterns(
                ".git", ".venv", "build", "dist", "site", "shared", "__pycache__", ".*_cache"
            ),
        )
        # One call, so that nothing else makes pip change the version of torch.
        packages = [wanted, f"{source}[hf]", f"{source}/dropin", *TOOLS]
        done = step([own, "-m", "pip", "install", "-q", *packages])
        if done.returncode:
            return {"outcome": "not installed", "said": done.stdout[-2000:]}
        installed_s = time.perf_counter() - began
        (place / "train.py").write_text(readme_program(source))
        program = step([str(bin_ / "shardwise"), "run", "-q", "--nproc", "2", "train.py"])
        loss = re.search(r"loss ([\d.]+)", program.stdout)
        tested = step(
            [
                *shlex.split(options.under),
                own,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                *(options.tests or PARTS),
            ],
            source,
        )
        counts = outcome(tested.stdout)
        right = program.returncode == 0 and tested.returncode == 0
        return {
            "outcome": ALL_PASSED if right else "failures",
            "installed": versions(own, place),
            "readme_program": {"exit_code": program.returncode, "loss": float(loss[1]) if loss else None},
            "tests": counts,
            **({"parts": options.tests} if options.tests else {}),
            "seconds": {"install": round(installed_s), "all": round(time.perf_counter() - began)},
            **({} if right else {"said": (program.stdout if program.returncode else tested.stdout)[-4000:]}),
        }


def python_version(python: Path) -> str:
    """Return the full version of an interpreter."""
    return subprocess.run(
        [str(python), "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
    ).stdout.strip()


def versions(python: str, where: Path) -> dict[str, str]:
    """Return the versions of the packages that matter."""
    names = ("torch", "numpy", "pydantic", "typer", "safetensors", "transformers", "accelerate", "pytest")
    program = f"import importlib.metadata as m; print(*(m.version(name) for name in {names!r}))"
    return dict(zip(names, run([python, "-c", program], where).stdout.split(), strict=False))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| torch | Python | transformers | README's program | tests | |", "|---|---|---|---|---|---|"]
    for row in rows:
        had = row.get("installed", {})
        tests = row.get("tests")
        counts = (
            "" if tests is None else f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
        )
        loss = row.get("readme_program", {}).get("loss")
        lines.append(
            f"| {had.get('torch', row['torch'])} | {row['python']} | {had.get('transformers', '')} | "
            f"{'' if loss is None else f'loss {loss}'} | {counts} | {row['outcome']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Try the combinations, keep a row of each, and end with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TORCH:PYTHON,...", help="these combinations, such as 2.13:3.11,newest:3.13")
    parser.add_argument("--allow-gpu-wheels", action="store_true", help="also builds of torch that bring CUDA (GB)")
    parser.add_argument("--under", default="", metavar="COMMAND", help="runs the tests, such as nice or flock FILE")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="other tests than PARTS")
    parser.add_argument("--directory", help="for the environments; default: the system's for temporary files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = interpreters()
    wanted = [(torch, python) for torch in TORCHES for python in PYTHONS]
    if options.only:
        wanted = [tuple(pair.split(":")) for pair in options.only.split(",")]
        for torch, python in wanted:
            if python not in PYTHONS:
                parser.error(f"--only {torch}:{python}: Python is one of {', '.join(PYTHONS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "versions.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["torch"], row["python"]): row for row in kept}
    logs = ROOT / "build" / "versions"
    logs.mkdir(parents=True, exist_ok=True)
    failed = False
    for torch, python in wanted:
        if python not in found:
            print(f"torch {torch}, Python {python}: no interpreter", flush=True)
            continue
        print(f"torch {torch}, Python {python} ({found[python]}) ...", flush=True)
        row = try_out(torch, found[python], options, logs)
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        rows[torch, python] = {"torch": torch, "python": python, "when": when, **row}
        failed |= not row["outcome"].startswith((ALL_PASSED, LEFT_OUT))
        print(f"  {row['outcome']}", flush=True)
        order = sorted(rows, key=lambda pair: (pair[0] == NEWEST, pair[0], pair[1]))
        record = {"command": "make versions", "parts": PARTS, "rows": [rows[pair] for pair in order]}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(table([rows[pair] for pair in sorted(rows, key=lambda pair: (pair[0] == NEWEST, pair[0], pair[1]))]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
