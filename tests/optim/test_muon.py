"""Muon in one process: orthogonalisation, groups by name, the paper's numbers, bad input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.errors import ConfigError, NotBuiltError
from shardwise.optim import Muon, Sharding, build, group_shardings
from shardwise.optim.muon import orthogonalize
from shardwise.registry import declare_stack
from tests.optim.reference import WrittenMuon, newton_schulz


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 24), columns=st.integers(1, 60), steps=st.integers(1, 8), seed=st.integers(0, 999))
def test_both_methods_are_the_iteration_written_out(rows: int, columns: int, steps: int, seed: int) -> None:
    given_ = matrix(rows, columns, seed, torch.float64)
    expected = newton_schulz(given_, steps)
    for method in ("gram", "standard"):
        torch.testing.assert_close(orthogonalize(given_, steps, method), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_matrices_without_full_rank_do_no_harm(method: str) -> None:
    zero = orthogonalize(torch.zeros(4, 9), 5, method)
    assert torch.equal(zero, torch.zeros(4, 9))
    thin = matrix(16, 1) @ matrix(1, 64, 1)
    found = torch.linalg.svdvals(orthogonalize(thin, 5, method))
    assert 0.6 < found[0] < 1.25 and found[1] < 1e-3
    half = orthogonalize(matrix(6, 20).to(torch.bfloat16), 5, method)
    assert half.dtype is torch.bfloat16 and bool(half.isfinite().all())


OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "ns_steps": 5}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize(
    ("options", "many"),
    [
        ({}, 1),
        ({"nesterov": False, "ns_method": "standard"}, 1),
        ({"torch_adam": True}, 1),
        ({"stacked": True}, 1),
        ({"stacked": True, "nesterov": False}, 4),
    ],
)
def test_muon_is_that_of_the_paper(
    options: dict[str, Any], many: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.optim.muon.together", lambda shape, device: many)
    shapes = [(6, 4), (4, 12), (3, 2, 2, 2), (5,), ()]
    ours, theirs = (
        [torch.nn.Parameter(matrix(1, max(1, torch.Size(s).numel()), dtype=dtype).reshape(s)) for s in shapes]
        for _ in range(2)
    )
    options = {"stacked": False, **OPTIONS, **options}
    muon = Muon(ours, **options)
    groups = [{"params": theirs[:3], "use_muon": True}, {"params": theirs[3:], "use_muon": False}]
    written = WrittenMuon(groups, **{"nesterov": True, **options})
    for step in range(3):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            for p in pair:
                p.grad = matrix(1, p.numel(), 10 * step + number, dtype).reshape(p.shape)
        muon.step()
        written.step()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def test_decay_that_is_added_to_the_gradient() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    muon = Muon([first], lr=0.1, weight_decay=0.5, adam_w_mode=False, eps=1e-8)
    adam = torch.optim.Adam([second], lr=0.1, weight_decay=0.5, betas=(0.9, 0.95), fused=True)
    for optimizer, p in ((muon, first), (adam, second)):
        for step in range(3):
            p.grad = torch.tensor([1.0, -1.0, 0.1]) + step
            optimizer.step()
    assert torch.equal(first, second)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 5, bias=False)
        self.tied = nn.Module()
        self.tied.lm_head = self.head


def kinds(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, bool]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["use_muon"] for group in optimizer.param_groups for p in group["params"]}


def test_names_and_dimensions_decide() -> None:
    model = Words()
    expected = {
        "embed_tokens.weight": False,
        "hidden.weight": True,
        "hidden.bias": False,
        "conv.weight": True,
        "conv.bias": False,
        "head.weight": False,  # its other name is tied.lm_head.weight
    }
    named = list(model.named_parameters(remove_duplicate=False))
    for name in ("muon", "Muon", "MUON"):
        built = build(name, model.parameters(), {"stacked": False}, device="cpu", named=named)
        assert type(built) is Muon and kinds(built, model) == expected
        assert [group["lr"] for group in built.param_groups] == [0.02, 3e-4]
    assert group_shardings(built) == [Sharding.WHOLE, Sharding.ELEMENTWISE]
    # By the caller: of the pairs it is told one name each.
    assert kinds(Muon(model.named_parameters(), stacked=False), model) == {**expected, "head.weight": True}
    model.hidden.weight.use_muon = model.conv.weight.use_muon = False
    assert kinds(build("muon", model.parameters(), {}, device="cpu", named=named), model)["hidden.weight"] is False


def test_groups_are_kept_or_divided() -> None:
    model = Words()
    groups = [
        {"params": [model.hidden.weight, model.hidden.bias], "weight_decay": 0.3, "lr": 0.5},
        {"params": [model.conv.weight], "use_muon": False},
        {"params": [model.head.weight], "use_muon": True},
    ]
    built = build("muon", groups, {"lr": 0.1, "adam_lr": 0.2}, device="cpu")
    found = [(group["use_muon"], group["lr"], group["weight_decay"]) for group in built.param_groups]
    assert found == [(True, 0.5, 0.3), (False, 0.5, 0.3), (False, 0.2, 0.0), (True, 0.1, 0.0)]
    built.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert built.param_groups[-1]["use_muon"] is False and built.param_groups[-1]["lr"] == 0.2
    with pytest.raises(ValueError, match="two groups"):
        built.add_param_group({"params": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))]})


def test_options_of_groups_are_checked_too() -> None:
    matrix = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"Muon\(momentum=\.\.\.\): expected a number >= 0 and < 1, found 1\.5"):
        Muon([{"params": [matrix], "momentum": 1.5}])
    assert Muon([{"params": [matrix], "ns_steps": 4.0}], ns_steps=3.0).param_groups[0]["ns_steps"] == 4


def test_vectors_and_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2,\) is no matrix"):
        build("muon", [{"params": [nn.Parameter(torch.zeros(2))], "use_muon": True}], {}, device="cpu")
    with pytest.raises(NotBuiltError, match="per_head_muon"):
        build("muon", [nn.Parameter(torch.zeros(2, 2))], {"per_head_muon": True}, device="cpu")


MANY = [(6, 4), (4, 12), (16, 8), (6, 4), (4, 12), (6, 4), (3, 2, 2, 2), (6, 4), (6, 4), (6, 0)]


def stepped(numbers: Sequence[int], many: int, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return some of the matrices after three steps, in which so many of one shape are orthogonalised at once."""
    monkeypatch.setattr("shardwise.optim.muon.together", lambda shape, device: many)
    chosen = {n: nn.Parameter(matrix(1, math.prod(MANY[n]), n).reshape(MANY[n])) for n in numbers}
    muon = Muon([{"params": list(chosen.values()), "use_muon": True}], lr=0.05, weight_decay=0.1, stacked=stacked)
    for step in range(3):
        for number, parameter in chosen.items():
            parameter.grad = matrix(1, parameter.numel(), 100 * step + number).reshape(parameter.shape)
        muon.step()
    return [*chosen.values(), *(muon.state[p]["momentum_buffer"] for p in chosen.values())]


