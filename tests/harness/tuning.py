"""A launcher that only pretends to run a script, for the autotuner."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.plan.candidates import Candidate, ModelFacts

# In the place of the launcher: reads its configuration, and ends as its micro-batch size says.
PRETENDED = """
import json, os, sys, time, traceback
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
keys = json.load(open(os.environ["SHARDWISE_CONFIG_OVERRIDE"]))
section = keys["autotuning"]
def report(path, values):
    with open(path + ".new", "w") as file:
        json.dump(values, file)
    os.replace(path + ".new", path)
if section["model_info"]["profile"]:
    if os.path.exists("small") and keys.get("zero_optimization") != {"stage": 3}:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
    report(section["model_info_path"], json.load(open("facts.json")))
    sys.exit(0)
micro = keys["train_micro_batch_size_per_gpu"]
if micro == 1:
    print("ran", file=sys.stderr)
    sys.exit(0)
if micro == 2:
    try:
        try:
            next(iter(()))
        except StopIteration:
            raise ValueError("bad batch")
    except ValueError:
        traceback.print_exc()
    sys.exit(1)
if micro == 4:
    with open("hangs.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace("hangs.new", "hangs")
    time.sleep(60)
if micro == 32:
    print("Traceback (most recent call last):\\n  File x\\nshardwise.memory.OutOfMemoryError: no room", file=sys.stderr)
    sys.exit(1)
built = {name: value for name, value in keys.items() if name != "autotuning"}
if micro == 8:
    built["zero_optimization"] = {"stage": 0}
values = {"throughput": 10.0 * micro, "latency": 0.1, "memory": 5, "rows": micro, "built": built}
report(section["metric_path"], values)
"""


def candidate(micro: int, **more: Any) -> Candidate:
    config = {
        "train_batch_size": micro,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
    }
    return Candidate(f"z1_mbs{micro}_gas1", config, micro, 1, **more)


def pretended_launcher(place: Path) -> tuple[str, ...]:
    """Write a script, a configuration, candidates and a launcher to a directory; return the launcher's command."""
    (place / "train.py").touch()
    pretended = place / "pretended.py"
    pretended.write_text(PRETENDED)
    configure(place)
    describe(place, *map(candidate, (1, 2, 4, 8, 16, 32, 64)))
    return sys.executable, "-S", str(pretended)


def configure(place: Path, **section: Any) -> None:
    """Write the user's configuration."""
    options = {"time_limit": 2, **section}
    (place / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 16, "autotuning": options}))


def describe(place: Path, *candidates: Candidate) -> None:
    """Write what the first run finds."""
    found = ModelFacts(10, 10, 16, 1, 1, {"train_batch_size": 16, "autotuning": {}}, list(candidates), rows=16)
    (place / "facts.json").write_text(json.dumps(asdict(found)))


def calls(place: Path) -> list[list[str]]:
    """Return the command lines of all runs."""
    return [json.loads(line) for line in (place / "calls.jsonl").read_text().splitlines()]
