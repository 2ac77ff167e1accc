"""One CUDA device: in a step the host does not wait for it, and a sanitizer of streams finds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shardwise
from shardwise.trees import map_tensors
from tests.gpu.forced import MODELS, late_collectives, outcome, start_group
from tests.gpu.standin import needs_device
from tests.harness.training import DTYPES, Setting, start
from tests.moe.test_layer import stacked

WARM = 3


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps(setting: Setting, mode: str, *, forced: bool, name: str = "gpt") -> int:
    """Train for some steps, one more in a mode of torch that tells of waits; return how often it has told."""
    start_group()
    case = MODELS[name]
    batches = [
        map_tensors(case.data(step, micro, 0, DTYPES[setting.precision]), torch.Tensor.cuda)
        for step in range(WARM + 1)
        for micro in range(setting.accumulation)
    ]

    def step(engine: Any) -> None:
        for _ in range(setting.accumulation):
            engine.backward(case.loss(engine, batches.pop()))
            engine.step()

    with late_collectives(nccl=True) if forced else warnings.catch_warnings():
        ours = shardwise.optim.AdamW if setting.optimizer == "ours" else None
        model = case.make()
        engine = start(case, setting, model, ours(model.parameters(), lr=1e-3) if ours else None)
        for _ in range(WARM):
            step(engine)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as told, sync_mode(mode):
            warnings.simplefilter("always")
            step(engine)
        engine.destroy()
    return sum("synchronizing" in str(warning.message) for warning in told)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["ours", "AdamW", "momentum"])
@pytest.mark.parametrize("forced", [False, True])
def test_the_host_does_not_wait_in_a_step(stage: int, precision: str, optimizer: str, forced: bool) -> None:
    steps(Setting(stage, precision=precision, clip=1.0, accumulation=2, optimizer=optimizer), "error", forced=forced)


@pytest.mark.parametrize("name", ["twice", "recomputed", "reentrant", "lora", "experts"])
def test_the_host_does_not_wait_in_other_models(name: str) -> None:
    steps(Setting(3, precision="bf16", clip=1.0, optimizer="momentum"), "error", forced=True, name=name)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_host_does_not_wait_for_exchanges_of_whole_tensors(stage: int) -> None:
    steps(Setting(stage, precision="bf16", clip=1.0, optimizer="Muon"), "error", forced=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_with_fp16_it_waits_once(stage: int) -> None:
    setting = Setting(stage, precision="fp16", clip=1.0, accumulation=2, optimizer="ours")
    assert steps(setting, "warn", forced=True) <= 1


def test_the_host_does_not_wait_in_a_layer_of_experts() -> None:
    experts = stacked(1).cuda()
    tokens = torch.randn(8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.arange(16, device="cuda").view(8, 2) % 3  # the last expert has no tokens
    weights = torch.full((8, 2), 0.5, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        experts(tokens, chosen, weights).sum().backward()

    step()
    torch.cuda.synchronize()
    with sync_mode("error"):
        step()
    gradient = experts.down_proj.grad
    assert gradient is not None and gradient.isfinite().all() and not gradient[3].any()


def sanitized() -> None:
    """What the sanitizer watches."""
    start_group()
    with late_collectives():
        outcome(MODELS["gpt"], Setting(3, precision="bf16", clip=1.0, accumulation=2, optimizer="AdamW"), 2)
    torch.distributed.destroy_process_group()


@needs_device
@pytest.mark.limit(170)
def test_the_sanitizer_of_streams_finds_nothing() -> None:
    program = "from tests.gpu.test_waits_cuda import sanitized; sanitized()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0 and "data race" not in said.lower(), said[-6000:]
