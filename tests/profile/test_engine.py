"""The section `flops_profiler`: a profile of one step, right at every stage, which changes nothing and costs nothing
before and after.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from tests.harness import run_ranks, thorough
from tests.harness.training import config_of
from tests.models import GPT, language_loss
from tests.profile.test_flops import DIM, GPT_HEAD, LAYERS, LENGTH, ROWS, VOCABULARY, gpt_block

BATCH = {"tokens": torch.arange(ROWS * (LENGTH + 1)).view(ROWS, LENGTH + 1) % VOCABULARY}
PARAMETERS = sum(p.numel() for p in GPT(LAYERS, DIM, VOCABULARY).parameters())


def engine_of(stage: int, accumulation: int = 1, recompute: bool = False, **config: Any) -> Any:
    torch.manual_seed(3)
    model = GPT(LAYERS, DIM, VOCABULARY)
    if recompute:
        model.run = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    keys = {"rows": ROWS, "gradient_accumulation_steps": accumulation, **config}
    return shardwise.initialize(model=model, config=config_of(stage, adam, **keys))[0]


def window(engine: Any, accumulation: int = 1) -> None:
    for _ in range(accumulation):
        engine.backward(language_loss(engine, BATCH))
        engine.step()


def hooks(engine: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())


def trained(stage: int, accumulation: int, recompute: bool, file: str | None) -> tuple[Any, list[Any], list[int]]:
    """Profile (if there is a file), parameters after three steps, and hooks after each."""
    profiler = {"enabled": file is not None, "profile_step": 1, "output_file": file, "recompute_fwd_factor": 1.0}
    engine = engine_of(stage, accumulation, recompute, flops_profiler=profiler)
    counted = [hooks(engine)]
    for _ in range(3):
        window(engine, accumulation)
        counted.append(hooks(engine))
    found, state = engine.last_profile, engine.module_state_dict()
    return found, [state[name] for name in sorted(state)], counted


@pytest.mark.parametrize(
    ("stage", "accumulation", "recompute"), [(0, 1, False), (3, 2, True), thorough(3, 2, False), thorough(3, 1, True)]
)
def test_the_profile_of_a_step_on_two_ranks(stage: int, accumulation: int, recompute: bool, tmp_path: Any) -> None:
    file = tmp_path / "profile.txt"
    (profile, mine, counted), (other, theirs, _) = run_ranks(trained, 2, stage, accumulation, recompute, str(file))
    assert other is None and len(set(counted)) == 1
    forward = LAYERS * gpt_block() + GPT_HEAD
    assert profile.forward == accumulation * forward
    assert profile.backward == 2 * profile.forward
    last = ROWS * LENGTH * 4 * DIM**2
    assert profile.recompute == (accumulation * LAYERS * (gpt_block() - last) if recompute else 0)
    assert profile.parameters == PARAMETERS and profile.calls == accumulation
    assert {child.name: child.parameters for child in profile.children}["blocks"] == sum(
        p.numel() for p in GPT(LAYERS, DIM, VOCABULARY).blocks.parameters()
    )
    text = file.read_text()
    assert f"profile of GPT, step 1: what rank 0 of 2 computes for {accumulation} micro-batches" in text
    assert "attention (Attention)" in text and "by rule:" in text and ("recomputed:" in text) == recompute
    (_, plain, _), _ = run_ranks(trained, 2, stage, accumulation, recompute, None)
    assert all(torch.equal(one, two) for one, two in zip(mine, plain, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(theirs, plain, strict=True))


def put_on(engine: Any) -> list[Any]:
    """Return what a profile would put on the model and around its phases."""
    phases = [engine._profiling.during(phase, (), {}) for phase in ("forward", "backward", "step")]
    engine.destroy()
    return [hooks(engine), *phases]


def test_switched_off_it_puts_nothing_on_the_model() -> None:
    engine = engine_of(1, flops_profiler={"enabled": True, "profile_step": 7})
    window(engine)
    assert put_on(engine) == put_on(engine_of(1))


def test_a_short_report_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"enabled": True, "profile_step": 0, "detailed": False, "top_modules": 2, "module_depth": 1}
    engine = engine_of(0, flops_profiler=options)
    with torch.no_grad():
        engine(BATCH["tokens"])  # evaluation is no part of a step
    window(engine)
    shown = capsys.readouterr().out
    assert "parameters:" in shown and "backward:" in shown and "step:" in shown
    assert "depth 1" in shown and "depth 2" not in shown and "attention (Attention)" not in shown
    assert engine.last_profile.calls == 1
    window(engine)
    assert not capsys.readouterr().out
    engine.destroy()


def test_backward_passes_that_the_engine_does_not_make_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(0, flops_profiler={"enabled": True, "profile_step": 0})
    language_loss(engine, BATCH).backward()
    engine.step()
    assert "backward passes have not been seen" in capsys.readouterr().out
    assert engine.last_profile.backward == 0
    engine.destroy()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_compiled_is_counted_as_written(whole: bool) -> None:
    engine = engine_of(0, flops_profiler={"enabled": True, "profile_step": 1})
    for compiled in [engine] if whole else engine.module.blocks:
        compiled.compile(backend="eager")
    for _ in range(3):
        window(engine)
    assert engine.last_profile.forward == LAYERS * gpt_block() + GPT_HEAD
    assert engine.last_profile.backward == 2 * engine.last_profile.forward
    engine.destroy()


def test_a_profiler_of_the_scripts_own_over_the_engine() -> None:
    engine = engine_of(2)
    profiler = shardwise.profile.FlopsProfiler(engine.module, engine)
    profiler.start_profile()
    engine.backward(language_loss(engine, BATCH))
    profiler.stop_profile()
    assert profiler.get_total_flops() == LAYERS * gpt_block() + GPT_HEAD
    assert profiler.profile.backward == 2 * profiler.get_total_flops()
    assert profiler.get_total_params() == PARAMETERS and isinstance(engine.module, nn.Module)
    engine.destroy()
