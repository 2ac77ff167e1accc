"""One CUDA device: the bytes that the accountant tracks against those that torch's allocator hands out."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from shardwise.engine.reserved import RESERVE
from shardwise.memory import track_activations
from shardwise.trees import map_tensors
from tests.gpu.forced import MODELS, late_collectives, start_group
from tests.gpu.standin import needs_device, rehearsing
from tests.harness.training import ADAMW, Setting, engine_of, start


def test_tracked_peak_is_that_of_the_allocator() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    engine = engine_of(nn.Sequential(*layers), 0, ADAMW)
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


def peak(stage: int) -> int:
    """Most bytes that torch's allocator gives out in steps of an engine that shards by force, beyond the batch."""
    with late_collectives():
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]
        engine = engine_of(nn.Sequential(*layers), stage, ADAMW, bf16={"enabled": True})
        x = torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)
        for step in range(3):
            if step == 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            engine.backward(engine(x).float().square().mean())
            engine.step()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        engine.destroy()
        return most


def test_a_higher_stage_takes_no_more() -> None:
    start_group()
    peaks = [peak(stage) for stage in (0, 1, 2, 3)]
    slack = 1 << 20  # of roundings, and of small buffers that one rank does not divide
    if not rehearsing():
        assert all(after <= before + slack for before, after in pairwise(peaks)), peaks


def test_lengths_that_vary_leave_no_holes() -> None:
    """What the allocator keeps does not grow once it has seen all lengths."""
    start_group()
    case, generator = MODELS["gpt"], torch.Generator().manual_seed(0)
    with late_collectives():
        engine = start(case, Setting(3, precision="bf16", clip=1.0, optimizer="AdamW"))
        kept = []
        for _ in range(100):
            length = int(torch.randint(3, 17, (), generator=generator))
            tokens = torch.randint(31, (4, length), generator=generator).cuda()
            engine.backward(case.loss(engine, {"tokens": tokens}))
            engine.step()
            kept.append(torch.cuda.memory_reserved())
        engine.destroy()
    if not rehearsing():
        assert max(kept[50:]) <= 1.05 * max(kept[:50]), kept


def test_communicators_take_no_more_than_their_reserve() -> None:
    """Device memory outside of the allocator that grows with the communicators of an engine, with NCCL's own."""
    start_group()
    case = MODELS["gpt"]
    with late_collectives(nccl=True):
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        engine = start(case, Setting(3, precision="bf16", clip=1.0, optimizer="AdamW"))
        for _ in range(2):
            engine.backward(case.loss(engine, map_tensors(case.data(0, 0, 0, torch.bfloat16), torch.Tensor.cuda)))
            engine.step()
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        made = len(engine.job.communicators())
        engine.destroy()
    assert made == 3  # of all-gathers, of reductions and of small sums
    assert rehearsing() or taken <= made * RESERVE + (256 << 20), taken  # and code of kernels


@needs_device
@pytest.mark.parametrize("expandable", [False, True])
def test_memory_pools_of_the_script_go_with_an_engine(expandable: bool) -> None:
    """In a process of its own, whose allocator an engine of stage 3 sets up (`expandable_segments`)."""
    program = f"from tests.gpu.test_memory_cuda import pooled; pooled({expandable})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=80, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


def pooled(expandable: bool) -> None:
    """Train with a tensor in a pool of the script."""
    start_group()
    case = MODELS["gpt"]
    with late_collectives():
        engine = start(case, Setting(3, optimizer="AdamW", extra=(("expandable_segments", expandable),)))
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = torch.ones(1 << 20, device="cuda")
        for _ in range(2):
            engine.backward(case.loss(engine, map_tensors(case.data(0, 0, 0, torch.float32), torch.Tensor.cuda)))
            engine.step()
        assert float(kept.sum()) == 1 << 20
        engine.destroy()
