"""Sessions in fresh environments: each supported Python with each supported torch, and torch's nightly build.

    nox --list
    nox -s "versions-3.12(torch='2.14')"                 # one combination
    nox -s versions-3.11 -- tests/zero/test_loops.py     # other tests than PARTS
    make versions                                        # all of them

A session installs shardwise, the drop-in and the versions that pip chooses that day, runs the README's program on two
ranks, and the tests that meet torch most closely. Builds of torch without CUDA, several GB smaller, come from
TORCH_INDEX; `TORCH_INDEX=` takes those of the package index. Pythons that are not on the path are skipped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15", "nightly")
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
PARTS = (
    "tests/test_import.py",
    "tests/comm/test_native.py",
    "tests/comm/test_setup.py",
    "tests/config/test_resolve.py",
    "tests/checkpoint/test_resume.py",
    "tests/dropin/test_trainer.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_initialize.py",
    "tests/launch/test_run.py",
    "tests/memory/test_track.py",
    "tests/optim/test_elementwise.py",
    "tests/recompute/test_checkpoint.py",
    "tests/schedules/test_warmup.py",
    "tests/zero/test_autocast.py",
    "tests/zero/test_compile.py",
    "tests/zero/test_init.py",
    "tests/zero/test_loops.py",
    "tests/zero/test_mixed_precision.py",
)
"""Tests that meet torch most closely."""

nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["versions"]


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """Install shardwise with a version of torch, and try it."""
    nightly = torch == "nightly"
    wanted = ["--pre", "torch"] if nightly else [f"torch=={torch}.*"]
    index = ["--extra-index-url", TORCH_INDEX.replace("/whl/", "/whl/nightly/") if nightly else TORCH_INDEX]
    session.install("--upgrade", "pip")  # dependency groups need 25.1
    # One call, so that nothing else makes pip change the version of torch.
    packages = [".[hf]", "./dropin", "--group", "test"]
    session.install(*wanted, *packages, *(index if TORCH_INDEX else []))
    program = re.search(r"^```python\n(.*?)^```", Path("README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert program is not None
    script = Path(session.create_tmp()) / "train.py"
    script.write_text(program[1])
    session.run("shardwise", "run", "-q", "--nproc", "2", str(script), env={"OMP_NUM_THREADS": "1"})
    tests = session.posargs or PARTS
    session.run("pytest", "-q", "-p", "no:cacheprovider", *tests, env={"OMP_NUM_THREADS": "1"})
