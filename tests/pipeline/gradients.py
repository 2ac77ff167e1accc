"""Gradients of every parameter of a pipeline, and in one process with plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.zero.access import safe_get_full_optimizer_state
from tests.harness import run_ranks
from tests.pipeline.training import Setting, data, engine_of, model_of

Gradients = dict[str, torch.Tensor]

PLAIN = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.0}
"""Momentum after one step is the gradient, bit by bit."""


def gradients_alone(setting: Setting, places: int) -> Gradients:
    """Return the gradients of one step in one process, and the buffers after it."""
    model = model_of(1, setting.made, setting.loss, **setting.options)
    for number in range(setting.micro_batches):
        for place in range(places):
            inputs, labels = setting.batches(0, number, place)
            loss = setting.loss(model(inputs), labels)
            (loss / (setting.micro_batches * places)).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {n: found[n] for n, p in model.named_parameters() if p.requires_grad} | dict(model.named_buffers())


def gradients(setting: Setting) -> Gradients:
    """Return the gradients of this rank's stages in one step, and their buffers after it."""
    engine = engine_of(replace(setting, config={**PLAIN, **setting.config}))
    engine.train_batch(data(setting, 0))
    found: Gradients = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            momentum = safe_get_full_optimizer_state(parameter, "momentum_buffer")
            found[name] = torch.zeros_like(parameter) if momentum is None else momentum
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return found


def gradients_of_all(settings: Sequence[Setting]) -> list[Gradients]:
    """Return the gradients of several settings, one after the other."""
    return [gradients(setting) for setting in settings]


def compare(settings: Sequence[Setting], ranks: int, *, equal: bool = True, **tolerance: Any) -> None:
    """Compare settings with one process; `equal`: and with the first setting bit by bit."""
    places = ranks // settings[0].stages
    expected = gradients_alone(settings[0], places)
    by_setting = list(zip(*run_ranks(gradients_of_all, ranks, list(settings)), strict=True))
    first = {name: values for found in by_setting[0] for name, values in found.items()}
    for setting, of_ranks in zip(settings, by_setting, strict=True):
        assert {name for found in of_ranks for name in found} == set(expected)
        for found in of_ranks:
            for name, values in found.items():
                where = f"{setting.schedule}, {name}"
                limit = {"rtol": 1e-5, "atol": 1e-7, **tolerance}
                torch.testing.assert_close(values, expected[name], **limit, msg=lambda text: f"{where}: {text}")  # noqa: B023
                assert not equal or torch.equal(values, first[name]), where
