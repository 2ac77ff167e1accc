"""The numerics contract in fp32: bit-identity between settings, and closeness to a plain loop over the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.harness import run_ranks, thorough
from tests.harness.training import (
    Outcome,
    Setting,
    assert_close,
    assert_identical,
    assert_no_worse,
    plain,
    ranks_agree,
    train_all,
    trained,
)
from tests.models import CASES

TINY = 50
"""A cap so small that nearly every parameter is a unit."""


def grid(base: Setting) -> list[Setting]:
    """Every stage with a tiny and the default cap, stage 3 also without prefetch and with units that stay gathered."""
    settings = [base.with_stage(stage, cap=cap) for stage in range(4) for cap in (None, TINY)]
    settings += [base.with_stage(3, cap=cap, prefetch=False) for cap in (None, TINY)]
    settings += [base.with_stage(3, keep=None), base.with_stage(3, cap=TINY, keep=TINY // 2)]
    return settings


def families(settings: Sequence[Setting], outcomes: Sequence[Outcome]) -> list[list[tuple[Setting, Outcome]]]:
    """Group what must have the same bits: with accumulation stages 0-1 and 2-3 add up in different orders."""
    groups: dict[bool, list[tuple[Setting, Outcome]]] = {}
    for setting, outcome in zip(settings, outcomes, strict=True):
        groups.setdefault(setting.accumulation > 1 and setting.stage >= 2, []).append((setting, outcome))
    return list(groups.values())


@pytest.mark.parametrize("half", [thorough(0), 1])
@pytest.mark.parametrize("world", [thorough(2), 3])
@pytest.mark.parametrize("name", [name if name == "form_hugging_face" else thorough(name) for name in CASES])
def test_settings_are_bit_identical_and_match_the_plain_loop(name: str, world: int, half: int) -> None:
    base = Setting(accumulation=1 if world == 2 else 2)
    first, *others = grid(base)
    settings = [first, *others[half::2]]
    outcomes = trained(name, settings, world)
    expected = plain(CASES[name], base, world)
    for family in families(settings, outcomes):
        first_setting, reference = family[0]
        for setting, outcome in family[1:]:
            assert_identical(reference, outcome, f"{first_setting} and {setting}")
        for step, (found, wanted) in enumerate(zip(reference.gradients, expected.gradients, strict=True)):
            # From the second step on the gradients are those of parameters that differ by rounding already.
            bound = 1e-6 if step == 0 else 4e-6
            assert_close(found, wanted, bound, f"{name}: gradients of step {step} at {first_setting}")
        assert_close(reference.masters, expected.masters, 1e-6, f"{name}: parameters at {first_setting}")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        thorough("odd_mlp", "Adam"),
        thorough("odd_mlp", "RMSprop"),
        ("gpt_groups", "AdamW"),
        thorough("gpt_groups", "Adagrad"),
        thorough("gpt_groups", "momentum"),
        thorough("lora", "AdamW"),
        thorough("lora", "RMSprop"),
        thorough("mixed_types", "Adam"),
        ("mixed_types", "momentum"),
    ],
)
def test_adam_like_optimizers_are_no_worse_than_the_plain_loop(name: str, optimizer: str) -> None:
    base = Setting(optimizer=optimizer, lr=1e-2, clip=0.5, accumulation=2)
    settings = [
        base.with_stage(stage, cap=cap) for stage, cap in ((0, None), (1, TINY), (2, None), (3, TINY), (3, None))
    ]
    outcomes = trained(name, settings, 2, steps=5)
    loop = plain(CASES[name], base, 2, steps=5)
    exact = plain(CASES[name], base, 2, steps=5, wide=True)
    for family in families(settings, outcomes):
        for setting, outcome in family[1:]:
            assert_identical(family[0][1], outcome, str(setting))
        assert_no_worse(family[0][1].masters, loop.masters, exact.masters, f"{name} {optimizer}")


def _train_on_poisoned_memory(name: str, settings: list[Setting]) -> list[Outcome]:
    """Train while torch fills memory that it hands out uninitialised with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(3).isnan().all())
        return train_all(name, settings)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [thorough("odd_mlp"), "router"])
def test_nothing_is_read_that_was_not_written(name: str) -> None:
    settings = [Setting(accumulation=n).with_stage(stage) for n in (1, 2) for stage in range(4)]
    expected = trained(name, settings, 2)
    found = ranks_agree(run_ranks(_train_on_poisoned_memory, 2, name, settings))
    for setting, first, second in zip(settings, expected, found, strict=True):
        assert_identical(first, second, str(setting))
