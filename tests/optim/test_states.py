"""Cutting and joining optimizer state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CheckpointError
from shardwise.optim import is_elementwise_state, merge_states, split_state
from shardwise.optim.sharding import _ELEMENTWISE

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def trained(cls: type[torch.optim.Optimizer], weight: torch.Tensor, steps: int) -> torch.optim.Optimizer:
    optimizer = cls([weight], lr=0.1)  # type: ignore[call-arg]
    advance(optimizer, weight, range(steps))
    return optimizer


def advance(optimizer: torch.optim.Optimizer, weight: torch.Tensor, steps: range, cut: slice | None = None) -> None:
    for step in steps:
        gradient = torch.sin(torch.arange(1.0, 1000.0) * (step + 1))
        gradient = gradient[: weight.numel()] if cut is None else gradient[cut]
        weight.grad = gradient.view(weight.shape).clone()
        optimizer.step()


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert list(left) == list(right)
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.shape == right[name].shape, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


@pytest.mark.parametrize("cls", sorted(_ELEMENTWISE, key=lambda cls: cls.__name__))
@given(shape=SHAPES, cuts=st.lists(st.integers(0, 216), max_size=4), steps=st.integers(0, 3))
def test_merge_undoes_split(
    cls: type[torch.optim.Optimizer], shape: tuple[int, ...], cuts: list[int], steps: int
) -> None:
    weight = torch.ones(shape, requires_grad=True)
    numel = weight.numel()
    state = trained(cls, weight, steps).state.get(weight, {})
    bounds = sorted([0, numel, *(min(cut, numel) for cut in cuts)])
    pieces = [(b - a, split_state(state, numel, a, b)) for a, b in pairwise(bounds)]
    assert_same_state(merge_states(pieces, shape), dict(state))


@pytest.mark.parametrize("cls", sorted(_ELEMENTWISE, key=lambda cls: cls.__name__))
@pytest.mark.parametrize("shape", [(), (1,), (8, 6)])
def test_training_goes_on_from_split_state(cls: type[torch.optim.Optimizer], shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape, requires_grad=True)
    numel = weight.numel()
    optimizer = trained(cls, weight, 2)
    bounds = [0, numel // 2 // 16 * 16, numel]
    parts = [weight.detach().reshape(-1)[a:b].clone().requires_grad_() for a, b in pairwise(bounds)]
    on_parts = cls(parts, lr=0.1)  # type: ignore[call-arg]
    for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
        on_parts.state[part] = split_state(optimizer.state[weight], numel, a, b)
    advance(optimizer, weight, range(2, 5))
    for step in range(2, 5):
        gradient = torch.sin(torch.arange(1.0, 1000.0) * (step + 1))[:numel]
        for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
            part.grad = gradient[a:b].clone()
        on_parts.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), weight.detach().reshape(-1))


def test_pieces_share_nothing_with_the_whole_or_each_other() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0), "extra": {"history": [1]}}
    first, second = split_state(state, 6, 0, 3), split_state(state, 6, 3, 6)
    first["step"] += 1
    first["exp_avg"].zero_()
    first["extra"]["history"].append(2)
    assert second["step"] == 3
    assert state["step"] == 3
    assert torch.equal(state["exp_avg"], torch.arange(6.0))
    assert state["extra"] == {"history": [1]} == second["extra"]
    assert first["exp_avg"].untyped_storage().nbytes() == 12


def test_what_counts_as_elementwise() -> None:
    assert is_elementwise_state(torch.zeros(2, 3), 6)
    assert not is_elementwise_state(torch.zeros(2), 6)
    assert not is_elementwise_state(3, 1)
    assert not is_elementwise_state(torch.tensor(1.0), 1, "step")
    assert is_elementwise_state(torch.tensor(1.0), 1, "exp_avg")


def test_state_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'row_var': a tensor of shape \(2, 1\) cannot be cut .* 6 elements"):
        split_state({"row_var": torch.zeros(2, 1)}, 6, 0, 3)
    with pytest.raises(ValueError, match=r"range \[2, 9\)"):
        split_state({}, 6, 2, 9)


def test_ranges_that_disagree_are_refused() -> None:
    early = {"step": torch.tensor(1.0), "m": torch.zeros(2)}
    late = {"step": torch.tensor(2.0), "m": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="'step': ranges of one parameter disagree"):
        merge_states([(2, early), (2, late)])
    with pytest.raises(CheckpointError, match="differ in the entries m"):
        merge_states([(2, early), (2, {"step": torch.tensor(1.0)})])


def test_empty_ranges_and_parameters() -> None:
    state = {"step": torch.tensor(1.0), "m": torch.ones(2)}
    assert_same_state(merge_states([(0, {}), (2, state), (0, {})]), state)
    assert merge_states([(0, {}), (0, {})]) == {}
    nothing = {"step": torch.tensor(1.0), "m": torch.ones(0)}
    assert_same_state(merge_states([(0, split_state(nothing, 0, 0, 0))]), nothing)
