"""Engines with optimizers of this library: the same bits at every stage, no farther from fp64 than plain torch."""

from __future__ import annotations

import pytest

from shardwise import optim
from tests.harness import run_ranks, thorough
from tests.harness.training import Outcome, Setting, assert_identical, assert_no_worse, plain, ranks_agree, train_all
from tests.models import CASES

OPTIONS = {
    "AdamW": {"weight_decay": 0.05, "betas": (0.8, 0.9), "eps": 1e-6},
    "Adagrad": {"eps": 1e-6},
    "Lion": {"weight_decay": 0.05},
}


def trained(kind: str, settings: list[Setting]) -> list[Outcome]:
    return train_all("gpt", settings, make=lambda ps: getattr(optim, kind)(list(ps), lr=1e-2, **OPTIONS[kind]))


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", "AdamW"), thorough("fp32", "Adagrad"), thorough("bf16", "AdamW"), ("fp16", "Lion")]
)
def test_stages_agree_to_the_bit(kind: str, precision: str) -> None:
    settings = [Setting(stage, precision=precision, clip=0.7, lr=1e-2, optimizer=kind) for stage in range(4)]
    outcomes = ranks_agree(run_ranks(trained, 3, kind, settings))
    for setting, outcome in zip(settings, outcomes, strict=True):
        assert_identical(outcome, outcomes[0], f"{setting}")
    if precision == "fp32" and kind != "Lion":
        loop = plain(CASES["gpt"], settings[0], 3)
        exact = plain(CASES["gpt"], settings[0], 3, wide=True)
        assert_no_worse(outcomes[0].masters, loop.masters, exact.masters)
