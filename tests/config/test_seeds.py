"""Sections as articles and tutorials print them; whole configurations are in tests/dropin."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import ConflictError


def small(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, **keys}


HYBRID = small(
    zero_optimization={"stage": 3},
    pipeline={"enabled": True, "partition": "uniform", "stages": 4},
    tensor_parallel={"enabled": True, "size": 2},
)
PRINTED = {
    "autotuning": {"fast": True, "metric": "throughput", "arg_mappings": None},
    "flops_profiler": {"profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
    "pipeline": {"partition": "uniform", "stages": 1},
    "tensor_parallel": {"size": 2},
}


def test_hybrid_parallelism_divides_the_ranks() -> None:
    config = resolve(HYBRID, world_size=8).config
    assert config.pipeline.stages == 4 and config.tensor_parallel.size == 2
    with pytest.raises(ConflictError) as caught:
        resolve(HYBRID, world_size=2)
    assert [problem.path for problem in caught.value.problems] == ["pipeline.stages"]


@pytest.mark.parametrize("section", PRINTED)
def test_a_section_switched_off_is_accepted_and_listed(section: str) -> None:
    resolution = resolve(small(**{section: {**PRINTED[section], "enabled": False}}))
    assert [note.path for note in resolution.no_effect] == [section]
