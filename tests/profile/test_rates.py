"""`timers.throughput`: samples, tokens and operations per second, each `steps_per_print` steps on rank 0."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from shardwise.config import resolve
from shardwise.profile.peaks import Peak, peak_of
from shardwise.profile.rates import tokens_in
from tests.harness import on_ranks
from tests.harness.logs import logged
from tests.profile.test_engine import engine_of, window
from tests.profile.test_flops import GPT_HEAD, LAYERS, LENGTH, ROWS, gpt_block

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
    assert peak_of("NVIDIA Unheard 9000", torch.bfloat16) is None
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == Peak(156.0, "A100, TF32")
        assert peak_of("Tesla T4", torch.float32) == Peak(8.1, "T4, FP32")
    finally:
        torch.set_float32_matmul_precision("highest")


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
