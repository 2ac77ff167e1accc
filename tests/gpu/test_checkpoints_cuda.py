"""Checkpoints of a CUDA device that shards by force: training goes on bit by bit, at its stage and at another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.forced import MODELS, late_collectives, on_device, start_group
from tests.harness.training import Setting, bits, parameters_digest, start, take_steps
from tests.models import GPT
from tests.offload.settings import offload

CASE = on_device(replace(MODELS["gpt"], build=lambda: GPT(dropout=0.1)))
SETTING = Setting(clip=1.0, optimizer="AdamW", lr=1e-2, scale=0)


def begun(setting: Setting, steps: int = 0, seed: int = 0) -> Any:
    """Make an engine that has taken some steps."""
    engine = start(CASE, setting, CASE.make(seed))
    take_steps(engine, CASE, range(steps))
    return engine


def end(engine: Any) -> str:
    """Return a fingerprint of an engine, which ends."""
    found = bits(engine)
    engine.destroy()
    return found


def goes_on(writer: Setting, reader: Setting, path: Path, steps: range, *, asynchronous: bool) -> bool:
    """Return whether an engine with the checkpoint of another one takes the same steps."""
    start_group()
    with late_collectives():
        first = begun(writer, 2)
        first.save_checkpoint(path, asynchronous=asynchronous)
        take_steps(first, CASE, steps)  # while it is written
        first.wait_for_checkpoint()
        second = begun(reader, seed=1)
        second.load_checkpoint(path)
        take_steps(second, CASE, steps)
        return end(first) == end(second)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stages", [(0, 3), (3, 3), (3, 1), (2, 0)])
def test_training_goes_on(stages: tuple[int, int], precision: str, asynchronous: bool, tmp_path: Path) -> None:
    writer, reader = (SETTING.with_stage(stage, precision=precision) for stage in stages)
    assert goes_on(writer, reader, tmp_path, range(2, 4), asynchronous=asynchronous)


@pytest.mark.parametrize("place", ["all on host", "all on disk"])
def test_state_elsewhere(place: str, tmp_path: Path) -> None:
    zero = tuple(offload(place, str(tmp_path / "state")).items())
    setting = SETTING.with_stage(3, precision="bf16", zero=zero)
    assert goes_on(setting, setting, tmp_path / "saved", range(2, 3), asynchronous=True)


def test_whole_weights(tmp_path: Path) -> None:
    start_group()
    setting = SETTING.with_stage(3, precision="bf16")
    with late_collectives():
        engine, other = begun(setting, 1), begun(setting, seed=1)
        engine.save_16bit_model(tmp_path)
        other.load_module_state_dict(engine.module_state_dict())
        assert parameters_digest(engine.module) == parameters_digest(other.module)
        engine.destroy()
        other.destroy()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 0
