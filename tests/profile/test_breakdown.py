"""`wall_clock_breakdown`: where the time of a step goes, on rank 0, each `steps_per_print` steps."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config import resolve
from shardwise.memory import Category
from shardwise.profile.peaks import Peak, peak_of
from shardwise.profile.rates import tokens_in
from tests.harness import on_ranks
from tests.harness.logs import logged
from tests.profile.test_engine import engine_of, window
from tests.profile.test_flops import GPT_HEAD, LAYERS, LENGTH, ROWS, gpt_block

ON: dict[str, Any] = {"wall_clock_breakdown": True, "steps_per_print": 2}


def times(lines: list[str]) -> list[dict[str, float]]:
    """The parts of each line of times."""
    return [
        {part: float(ms) for part, ms in re.findall(r"(\w+): ([\d.]+)", line)} for line in lines if "time (ms)" in line
    ]


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)
        return gradient


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (3, 2)])
@on_ranks(2)
def test_times_of_the_parts_on_two_ranks(stage: int, accumulation: int) -> None:
    engine = engine_of(stage, accumulation, **ON)
    engine.module.norm = nn.Sequential(Slow())
    with logged() as kept:
        for _ in range(4):
            window(engine, accumulation)
    found = times(kept.lines)
    assert len(found) == (2 if engine.global_rank == 0 else 0)
    assert engine.global_rank or not engine._profiling._times._pending
    for number, parts in enumerate(found):
        assert any(line.startswith(f"step={2 * number + 2} ") for line in kept.lines)
        assert list(parts) == ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
        assert 30 * accumulation <= parts["fwd"] and 60 * accumulation <= parts["bwd_inner"]
        assert parts["bwd"] == pytest.approx(parts["bwd_inner"] + parts["bwd_allreduce"], abs=0.02)
        assert parts["bwd_allreduce"] > 0 and parts["step"] > 0


@on_ranks(2)
def test_waiting_for_another_rank_is_reduction() -> None:
    """The second rank comes late to its backward pass, for which the first waits in a reduction."""
    engine = engine_of(1, **ON)
    with logged() as kept:
        for _ in range(2):
            loss = engine(torch.zeros(2, 8, dtype=torch.int64)).square().mean()
            time.sleep(0.2 * engine.global_rank)
            engine.backward(loss)
            engine.step()
    for parts in times(kept.lines):
        assert parts["bwd_allreduce"] > 150 > parts["bwd_inner"]
    assert len(times(kept.lines)) == 1 - engine.global_rank


def test_evaluation_and_other_engines_are_not_in_it() -> None:
    engine, other = engine_of(0, wall_clock_breakdown=True, steps_per_print=10), engine_of(0)
    for _ in range(2):
        window(engine)
        window(other)
        with torch.no_grad():
            engine(torch.zeros(2, 8, dtype=torch.int64))
    assert engine._profiling._times is not None and other._profiling._times is None
    seen = [name for name, *_ in engine._profiling._times._pending]
    assert seen.count("fwd") == seen.count("bwd") == seen.count("step") == 2
    assert seen.count("bwd_allreduce") % 2 == 0 < len(seen)
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("more", [{"steps_per_print": float("inf")}, {"steps_per_print": 0}, {}])
def test_without_steps_per_print_each_step_is_printed(more: dict[str, Any]) -> None:
    engine = engine_of(0, wall_clock_breakdown=True, memory_breakdown=True, **more)
    with logged() as kept:
        window(engine)
        window(engine)
    assert len(times(kept.lines)) == 2 and sum("memory of rank" in line for line in kept.lines) == 2
    assert not any("throughput" in line for line in kept.lines)
    engine.destroy()
    config = {"train_batch_size": 1, "wall_clock_breakdown": True, "memory_breakdown": True, **more}
    found = resolve(config)
    assert not found.no_effect and not found.warnings


# -- memory_breakdown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_memory_at_the_phases_of_a_step(stage: int) -> None:
    engine = engine_of(stage, 2, memory_breakdown=True, steps_per_print=2)
    with logged() as kept:
        for _ in range(3):
            window(engine, 2)
    engine.sharded.finish_gathers()
    held = engine.accountant.live[Category.OPTIMIZER]
    first = engine.global_rank == 0
    lines = [line for line in kept.lines if "memory of rank" in line]
    assert len(lines) == first
    for line in lines:
        head, columns, *rows = line.splitlines()
        assert head == "step=2 memory of rank 0"
        titles = ["before forward", "after forward", "after backward", "after step", "peak"]
        assert re.split(r"  +", columns.strip()) == titles
        cells = {name: sizes for name, *sizes in (re.split(r"  +", row) for row in rows)}
        assert {"parameters", "optimizer state", "gradients", "total"} <= set(cells)
        assert cells["optimizer state"][-1] == cells["optimizer state"][0] == f"{held / 1024:.2f} KiB"
        # The second micro-batch begins with the gradients of the first, and the step frees them.
        before, _, backward, step, peak = (cell != "-" for cell in cells["gradients"])
        assert (before, backward, step, peak) == (True, True, False, True)


def test_memory_on_tiers_and_of_a_step_without_engine_backward() -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = engine_of(
        2, memory_breakdown=True, wall_clock_breakdown=True, steps_per_print=1, zero_optimization=offload
    )
    with logged() as kept:
        engine(torch.zeros(2, 8, dtype=torch.int64)).square().mean().backward()
        engine.step()
    (text,) = [line for line in kept.lines if "memory of rank" in line]
    assert "on host" in text and "after backward" not in text and "after step" in text
    assert [list(parts) for parts in times(kept.lines)] == [["fwd", "step"]]
    engine.destroy()


IDS = torch.zeros(3, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((IDS,), {}, 12),
        ((torch.ones(3, 8), IDS), {}, 12),
        ((torch.ones(3, 8), IDS[0]), {}, None),
        ((torch.ones(3, 8, dtype=torch.bool),), {}, None),
        (({"input_ids": IDS, "labels": IDS[:1]},), {}, 12),
        ((IDS[:1],), {"input_ids": IDS}, 12),
        ((), {"input_ids": None, "labels": IDS}, 12),
        ((), {"inputs_embeds": torch.ones(3, 4, 8)}, None),
        ((), {}, None),
    ],
)
def test_tokens_of_a_call(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int | None) -> None:
    assert tokens_in(args, kwargs) == tokens


def test_peaks() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float16) == Peak(312.0, "A100, 16-bit")
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == Peak(19.5, "A100, FP32")
    assert peak_of("NVIDIA H100 PCIe", torch.bfloat16) == Peak(756.0, "H100 PCIe, 16-bit")
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float64) is None
    assert peak_of("NVIDIA H100 NVL", torch.bfloat16) == Peak(835.0, "H100 NVL, 16-bit")
    for other in ("NVIDIA Unheard 9000", "NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA A10G", "NVIDIA T400 4GB"):
        assert peak_of(other, torch.bfloat16) is None
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == Peak(156.0, "A100, TF32")
        assert peak_of("Tesla T4", torch.float32) == Peak(8.1, "T4, FP32")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_of_torch_s_newer_interface() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == Peak(156.0, "A100, TF32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@on_ranks(2)
def test_lines_of_two_ranks() -> None:
    """Each step sleeps."""
    profiler = {"enabled": True, "profile_step": 3, "output_file": "/dev/null"}
    engine, slept = engine_of(2, 2, steps_per_print=2, flops_profiler=profiler), 0.1
    with logged() as kept:
        for _ in range(7):
            window(engine, 2)
            time.sleep(slept)
    lines = [line for line in kept.lines if "throughput" in line]
    engine.destroy()
    assert [line.partition(" ")[0] for line in lines] == ["step=2", "step=4", "step=6"][: 3 * (engine.global_rank == 0)]
    for line in lines:
        samples, tokens = (float(re.findall(rf"([\d.e+]+) {what}", line)[0]) for what in ("samples/s", "tokens/s"))
        assert 0 < samples <= 8 / slept * 1.01
        assert tokens == pytest.approx(samples * LENGTH, rel=1e-2)
        speeds = re.findall(r"([\d.e+-]+) TFLOP/s", line)
        flops = 2 * 3 * (LAYERS * gpt_block() + GPT_HEAD) * samples / (2 * 2 * ROWS)
        assert "MFU" not in line and [float(speed) for speed in speeds] == (
            [pytest.approx(flops / 1e12, rel=1e-2)] if line is lines[2] else []
        )


def test_switched_off_nothing_is_done() -> None:
    for config in ({"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}}, {}):
        engine = engine_of(0, **config)
        assert engine._profiling._rates is None
        with logged() as kept:
            window(engine)
            window(engine)
        assert not any("throughput" in line for line in kept.lines)
        engine.destroy()
    given = {"train_batch_size": 1, "timers": {"throughput": {"synchronized": False}}}
    assert [note.path for note in resolve(given).no_effect] == ["timers"]
    assert not resolve({**given, "steps_per_print": 5}).no_effect and not resolve(given).warnings
