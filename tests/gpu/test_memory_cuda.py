"""One CUDA device: the bytes that the accountant tracks against those that torch's allocator hands out."""

from __future__ import annotations

import torch
from torch import nn

import shardwise
from shardwise.memory import track_activations
from tests.gpu.standin import rehearsing


def test_tracked_peak_is_that_of_the_allocator() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    engine, *_ = shardwise.initialize(
        model=nn.Sequential(*layers),
        config={"train_micro_batch_size_per_gpu": 512, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )
    x = torch.randn(512, 2048, device=engine.device)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    step()
    step()
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - engine.accountant.total  # the batch, workspaces of cuBLAS
    torch.cuda.reset_peak_memory_stats()
    engine.accountant.reset_peak()
    with track_activations(engine.accountant):
        step()
    report = engine.memory_report(x)
    assert report.total.measured is not None and report.allocated is not None and report.reserved is not None
    if not rehearsing():
        assert report.reserved >= report.allocated == torch.cuda.max_memory_allocated()
        assert abs(report.allocated - others - report.total.measured) <= 0.05 * report.allocated
    assert report.total.planned is not None
    assert abs(report.total.planned - report.total.measured) <= 0.1 * report.total.measured
    assert "The device's allocator" in report.render()
    engine.destroy()