@pytest.mark.parametrize(("many", "stacked"), [(2, False), (4, False), (4, True)])
def test_what_else_is_stepped_changes_no_bit(many: int, stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks own different matrices at different stages.
    every = stepped(range(len(MANY)), many, stacked, monkeypatch)
    for numbers in ([0], [3, 7, 8], [1, 2, 5, 6, 9]):
        found = stepped(numbers, many, stacked, monkeypatch)
        for one, other in zip(found, [every[k + n] for k in (0, len(MANY)) for n in numbers], strict=True):
            assert torch.equal(one, other)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.ones(2, 4, 4))
        self.experts.bias = nn.Parameter(torch.ones(2, 4))


def test_parameters_of_three_dimensions_are_declared() -> None:
    model = Experts()

    def built(**options: Any) -> torch.optim.Optimizer:
        return build("muon", model.parameters(), options, device="cpu", named=model.named_parameters())

    for make in (built, lambda **options: Muon(model.named_parameters(), **options)):
        for stacked in (None, ["down"]):
            with pytest.raises(
                ConfigError, match=r"'experts\.up' of shape \[2, 4, 4\] is no matrix\. .*`stacked`.*Adam"
            ):
                make(stacked=stacked)
        for stacked, expected in ((["experts"], True), ("up", True), (True, True), (False, False)):
            assert [group["stacked"] for group in make(stacked=stacked).param_groups] == [expected, False]
    declared = Muon([{"params": [model.experts.up], "stacked": True}, {"params": [model.gate.weight]}])
    with pytest.raises(ConfigError, match=r"a parameter of shape \[2, 4, 4\] is no matrix"):
        declared.add_param_group({"params": [nn.Parameter(torch.ones(2, 4, 4))]})
    with pytest.raises(ConfigError, match=r"Muon\(stacked=\.\.\.\): expected true or false"):
        Muon([{"params": [model.gate.weight], "stacked": 3}])
    # Experts that are divided declare themselves: their biases are stacks of vectors.
    for parameter in model.experts.parameters():
        declare_stack(parameter)
    found = kinds(built(), model)
    assert found["experts.up"] and not found["experts.bias"] and found["gate.weight"]
    assert [group["stacked"] for group in built(stacked=False).param_groups] == [True, False, False]
    model.experts.up.use_muon = False
    assert not kinds(built(), model)["experts.up"]


def test_groups_of_one_kind_stay_the_dictionaries_of_the_caller() -> None:
    matrices = {"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.1}
    vectors = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.2, "use_muon": False}
    optimizer = Muon([matrices, vectors])
    assert optimizer.param_groups[0] is matrices and optimizer.param_groups[1] is vectors
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def test_states_of_earlier_versions_and_costs_of_tensors_that_are_one_matrix() -> None:
    weight = nn.Parameter(torch.ones(4, 3, 2, 2))
    optimizer = Muon([weight], lr=0.1, stacked=False)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["stacked"]
    optimizer.load_state_dict(state)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, torch.ones_like(weight))
    for other in (optimizer, Muon([{"params": [weight], "stacked": False}])):
        assert other.shardwise_cost((4, 3, 2, 2)) == other.shardwise_cost((4, 12))
        assert other.shardwise_cost((4, 3, 2, 3)) == 12 * other.shardwise_cost((2, 3))  # of another tensor
