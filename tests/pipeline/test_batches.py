"""What evaluation leaves as it was, and batches that an error ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.pipe import LayerSpec
from tests.harness import on_ranks
from tests.pipeline.training import Run, Setting, check, data, engine_of, layers, loss_of, train


def with_dropout() -> list[Any]:
    return [*layers()[:2], LayerSpec(nn.Dropout, 0.5), *layers()[2:]]


@on_ranks(2)
def test_evaluation_leaves_the_mode_of_each_module() -> None:
    engine = engine_of(Setting(2, made=with_dropout))
    frozen = [module for module in engine.module.modules() if isinstance(module, nn.Dropout | nn.LayerNorm)]
    for module in frozen:
        module.eval()
    before = {name: module.training for name, module in engine.module.named_modules()}
    engine.eval_batch(data(Setting(2), 0))
    assert before == {name: module.training for name, module in engine.module.named_modules()}
    assert all(not module.training for module in frozen)
    engine.destroy()


@on_ranks(2)
def test_evaluation_keeps_no_outputs_beyond_their_loss() -> None:
    order: list[str] = []

    def noted(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        order.append("loss")
        return loss_of(output, ids)

    engine = engine_of(Setting(2, loss=noted))
    if engine.is_last_stage():
        list(engine.module.modules())[-1].register_forward_hook(lambda *_: order.append("head"))
    loss = engine.eval_batch(data(Setting(2), 0))
    assert order == (["head", "loss"] * 4 if engine.is_last_stage() else [])
    again, outputs = engine.eval_batch(data(Setting(2), 0), return_logits=True)
    assert torch.equal(loss, again) and (len(outputs) == 4 if engine.is_last_stage() else outputs is None)
    engine.destroy()


@pytest.mark.parametrize("kind", [float, torch.tensor])
@on_ranks(2)
def test_a_micro_batch_without_tokens_is_no_part_of_the_mean(kind: Any) -> None:
    """Its own mean is NaN."""
    number = 0

    def weighted(output: torch.Tensor, ids: torch.Tensor) -> Any:
        nonlocal number
        number += 1
        empty = number == 2
        return loss_of(output, torch.full_like(ids, -100) if empty else ids), kind(0.0 if empty else 10.0)

    engine, plain = engine_of(Setting(2, loss=weighted)), engine_of(Setting(2))
    losses = plain.eval_batch(data(Setting(2), 0), reduce_output=None)
    found = engine.eval_batch(data(Setting(2), 0))
    assert math.isfinite(found)
    torch.testing.assert_close(found, losses[[0, 2, 3]].mean(), rtol=1e-6, atol=1e-6)
    engine.destroy()
    plain.destroy()


@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(2)
def test_a_loss_of_one_element_is_evaluated_as_in_training(weighted: bool) -> None:
    def single(output: torch.Tensor, ids: torch.Tensor) -> Any:
        loss = loss_of(output, ids).view(1)
        return (loss, torch.ones(1)) if weighted else loss

    engine, plain = engine_of(Setting(2, loss=single)), engine_of(Setting(2))
    for reduction in ("avg", None):
        found, wanted = (one.eval_batch(data(Setting(2), 0), reduce_output=reduction) for one in (engine, plain))
        torch.testing.assert_close(found, wanted)
    assert float(engine.train_batch(data(Setting(2), 0))) == pytest.approx(float(wanted.mean()))
    engine.destroy()
    plain.destroy()


@on_ranks(2)
def test_training_returns_from_evaluation_mode() -> None:
    losses = []
    for evaluates in (False, True):
        engine = engine_of(Setting(2, made=with_dropout))
        engine.train(not evaluates)
        torch.manual_seed(5)
        losses.append(float(engine.train_batch(data(Setting(2), 0))))
        assert all(module.training for module in engine.modules())
        engine.destroy()
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_batch_that_an_error_has_ended_leaves_nothing_for_the_next() -> None:
    calls = 0

    def raises(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:  # the third micro-batch of the second step
            raise ValueError("a bad sample")
        return loss_of(output, ids)

    setting = Setting(1, zero=1, loss=raises, steps=2)
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    with pytest.raises(ValueError, match="a bad sample"):
        engine.train_batch(data(setting, 5))
    loss = float(engine.train_batch(data(setting, 1)))
    expected = train(Setting(1, zero=1, steps=2))
    assert loss == expected.losses[1]
    engine.destroy()
    values = {name: p.detach().clone().float() for name, p in engine.module.named_parameters()}
    check([Run([loss], [0.0], values)], Run([loss], [0.0], expected.parameters))
