"""Well-known programs, unchanged, with shardwise in DeepSpeed's place: the losses of the same programs without it.

`make exhaustive` runs every program by every launcher.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dropin.clients import MISSING, Ranks
from tests.dropin.launching import ALL, LAUNCHERS, PRECISIONS, RTOL, STAGES, Place, differences, plainly
from tests.harness import thorough

ROOT = Path(__file__).parents[2]

TELLING = {
    "CIFAR tutorial": ("torchrun", 1, "bf16"),
    "nanoGPT": ("deepspeed", 3, "fp32"),
    "run_clm, from scratch": ("deepspeed", 3, "fp32"),
    "run_clm, from a checkpoint": ("torchrun", 2, "bf16"),
    "deepspeed_with_config_support": ("accelerate", 3, "fp32"),
    "TRL SFT, LoRA": ("torchrun", 3, "fp32"),
}
"""A setting of each program, and among them each launcher, stage and precision."""

# Every program by every launcher, with stages and precisions in turn; tests/slow/programs.py has the whole product.
QUICK = "nanoGPT"
CASES = [(name, *setting) if name == QUICK else thorough(name, *setting) for name, setting in TELLING.items()] + [
    thorough(name, launcher, STAGES[number % len(STAGES)], PRECISIONS[number % len(PRECISIONS)])
    for row, name in enumerate(ALL)
    for number, launcher in enumerate(LAUNCHERS, row)
    if launcher != TELLING[name][0]
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(tmp_path_factory.mktemp("programs"))


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(("name", "launcher", "stage", "precision"), CASES)
def test_losses_are_those_without(
    name: str, launcher: str, stage: int, precision: str, place: Place, ranks: Ranks
) -> None:
    for package in ALL[name].needs:
        pytest.importorskip(package)
    without = ranks(plainly, 2, *place.without(name, stage, precision))[0]
    told = place.run(name, launcher, stage, precision)
    assert max(differences(told, without)) <= RTOL[precision], f"{told}\n{without}"


def test_the_losses_that_are_kept_are_close_to_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    rows = runpy.run_path(str(ROOT / "bench" / "harness.py"))["load"](ROOT / "bench" / "results", "programs")["rows"]
    assert {row["system"] for row in rows} == set(ALL) and {row["launcher"] for row in rows} == set(LAUNCHERS)
    assert all(row["difference"] <= RTOL[row["precision"]] for row in rows)
