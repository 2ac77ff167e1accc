"""One CUDA device: every optimizer and precision, sharded by force and not, and as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.config.names import ONEBIT_OPTIMIZERS
from shardwise.optim.registry import names
from tests.gpu.forced import MODELS, assert_equal, late_collectives, masters_on_host, start_group
from tests.harness.training import engine_of
from tests.models import GPT

NEEDS_CLOSURE = {"LBFGS", "SparseAdam"}
"""Refused by the engine."""

OPTIMIZERS = [name for name in names() if name not in NEEDS_CLOSURE]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "autocast": {"torch_autocast": {"enabled": True}},
    "kahan": {"bf16": {"enabled": True, "master_weights": "none", "rounding": "kahan"}},
    "stochastic": {"bf16": {"enabled": True, "master_weights": "none", "rounding": "stochastic"}},
    "narrow state": {"bf16": {"enabled": True, "master_weights": "none", "bf16_optimizer_states": True}},
}
ZEROPP: dict[str, Any] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@contextmanager
def on_the_cpu() -> Iterator[None]:
    with mock.patch("shardwise.engine.build.choose_device", lambda *_: torch.device("cpu")):
        yield


def train(
    config: dict[str, Any], stage: int = 0, optimizer: str = "AdamW", *, steps: int = 3, zero: Any = None
) -> dict[str, torch.Tensor]:
    """Return master weights after some steps."""
    torch.manual_seed(7)
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, **config}
    engine = engine_of(GPT(), stage, {"type": optimizer, "params": {"lr": 1e-3}}, zero=zero, **config)
    case = MODELS["gpt"]
    for step in range(steps):
        for micro in range(2):
            batch = {name: value.to(engine.device) for name, value in case.data(step, micro, 0, torch.float32).items()}
            engine.backward(case.loss(engine, batch))
            engine.step()
    return masters_on_host(engine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    """Stage 0, stage 3 by force, and the CPU."""
    start_group()
    stage = 2 if optimizer.lower() in ONEBIT_OPTIMIZERS else 3  # those keep whole gradients or parameters
    try:
        expected = train({}, optimizer=optimizer)
    except shardwise.errors.ConfigError as error:
        pytest.skip(str(error))
    with on_the_cpu():
        on_cpu = train({}, optimizer=optimizer)
    start = {name: value.detach() for name, value in seeded().items()}
    for name, value in expected.items():
        moved = float((on_cpu[name] - start[name]).norm())
        # Muon's products are of bf16, which kernels round in different places.
        assert float((value - on_cpu[name]).norm()) <= (0.2 if optimizer == "Muon" else 0.05) * moved + 1e-6, name
    if optimizer.lower() not in ONEBIT_OPTIMIZERS:
        with late_collectives():
            assert_equal(train({}, stage, optimizer), expected)


def seeded() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return dict(GPT().named_parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(precision: str) -> None:
    start_group()
    expected = train(PRECISIONS[precision])
    start = seeded()
    assert any(not torch.equal(value, start[name]) for name, value in expected.items())
    for stage in (1, 2, 3):
        with late_collectives():
            assert_equal(train(PRECISIONS[precision], stage), expected)


@pytest.mark.parametrize("keys", [{"zero_quantized_weights": True}, ZEROPP])
def test_quantized_weights_and_gradients(keys: dict[str, Any]) -> None:
    """Codes are made and read on the device: the same each time, and near what exact gathers give."""
    start_group()
    exact = train(PRECISIONS["bf16"], 3)
    with late_collectives(nccl=True):
        first, second = (train(PRECISIONS["bf16"], 3, zero=keys) for _ in range(2))
    assert_equal(first, second)
    start = seeded()
    moved = sum(float((exact[name] - value.detach()).square().sum()) for name, value in start.items()) ** 0.5
    apart = sum(float((first[name] - value).square().sum()) for name, value in exact.items()) ** 0.5
    assert apart < moved


@pytest.mark.parametrize("stage", [0, 3])
def test_other_ways_of_a_step(stage: int) -> None:
    """State that is offloaded in part, and steps during the backward pass, have the values of an ordinary step."""
    start_group()
    config = PRECISIONS["bf16"]
    with late_collectives() if stage else nullcontext():
        ordinary = train(config, stage)
        assert_equal(train({**config, "deterministic_reduce": True}, stage), ordinary)
        assert_equal(train(config, stage, zero={"reduce_bucket_size": 400}), ordinary)
