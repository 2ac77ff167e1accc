"""Computing in tiles: the same numbers, and one tile's memory; also under ZeRO stage 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.memory.track import track_activations
from shardwise.parallel import TiledMLP, sequence_tiled_compute, tiled_loss
from tests.harness import on_ranks, thorough
from tests.harness.training import SGD, engine_of, gradients


def inputs(rows: int, tokens: int, width: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(words, (rows, tokens))
    labels[:, ::3] = -100
    return torch.randn(rows, tokens, width, dtype=torch.float64, requires_grad=True), labels


def mlp(width: int = 6) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).double()


def found(loss: torch.Tensor, hidden: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    tensors = [hidden, *module.parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("tiles", [1, 4, 7, 100, None])
def test_loss_and_gradients_are_those_without_tiles(tiles: int | None) -> None:
    hidden, labels = inputs(2, 11, 6, 40)
    head = nn.Linear(6, 40).double()
    plain = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss, tokens = tiled_loss(head, hidden, labels, tiles=tiles)
    assert int(tokens) == int((labels != -100).sum())
    for ours, theirs in zip(found(loss, hidden, head), found(plain, hidden, head), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    hidden, labels = inputs(1, 5, 6, 9)
    head = nn.Linear(6, 9).double()
    loss, tokens = tiled_loss(head, hidden, torch.full_like(labels, -100), tiles=2)
    assert (loss.item(), tokens.item()) == (0.0, 0)
    assert all(not bool(grad.any()) for grad in found(loss, hidden, head))


@pytest.mark.parametrize("tiles", [None, 3])
def test_a_tiled_module_is_the_module(tiles: int | None) -> None:
    hidden, _ = inputs(2, 11, 6, 40)
    module = mlp()
    tiled = TiledMLP(module, tiles)(hidden)
    expected = found(module(hidden).square().sum(), hidden, module)
    for ours, theirs in zip(found(tiled.square().sum(), hidden, module), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_tiles_are_weighed_by_their_tokens(reduction: str) -> None:
    hidden, labels = inputs(1, 10, 6, 9)
    head, labels = nn.Linear(6, 9).double(), labels.clamp(min=0)

    def loss(x: torch.Tensor, y: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return F.cross_entropy(layer(x).flatten(0, 1), y.flatten(), reduction=reduction)

    given = {"x": hidden, "y": labels}
    tiled = sequence_tiled_compute(loss, 10, 4, given, {"layer": head}, "x", output_reduction=reduction)
    expected = found(loss(hidden, labels, head), hidden, head)
    for ours, theirs in zip(found(tiled, hidden, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_mean_in_fp16_does_not_overflow() -> None:
    x = torch.full((1, 70000), 3.0, dtype=torch.float16)
    assert sequence_tiled_compute(lambda x: x.mean(), 70000, 2, {"x": x}, {}).item() == 3


def peak(tokens: int, words: int, tiles: int) -> int:
    """Most bytes of tensors that a loss and its gradients make."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(4, words, bias=False), torch.randn(1, tokens, 4, requires_grad=True)
    labels = torch.randint(words, (1, tokens))
    accountant = Accountant()
    with track_activations(accountant):
        loss, _ = tiled_loss(head, hidden, labels, tiles=tiles)
        loss.backward()
    return accountant.peak[Category.ACTIVATIONS]


@pytest.mark.parametrize(("tokens", "words"), [(1024, 16384), thorough(8192, 131072)])
def test_memory_is_that_of_a_tile(tokens: int, words: int) -> None:
    logits = 4 * tokens * words
    assert peak(tokens, words, 64) < 0.1 * logits


class Decoder(nn.Module):
    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.tiled = tiled
        self.inner, self.head = mlp(), nn.Linear(6, 40, bias=False).double()
        self.wrapped = TiledMLP(self.inner, 3)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.tiled:
            return tiled_loss(self.head, self.wrapped(hidden), labels, tiles=4)[0]
        logits = self.head(self.inner(hidden))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def train(stage: int, tiled: bool) -> Any:
    torch.manual_seed(5)
    engine = engine_of(Decoder(tiled).float(), stage, SGD)
    hidden, labels = inputs(2, 11, 6, 40)
    for _ in range(3):
        engine.backward(engine(hidden.detach().float(), labels))
        grads = gradients(engine.module)
        engine.step()
    return grads


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_parameters_that_are_gathered(stage: int) -> None:
    plain, tiled = (train(stage, how) for how in (False, True))
    for name, grad in plain.items():
        torch.testing.assert_close(tiled[name], grad, rtol=1e-5, atol=1e-8)


def test_wrong_arguments() -> None:
    hidden, labels = inputs(1, 5, 6, 9)
    with pytest.raises(UsageError, match=r"\(1, 5, 6\) and labels \(1, 4\)"):
        tiled_loss(nn.Linear(6, 9), hidden, labels[:, :4])
    with pytest.raises(UsageError, match="tiles=0"):
        TiledMLP(nn.Identity(), 0)
    with pytest.raises(UsageError, match=r"expected as many in dimension 1, found \{'x': \(1, 5, 6\)\}"):
        sequence_tiled_compute(lambda x: x, 6, 2, {"x": hidden}, {})
