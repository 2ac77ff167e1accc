"""One CUDA device that shards as several would: the bits are those of an engine that does not (`forced.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.forced import MODELS, late_collectives, outcome, start_group
from tests.gpu.standin import needs_device
from tests.harness.training import Setting, assert_identical
from tests.offload.settings import offload

SETTING = Setting(clip=1.0, optimizer="AdamW", lr=1e-2)


def compare(name: str, setting: Setting, *, stages: tuple[int, ...] = (1, 2, 3), nccl: bool = False) -> None:
    start_group()
    expected = outcome(MODELS[name], setting)
    for stage in stages:
        with late_collectives(nccl=nccl):
            assert_identical(outcome(MODELS[name], setting.with_stage(stage)), expected, f"stage {stage}")


@pytest.mark.parametrize("name", ["gpt", "gpt_functional_head", "odd_mlp", "borrower"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_late_collectives_change_no_bit(name: str, precision: str, accumulation: int) -> None:
    compare(name, replace(SETTING, precision=precision, accumulation=accumulation))


@pytest.mark.parametrize("name", ["mixture", "lora", "twice", "recomputed", "reentrant"])
def test_other_models(name: str) -> None:
    compare(name, replace(SETTING, precision="bf16", accumulation=2))


@needs_device
def test_compiled_blocks() -> None:
    pytest.importorskip("triton")
    compare("compiled", replace(SETTING, precision="bf16"), stages=(3,))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_late_nccl_changes_no_bit(precision: str, accumulation: int) -> None:
    compare("gpt", replace(SETTING, precision=precision, accumulation=accumulation), nccl=True)


@pytest.mark.parametrize("extra", ["deterministic_reduce", "prefetch", "communication"])
def test_other_ways_through_nccl(extra: str) -> None:
    ways = {
        "deterministic_reduce": replace(SETTING, extra=(("deterministic_reduce", True),)),
        "prefetch": replace(SETTING, precision="bf16", prefetch=False),
        "communication": replace(SETTING, precision="bf16", extra=(("communication_data_type", "fp32"),)),
    }
    compare("gpt", ways[extra], nccl=True)


@pytest.mark.parametrize("place", ["optimizer on host", "parameters on host", "all on host", "all on disk"])
def test_state_elsewhere(place: str, tmp_path: Path) -> None:
    start_group()
    setting = replace(SETTING, precision="bf16", accumulation=2, zero=tuple(offload(place, str(tmp_path)).items()))
    expected = outcome(MODELS["gpt"], setting.with_stage(3))
    with late_collectives():
        assert_identical(outcome(MODELS["gpt"], setting.with_stage(3)), expected, place)
