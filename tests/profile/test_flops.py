"""Floating-point operations are those of closed forms, exactly, forward, backward, recomputed, and by module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import UsageError
from shardwise.profile import FlopsProfiler, ModuleProfile, get_model_profile
from shardwise.profile.formulas import formulas
from tests.models import GPT

LAYERS, DIM, VOCABULARY, ROWS, LENGTH = 3, 12, 31, 2, 8


def profiled(model: nn.Module, loss: Callable[[], torch.Tensor]) -> ModuleProfile:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss().backward()
    profiler.stop_profile()
    return profiler.profile


def flat(profile: ModuleProfile) -> dict[str, ModuleProfile]:
    return {module.name: module for module in profile.walk()}


# -- GPT ---------------------------------------------------------------------------------------------------------------


def gpt_profile(run: Callable[..., torch.Tensor] | None = None, head: str = "tied") -> ModuleProfile:
    model = GPT(LAYERS, DIM, VOCABULARY, head)
    if run is not None:
        model.run = run
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    return profiled(model, lambda: model(tokens).square().sum())


def gpt_block() -> int:
    """2 a token and weight of the matrices (3 d^2 + d^2 + 2 d^2 + 2 d^2), and 2 s^2 d each for scores and mixing."""
    return ROWS * (LENGTH * 2 * 8 * DIM**2 + 2 * 2 * LENGTH**2 * DIM)


GPT_HEAD = ROWS * LENGTH * 2 * DIM * VOCABULARY


@pytest.mark.parametrize("head", ["tied", "own", "functional"])
def test_gpt(head: str) -> None:
    profile = gpt_profile(head=head)
    assert profile.forward == LAYERS * gpt_block() + GPT_HEAD
    assert profile.backward == 2 * profile.forward and profile.recompute == 0
    assert profile.macs == profile.forward // 2
    modules = flat(profile)
    for layer in range(LAYERS):
        block = modules[f"blocks.{layer}"]
        assert (block.forward, block.backward, block.calls) == (gpt_block(), 2 * gpt_block(), 1)
        assert modules[f"blocks.{layer}.up"].forward == ROWS * LENGTH * 4 * DIM**2
        assert modules[f"blocks.{layer}.up"].backward == ROWS * LENGTH * 8 * DIM**2
        scores = ROWS * 2 * 2 * LENGTH**2 * DIM
        attention = modules[f"blocks.{layer}.attention"]
        assert attention.forward - sum(child.forward for child in attention.children) == scores
        assert attention.backward - sum(child.backward for child in attention.children) == 2 * scores
    assert profile.parameters == sum(p.numel() for p in GPT(LAYERS, DIM, VOCABULARY, head).parameters())
    if head != "functional":
        assert modules["head"].forward == GPT_HEAD and modules["head"].parameters == VOCABULARY * DIM
    tied = VOCABULARY * DIM if head == "tied" else 0
    assert sum(child.parameters for child in profile.children) - tied == profile.parameters


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_counted_apart(reentrant: bool) -> None:
    plain = gpt_profile()
    again = gpt_profile(partial(checkpoint, use_reentrant=reentrant))
    assert (again.forward, again.backward) == (plain.forward, plain.backward)
    # torch stops when what is saved has been computed: the last product of a block is not.
    last = ROWS * LENGTH * 4 * DIM**2
    expected = LAYERS * (gpt_block() - (0 if reentrant else last))
    assert again.recompute == expected
    for name, module in flat(again).items():
        assert module.backward == flat(plain)[name].backward, name
        assert module.calls == flat(plain)[name].calls, name


def test_recomputation_of_a_function_belongs_to_the_module_that_called_it() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda h: ((h @ self.weight).tanh() @ self.weight).tanh(), x, use_reentrant=False)

    model = nn.Sequential(nn.Linear(6, 6), Half())
    profile = profiled(model, lambda: model(torch.ones(4, 6)).sum())
    half = flat(profile)["1"]
    product = 2 * 4 * 6 * 6
    assert (half.forward, half.backward, half.recompute) == (2 * product, 4 * product, 2 * product)
    assert profile.recompute == half.recompute


# -- as torch counts ---------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Convolutions, a module called twice, one whose input needs no gradient, and a derivative inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose2d(4, 2, 3)
        self.twice, self.out = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() * 1.0  # torch's own counter follows no derivative by a leaf
        y = self.out(self.twice(self.twice(x).tanh()))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return self.up(self.conv(image)).sum() + slope.square().sum()


def inputs_of(kind: str) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """Return a model, and its loss."""
    if kind == "odd":
        image, x = torch.randn(2, 3, 9, 9), torch.randn(7, 5)
        return Odd(), lambda model: model(image, x)
    families = pytest.importorskip("tests.families")
    given = families.batch(kind, 0, ROWS)
    how = {"experts_implementation": "eager"} if kind == "mixtral" else {}
    return families.build(kind, attn_implementation="eager", **how), lambda model: model(**given).loss


@pytest.mark.parametrize("kind", ["odd", "t5", "mixtral"])
def test_totals_are_those_of_torchs_counter(kind: str) -> None:
    model, loss_of = inputs_of(kind)
    with FlopCounterMode(display=False) as counter:
        loss = loss_of(model)
        forward = counter.get_total_flops()
        loss.backward()
    profile = profiled(model, lambda: loss_of(model))
    assert profile.forward == forward
    assert profile.forward + profile.backward == counter.get_total_flops() and profile.recompute == 0
    if kind == "odd":
        assert flat(profile)["twice"].calls == 2


class Fused(nn.Module):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*given)


def test_fused_attention_forms_the_scores_once_more_in_the_backward_pass() -> None:
    rows, heads, own, other, width = 2, 3, 6, 10, 4
    given = [torch.randn(rows, heads, length, width, requires_grad=True) for length in (own, other, other)]
    model = Fused()
    profile = profiled(model, lambda: model(*given).sum())
    product = 2 * rows * heads * own * other * width
    assert (profile.forward, profile.backward) == (2 * product, 5 * product)


def test_operators_that_torch_does_not_count() -> None:
    model = nn.Linear(6, 5, bias=False)
    assert profiled(model, lambda: model(torch.ones(6)).sum()).forward == 2 * 6 * 5
    known = formulas()
    assert known[torch.ops.aten.dot](torch.ones(7), torch.ones(7), out_val=torch.ones(())) == 14
    if hasattr(torch.ops.aten, "_grouped_mm"):
        grouped = known[torch.ops.aten._grouped_mm]
        one, groups, out = torch.ones(9, 4), torch.ones(3, 4, 5), torch.ones(9, 5)
        assert grouped(one, groups, torch.tensor([2, 5, 9]), out_val=out) == 2 * 9 * 4 * 5
        assert grouped(torch.ones(3, 4, 5), torch.ones(5, 8), torch.tensor([2, 5, 8]), out_val=out) == 2 * 4 * 5 * 8


# -- the interface -----------------------------------------------------------------------------------------------------


def test_get_model_profile(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
    flops, macs, parameters = get_model_profile(model, (2, 3, 8, 8), as_string=False)
    assert flops == 2 * 2 * (36 * 27 * 8 + 288 * 10) and macs == flops // 2
    assert parameters == 3 * 8 * 9 + 8 + 2880 + 10
    shown = capsys.readouterr().out
    assert "profile of Sequential" in shown and "0 (Conv2d)" in shown and "2 (Linear)" in shown
    found = get_model_profile(model, args=[torch.ones(1, 3, 8, 8)], detailed=False)
    assert found[2] == "3.11 K" and "0 (Conv2d)" not in capsys.readouterr().out
    file = tmp_path / "new" / "profile.txt"
    get_model_profile(model, kwargs={"input": torch.ones(1, 3, 8, 8)}, output_file=str(file))
    assert "Conv2d" in file.read_text() and not capsys.readouterr().out
    without = get_model_profile(model, (2, 3, 8, 8), as_string=False, print_profile=False, ignore_modules=[nn.Conv2d])
    assert without[0] == 2 * 2 * 288 * 10
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_generate() -> None:
    class Twice(nn.Linear):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x))

    assert get_model_profile(Twice(4, 4), (2, 4), mode="generate", as_string=False, print_profile=False)[0] == 2 * 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give input_shape, or args and kwargs"),
        ({"input_shape": (2,), "args": [1]}, "not both"),
        ({"input_shape": ()}, r"input_shape=\(\)"),
        ({"input_shape": (2, 0)}, "sizes above 0"),
        ({"input_shape": 3}, "input_shape=3"),
        ({"input_shape": (2,), "mode": "train"}, 'expected "forward" or "generate"'),
        ({"input_shape": (2,), "mode": "generate"}, "has no method generate"),
        ({"input_shape": (2,), "warm_up": -1}, "warm_up=-1"),
        ({"input_shape": (2,), "ignore_modules": ["Linear"]}, "found 'Linear'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        get_model_profile(nn.Linear(2, 2), **arguments)


def test_wrong_order_of_calls() -> None:
    with pytest.raises(UsageError, match="found str"):
        FlopsProfiler("model")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="recompute_fwd_factor=-1"):
        FlopsProfiler(nn.Linear(2, 2), recompute_fwd_factor=-1)
    profiler = FlopsProfiler(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="nothing has been profiled"):
        profiler.get_total_flops()
    profiler.start_profile()
    with pytest.raises(UsageError, match="has been started"):
        profiler.start_profile()
    profiler.end_profile()
    profiler.end_profile()
    assert not profiler.model._forward_hooks


def test_an_exception_in_the_model_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        get_model_profile(model, (1, 2), warm_up=0, print_profile=False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model[0](torch.ones(1, 2)).shape == (1, 2)
