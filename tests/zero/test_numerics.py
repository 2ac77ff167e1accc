"""The numerics contract: bit-identity between settings, and closeness to a plain loop over the global batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.comm.intra_node_transport import VARIABLE
from tests.harness import thorough
from tests.harness.training import (
    LAMB,
    MUON,
    OPTIMIZERS,
    Outcome,
    Setting,
    Within,
    assert_close,
    assert_identical,
    assert_no_worse,
    plain,
    trained,
)
from tests.models import CASES
from tests.optim.reference import WrittenLamb, WrittenMuon, by_dimensions
from tests.zero.elsewhere import forced

TINY = 50
"""A cap so small that nearly every parameter is a unit."""


def grid(base: Setting) -> list[Setting]:
    """Every stage with a tiny and the default cap, stage 3 also without prefetch and with units that stay gathered."""
    settings = [base.with_stage(stage, cap=cap) for stage in range(4) for cap in (None, TINY)]
    settings += [base.with_stage(3, cap=cap, prefetch=False) for cap in (None, TINY)]
    settings += [base.with_stage(3, keep=None), base.with_stage(3, cap=TINY, keep=TINY // 2)]
    return settings


def families(settings: Sequence[Setting], outcomes: Sequence[Outcome], what: str) -> list[tuple[Setting, Outcome]]:
    """Check what has to have the same bits; return the first of each family.

    With accumulation stages 0-1 and 2-3 add up in different orders.
    """
    groups: dict[bool, tuple[Setting, Outcome]] = {}
    for setting, outcome in zip(settings, outcomes, strict=True):
        first = groups.setdefault(setting.accumulation > 1 and setting.stage >= 2, (setting, outcome))
        assert_identical(first[1], outcome, f"{what}: {first[0]} and {setting}")
    return list(groups.values())


@pytest.mark.parametrize("half", [thorough(0), 1])
@pytest.mark.parametrize("world", [thorough(2), 3])
@pytest.mark.parametrize(
    "name", [n if n == "form_hugging_face" else thorough(n) for n in CASES if not n.startswith("sparse")]
)
def test_settings_are_bit_identical_and_match_the_plain_loop(name: str, world: int, half: int) -> None:
    base = Setting(accumulation=1 if world == 2 else 2)
    first, *others = grid(base)
    settings = [first, *others[half::2]]
    steps = 3 if half == 0 else 2
    expected = plain(CASES[name], base, world, steps)
    for setting, outcome in families(settings, trained(name, settings, world, steps), name):
        for step, (found, wanted) in enumerate(zip(outcome.gradients, expected.gradients, strict=True)):
            # From the second step on the gradients are those of parameters that differ by rounding already.
            bound = 1e-6 if step == 0 else 4e-6
            assert_close(found, wanted, bound, f"{name}: gradients of step {step} at {setting}")
        assert_close(outcome.masters, expected.masters, 1e-6, f"{name}: parameters at {setting}")


# -- optimizers and precisions -----------------------------------------------------------------------------------------

WRITTEN: dict[str, Any] = {
    "Lamb": lambda groups: WrittenLamb(groups, lr=0.05, **LAMB),
    "Muon": lambda groups: WrittenMuon(by_dimensions(groups), lr=0.05, nesterov=True, ns_steps=5, **MUON),
}
"""Algorithms that torch does not have, written out on whole tensors."""


@dataclass(frozen=True)
class Row:
    """What is trained at every stage; `slack`: how much farther from the fp64 loop than the plain one it may be."""

    name: str
    optimizer: str
    world: int = 2
    steps: int = 3
    lr: float = 1e-2
    slack: float = 2e-7
    keys: dict[str, Any] = field(default_factory=dict)


# The iteration of Muon amplifies rounding of small singular values some hundred times, in every order of sums; torch's
# runs in bf16. What 16 bits cost dwarfs fp32, and chance decides whose roundings are luckier: 2 ** -9 is half a unit in
# the last place of bf16, which an Adam step may turn into a share of the learning rate.
TWICE = {"accumulation": 2, "clip": 0.5}
ROWS = [
    Row("gpt_groups", "AdamW", keys=TWICE),
    thorough(Row("mixed_types", "momentum", steps=5, keys=TWICE)),
    thorough(Row("odd_mlp", "Adam", steps=5, keys=TWICE)),
    thorough(Row("lora", "RMSprop", steps=5, keys=TWICE)),
    thorough(Row("gpt_groups", "Adagrad", 3, steps=5, keys=TWICE)),
    Row("odd_mlp", "norms", steps=4),
    Row("matrices", "torch Muon", steps=4, slack=1e-3),
    thorough(Row("gpt_groups", "subclass", steps=4)),
    thorough(Row("gpt_groups", "Adafactor", steps=4)),
    thorough(Row("gpt", "own AdamW", 3, keys={"clip": 0.7})),
    thorough(Row("gpt_groups", "own Adam")),
    thorough(Row("gpt", "own Adagrad", 3, keys={"clip": 0.7})),
    thorough(Row("gpt", "Lamb", lr=0.05, slack=3e-7, keys={"clip": 0.5})),
    thorough(Row("odd_mlp", "Muon", 4, lr=0.05, slack=5e-5)),
    thorough(Row("frozen_half", "Lamb", 2, lr=0.05, slack=3e-7, keys={"accumulation": 2})),
    thorough(Row("frozen_half", "Muon", 3, lr=0.05, slack=5e-5, keys={"accumulation": 2})),
    thorough(Row("gpt_groups", "Lars", lr=0.1, slack=float("inf"))),
    Row("gpt", "Lion", 3, 2, slack=float("inf"), keys={"clip": 0.7, "precision": "fp16"}),
    thorough(Row("gpt_groups", "AdamW", slack=2.0**-9, keys={"precision": "bf16", **TWICE})),
    thorough(Row("frozen_half", "AdamW", steps=4, slack=2.0**-12, keys={"precision": "fp16", **TWICE})),
    Row("sparse", "AdamW", 3, keys={"clip": 0.5, "extra": (("sparse_gradients", True),)}),
    thorough(Row("sparse_tied", "AdamW", keys={"clip": 0.5, "extra": (("sparse_gradients", True),)})),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.optimizer}-{row.keys.get('precision', 'fp32')}")
def test_every_stage_has_the_same_bits_and_is_no_worse_than_the_plain_loop(row: Row) -> None:
    base = Setting(optimizer=row.optimizer, lr=row.lr, **row.keys)
    settings = [base.with_stage(stage, cap=cap) for stage, cap in ((0, None), (1, TINY), (2, None), (3, TINY))]
    outcomes = families(settings, trained(row.name, settings, row.world, row.steps), row.name)
    if row.slack == float("inf"):
        return
    written = WRITTEN.get(row.optimizer)
    loop, exact = (
        plain(CASES[row.name], base, row.world, row.steps, wide=wide, optimizer=written) for wide in (False, True)
    )
    for _, outcome in outcomes:
        assert_no_worse(outcome.masters, loop.masters, exact.masters, f"{row}", slack=row.slack)


def test_the_rows_have_every_optimizer() -> None:
    rows = [getattr(row, "values", (row,))[0] for row in ROWS]
    assert {row.optimizer for row in rows} == OPTIMIZERS.keys() - {"SGD"}


# -- how it is done ----------------------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch fill memory that it hands out uninitialised with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


messages = functools.partial(mock.patch.dict, "os.environ", {VARIABLE: "messages"})


def three(shape: Any, device: Any) -> int:
    return 3


one_by_one = functools.partial(mock.patch, "shardwise.compat._copies_together", None)  # as without torch's kernel
several_at_once = functools.partial(mock.patch, "shardwise.optim.muon.together", three)  # as a device does

STAGES = [Setting(stage, accumulation=n) for stage in range(4) for n in (1, 2)]
ADAMW = [Setting(stage, accumulation=2, precision="bf16", clip=1.0, optimizer="AdamW", lr=1e-2) for stage in range(4)]
MOMENTUM = [Setting(stage, accumulation=2, optimizer="momentum", clip=0.5) for stage in (0, 2, 3)]
WIRES = [replace(s, clip=0.5, precision="bf16" if s.stage % 3 else "fp32") for s in STAGES]


@pytest.mark.parametrize(
    ("within", "world", "name", "settings"),
    [
        (poisoned, 2, "router", STAGES[3::4]),
        thorough(poisoned, 2, "odd_mlp", STAGES),
        (messages, 2, "two_towers", WIRES[2:7:2]),
        *(thorough(messages, 3, name, WIRES[2:7]) for name in ("gpt", "odd_mlp", "frozen_half", "borrower", "mixture")),
        (one_by_one, 2, "odd_mlp", STAGES[2::4]),
        (forced, 1, "gpt", ADAMW),
        (forced, 1, "lora", MOMENTUM),
        *(thorough(forced, 1, name, MOMENTUM) for name in ("odd_mlp", "borrower", "router", "mixed_types")),
    ],
)
def test_how_it_is_done_changes_no_bit(within: Within, world: int, name: str, settings: list[Setting]) -> None:
    assert VARIABLE not in os.environ
    expected, found = trained(name, settings, world), trained(name, settings, world, within=within)
    for setting, first, second in zip(settings, expected, found, strict=True):
        assert_identical(first, second, str(setting))


def test_matrices_may_be_orthogonalised_together() -> None:
    settings = [Setting(stage, cap=cap, optimizer="Muon", lr=0.05) for stage, cap in ((0, 40), (1, None), (3, 40))]
    families(settings, trained("gpt_groups", settings, 2, within=several_at_once), "several")
