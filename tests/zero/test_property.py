"""Random combinations of model, number of ranks, precision, accumulation, clipping and bucket cap.

Every example trains with several stages in one call and holds them against each other and against the plain loop.

16-bit precision. Parameters, activations and local gradients are 16-bit, and the plain loop rounds them in the same
places, so at the first step nothing but fp32 sums differs: its gradients are within 1e-6 of each tensor's norm
(`EXACT`). Afterwards masters may differ by an fp32 rounding, which flips the rounding of a parameter to 16 bits where
it lies close to the middle between two numbers. A flip changes that element by one unit in the last place, 2 ** -8 of
it in bf16 and 2 ** -11 in fp16, and all gradients that depend on it by an amount of the order of that fraction of their
norm. So the bound from the second step on is `FLIP` of the norm, with a factor of 4 for what a few layers amplify.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.training import Setting, assert_close, assert_identical, plain, trained
from tests.models import CASES
from tests.zero.test_numerics import TINY

EXACT = 1e-6
FLIP = {"bf16": 4 * 2.0**-8, "fp16": 4 * 2.0**-11}

MODELS = [
    "odd_mlp",
    "gpt",
    "gpt_functional_head",
    "frozen_middle",
    "lora",
    "router",
    "mixture",
    "two_towers",
    "mixed_types",
]


@st.composite
def examples(draw: st.DrawFn) -> tuple[str, int, Setting]:
    name = draw(st.sampled_from(MODELS))
    setting = Setting(
        precision=draw(st.sampled_from(CASES[name].precisions)),
        accumulation=draw(st.sampled_from([1, 3])),
        clip=draw(st.sampled_from([0.0, 0.05])),
        cap=draw(st.sampled_from([None, TINY, 300])),
        prefetch=draw(st.booleans()),
    )
    return name, draw(st.integers(1, 3)), setting


@given(examples())
def test_any_combination_matches_the_plain_loop(example: tuple[str, int, Setting]) -> None:
    name, world, base = example
    settings = [base.with_stage(stage) for stage in range(4)]
    outcomes = trained(name, settings, world, 2)
    expected = plain(CASES[name], base, world, 2)
    assert_identical(outcomes[0], outcomes[1], "stages 0 and 1")
    assert_identical(outcomes[2], outcomes[3], "stages 2 and 3")
    if base.accumulation == 1:
        assert_identical(outcomes[0], outcomes[2], "stages 0 and 2")
    for setting, outcome in zip(settings, outcomes, strict=True):
        bounds = [EXACT, EXACT if base.precision == "fp32" else FLIP[base.precision]]
        for step, (found, wanted) in enumerate(zip(outcome.gradients, expected.gradients, strict=True)):
            assert_close(found, wanted, bounds[step], f"gradients of step {step} at {setting}")
        assert_close(outcome.masters, expected.masters, bounds[-1], f"parameters at {setting}")
        if base.clip:
            for ours, theirs in zip(outcome.norms, expected.norms, strict=True):
                assert ours is not None and theirs is not None
                assert abs(ours - theirs) <= max(bounds) * theirs
