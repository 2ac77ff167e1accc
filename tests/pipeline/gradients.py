"""Gradients of every parameter of a pipeline, and in one process with plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.zero.access import safe_get_full_optimizer_state
from tests.harness import run_ranks
from tests.harness.training import each
from tests.pipeline.training import Setting, data, engine_of, whole_of

Gradients = dict[str, torch.Tensor]


# -- stages in one process ---------------------------------------------------------------------------------------------


def detached(item: Any) -> Any:
    return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item


def trainable(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor) and item.requires_grad]


def step_by_stages(
    stages: list[nn.Module], batch: Any, loss: Callable[[Any], torch.Tensor] = lambda output: output.loss
) -> tuple[Any, Gradients]:
    """Run stages one after the other as on ranks of their own; return output and gradients by name."""
    torch.manual_seed(5)
    value: Any = batch
    passed = []
    for stage in stages:
        given = tree_map(detached, value) if passed else value
        value = stage(given)
        passed.append((given, value))
    output, grads = value, None
    for given, value in reversed(passed):
        torch.autograd.backward([loss(value)] if grads is None else trainable(value), grads)
        grads = [item.grad for item in trainable(given)]
    found: Gradients = {}
    for stage in reversed(stages):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return output, found


# -- steps of engines --------------------------------------------------------------------------------------------------

PLAIN = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.0}
"""Momentum after one step is the gradient, bit by bit."""


def gradients_alone(setting: Setting, places: int) -> Gradients:
    """Return the gradients of one step in one process, and the buffers after it; losses may have weights."""
    model = whole_of(setting)
    pairs = [setting.batches(0, number, place) for number in range(setting.micro_batches) for place in range(places)]
    made = [setting.loss(model(inputs), labels) for inputs, labels in pairs]
    weighted = [one if isinstance(one, tuple) else (one, 1) for one in made]
    total = sum(int(weight) for _, weight in weighted)
    for loss, weight in weighted:
        (loss * (weight / total)).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {n: found[n] for n, p in model.named_parameters() if p.requires_grad} | dict(model.named_buffers())


def momenta(engine: Any) -> Gradients:
    """Return the momentum of each trained parameter of this rank's stages."""
    found: Gradients = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            momentum = safe_get_full_optimizer_state(parameter, "momentum_buffer")
            found[name] = torch.zeros_like(parameter) if momentum is None else momentum
    return found


def gradients(setting: Setting, prepare: Callable[[Any], Any] = id) -> Gradients:
    """Return the gradients of this rank's stages in one step, and their buffers after it; `prepare` gets the engine."""
    engine = engine_of(replace(setting, config={**PLAIN, **setting.config}))
    prepare(engine)
    engine.train_batch(data(setting, 0))
    return momenta(engine) | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def close(found: Gradients, expected: Gradients, where: str = "", bound: float = 2e-6) -> None:
    """Compare a rank with one process: to a share of each tensor's norm, and 1e-7 of that of all."""
    whole = math.sqrt(sum(float(values.double().square().sum()) for values in expected.values()))
    for name, values in found.items():
        wanted = expected[name].double()
        off, size = float((values.double() - wanted).norm()), float(wanted.norm())
        assert off <= bound * size + 1e-7 * whole, f"{where}: {name}: {off:.1e} of {size:.1e}"


def compare(settings: Sequence[Setting], ranks: int, *, equal: bool = True, places: int = 0) -> None:
    """Compare settings with one process; `equal`: and with the first setting bit by bit.

    `places`: data-parallel ranks, where ranks share tensors as well.
    """
    places = places or ranks // settings[0].stages
    expected = gradients_alone(settings[0], places)
    by_setting = list(zip(*run_ranks(each, ranks, gradients, [(one,) for one in settings]), strict=True))
    first = {name: values for found in by_setting[0] for name, values in found.items()}
    for setting, of_ranks in zip(settings, by_setting, strict=True):
        assert {name for found in of_ranks for name in found} == set(expected)
        for found in of_ranks:
            close(found, expected, setting.schedule)
            assert not equal or all(torch.equal(values, first[name]) for name, values in found.items()), setting
