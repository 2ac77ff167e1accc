"""Compares the bits of all settings with those that are stored, or stores them.

    python -m tests.guard [--record] [NAME ...]

The same code gives other bits with other releases of torch and on other processors, so both are stored too.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.guard.settings import SETTINGS, trained
from tests.harness import close_pool, run_ranks

STORED = Path(__file__).with_name("hashes.json")
KINDS = ("losses", "gradients", "parameters")


def machine() -> dict[str, str]:
    """Return what bits depend on besides the code."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("vendor_id")), platform.machine())
    return {
        "torch": torch.__version__.split("+")[0],
        "processor": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def measured(names: list[str]) -> dict[str, list[list[str]]]:
    """Train in all settings; return of each the hashes by kind: of each rank, or one that all ranks have."""
    found = {}
    with tempfile.TemporaryDirectory() as disk:
        for name in sorted(names, key=lambda name: SETTINGS[name].world):
            begin = time.monotonic()
            columns = zip(*run_ranks(trained, SETTINGS[name].world, name, disk, timeout=120), strict=True)
            found[name] = [list(column) if len(set(column)) > 1 else [column[0]] for column in columns]
            print(f"{time.monotonic() - begin:5.1f} s  {name}", flush=True)
    return found


def main() -> int:
    """Run the settings; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="settings; all if none is named")
    parser.add_argument("--record", action="store_true", help="store the hashes of the code as it is")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - SETTINGS.keys())
    if unknown:
        parser.error(f"unknown settings: {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"machine": {}, "hashes": {}}
    if not arguments.record and stored["machine"] != machine():
        print(f"hashes were stored on {stored['machine']}, and this is {machine()}: check out the commit that stored")
        print("them, run `python -m tests.guard --record` there, and compare with these")
        return 2
    try:
        found = measured(arguments.names or list(SETTINGS))
    finally:
        close_pool()
    if arguments.record:
        hashes = {**stored["hashes"], **found} if arguments.names else found
        STORED.write_text(json.dumps({"machine": machine(), "hashes": hashes}, indent=1) + "\n")
        print(f"{len(found)} settings stored in {STORED}")
        return 0
    wrong = 0
    for name, columns in found.items():
        expected = stored["hashes"].get(name)
        differing = [kind for kind, new, old in zip(KINDS, columns, expected or columns, strict=True) if new != old]
        if expected is None or differing:
            wrong += 1
            print(f"{name}: {'not stored' if expected is None else 'other ' + ', '.join(differing)}")
    print(f"{len(found) - wrong} of {len(found)} settings have the stored bits")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
