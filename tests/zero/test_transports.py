"""Through memory or through messages: gradients have the same bits."""

from __future__ import annotations

import os

import pytest

from shardwise.comm.intra_node_transport import VARIABLE
from tests.harness import run_ranks, thorough
from tests.harness.training import Outcome, Setting, assert_identical, ranks_agree, train_all
from tests.models import CASES

STAGES = [
    Setting(stage=stage, accumulation=accumulation, precision=precision, clip=0.5)
    for stage, accumulation, precision in (
        (0, 1, "fp32"),
        (1, 3, "bf16"),
        (2, 1, "bf16"),
        (2, 3, "fp32"),
        (3, 2, "fp32"),
    )
]


def train_through(transport: str, name: str, settings: list[Setting]) -> list[Outcome]:
    os.environ[VARIABLE] = transport
    try:
        return train_all(name, settings)
    finally:
        del os.environ[VARIABLE]


@pytest.mark.parametrize(
    "name", [name if name == "two_towers" else thorough(name) for name in CASES if not name.startswith("form_")]
)
def test_both_give_the_same_bits(name: str) -> None:
    world = 3 if name == "gpt" else 2
    settings = [setting for setting in STAGES if setting.precision in CASES[name].precisions]
    found = [
        ranks_agree(run_ranks(train_through, world, transport, name, settings)) for transport in ("memory", "messages")
    ]
    for setting, memory, messages in zip(settings, *found, strict=True):
        assert_identical(memory, messages, f"{name}, {setting}")
