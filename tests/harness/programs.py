"""Runs programs of users on ranks of the pool, which start no process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from tests.harness.pool import run_ranks


def run_program(program: Path, *options: str, path: Sequence[Path] = (), nproc: int = 2) -> str:
    """Run a script in its folder on ranks of the pool, with more of a Python path; return what they print."""
    return "".join(run_ranks(_printed, nproc, program, options, path, timeout=300))


def _printed(program: Path, options: Sequence[str], path: Sequence[Path]) -> str:
    sys.path[:0] = [*map(str, path), str(program.parent)]
    os.chdir(program.parent)  # the pool goes back
    before, out = set(sys.modules), io.StringIO()
    with mock.patch.object(sys, "argv", [str(program), *options]), contextlib.redirect_stdout(out):
        runpy.run_path(str(program), run_name="__main__")
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(tuple(sys.path[: len(path) + 1])):
            del sys.modules[name]
    return out.getvalue()
