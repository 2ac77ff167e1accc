"""Ranges of scripts in profiles."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shardwise.utils.nvtx import instrument_w_nvtx, range_pop, range_push


class Doubler:
    @instrument_w_nvtx
    def apply(self, value: Any, *, more: int = 0) -> Any:
        """Twice."""
        if isinstance(value, str):
            raise ValueError(value)
        return 2 * value + more


def names(profile: torch.profiler.profile) -> list[str]:
    return [event.name for event in profile.events() if not event.name.startswith(("aten::", "["))]


def test_a_call_is_a_range_of_its_qualified_name() -> None:
    assert Doubler.apply.__name__ == "apply" and Doubler.apply.__doc__ == "Twice."
    assert Doubler().apply(2, more=1) == 5
    with torch.profiler.profile() as profile:
        assert Doubler().apply(2, more=1) == 5
        with pytest.raises(ValueError, match="wrong"):
            Doubler().apply("wrong")
    assert names(profile) == ["Doubler.apply"] * 2


def test_what_has_no_name_is_shown_somehow() -> None:
    call = instrument_w_nvtx(torch.nn.Identity())
    with torch.profiler.profile() as profile:
        assert call(3) == 3
    assert names(profile) == ["Identity()"]


def test_a_compiled_function_has_no_break() -> None:
    def step(value: torch.Tensor) -> torch.Tensor:
        return Doubler().apply(value) + 1

    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 3.0))


def test_pushed_ranges_nest_within_their_thread() -> None:
    depths = []
    with torch.profiler.profile() as profile:
        assert [range_push("outer"), range_push("inner")] == [0, 1]
        thread = threading.Thread(target=lambda: depths.append(range_pop()))
        thread.start()
        thread.join()
        assert [range_pop(), range_pop(), range_pop()] == [1, 0, -1]
    assert depths == [-1]
    assert names(profile) == ["outer", "inner"]


def test_a_range_that_the_profiler_has_not_seen_begin() -> None:
    range_push("before")
    with torch.profiler.profile() as profile:
        assert range_pop() == 0
    assert names(profile) == []
