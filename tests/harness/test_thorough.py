"""What `make test` leaves out, and that tests which hang end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


HANGS = """
import subprocess, time
import pytest

@pytest.mark.limit(0.2)
def test_hangs():
    time.sleep(60)

@pytest.mark.limit(0.2)
def test_waits():
    subprocess.run(["sleep", "60"])

def test_is_quick():
    pass
"""


PRODUCT = """
import pytest

from tests.harness import thorough

@pytest.mark.parametrize("a", [0, thorough(1), 2])
@pytest.mark.parametrize("b", [thorough(0), 1])
def test_product(a, b):
    pass

@pytest.mark.thorough
def test_long():
    pass
"""


def test_what_is_left_out_is_counted_and_a_test_that_hangs_fails_while_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_product.py").write_text(PRODUCT)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--progress", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", ".", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "2 failed, 3 passed, 5 deselected" in done.stdout, done.stdout + done.stderr
    assert "5 thorough cases of 2 tests were left out" in done.stdout
    assert "TestTooLongError: not over after 0.2 s" in done.stdout
    assert "tests: FAILED" in done.stdout and "tests: 5 of 5 tests (100 %)" in done.stdout
