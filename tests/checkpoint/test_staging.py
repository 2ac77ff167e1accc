"""Files of tensors on a device that the host cannot read: what is written and read through buffers is the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.checkpoint import safetensors_reader
from shardwise.checkpoint.async_save import Snapshot
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.device import staging
from tests.checkpoint.job import Run, config, differences
from tests.checkpoint.test_async import content
from tests.checkpoint.test_files import TENSORS, equal
from tests.device import checking
from tests.device.recording import recording
from tests.device.streams import far
from tests.harness import on_ranks, thorough

CPU = torch.device("cpu")
LATE = pytest.mark.parametrize("late", [True, False], ids=["late", "early"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files take many buffers."""
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (192,))
    monkeypatch.setattr(safetensors_reader, "_STAGE", 128)


@LATE
def test_files_are_the_same(late: bool, tmp_path: Path, small: None) -> None:
    tensors = {**TENSORS, "turned": torch.randn(40, 30).t()}
    near = write_tensors(str(tmp_path / "near"), tensors)
    with far(late) as streams:
        found = write_tensors(str(tmp_path / "far"), tensors)
    assert found == near
    assert (tmp_path / "far").read_bytes() == (tmp_path / "near").read_bytes()
    assert len(streams) == 1  # all tensors go through the same buffers


@LATE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ranges_are_read_and_converted(late: bool, dtype: torch.dtype, tmp_path: Path, small: None) -> None:
    path = str(tmp_path / "a")
    values = torch.randn(1000)
    write_tensors(path, {"x": values})
    with TensorFile(path) as file, far(late) as streams:
        for start, count in ((0, 1000), (17, 33), (999, 1), (5, 0)):
            out = torch.empty(count, dtype=dtype)
            file.read_into("x", start, out)
            assert equal(out, values[start : start + count].to(dtype))
        assert len(streams) == 4
        spread = torch.zeros(20, dtype=dtype)[::2]  # goes the other way
        file.read_into("x", 0, spread)
        assert equal(spread.contiguous(), values[:10].to(dtype))
        assert len(streams) == 4


@pytest.mark.parametrize(
    ("stage", "late"), [thorough(0, False), thorough(3, False), (3, True)], ids=["0-early", "3-early", "3-late"]
)
@on_ranks(2)
def test_whole_checkpoints(late: bool, stage: int, tmp_path: Path) -> None:
    near = Run(config(stage, "bf16"), seed=1, noise=False)
    near.step()
    with far(late) as streams:
        near.engine.save_checkpoint(tmp_path, tag="far")
        assert streams
        other = Run(config(stage, "bf16"), seed=2, noise=False)
        made = len(streams)
        other.engine.load_checkpoint(tmp_path, tag="far")
        assert len(streams) > made
    assert differences(near.fingerprint(), other.fingerprint()) == []
    assert near.step() == other.step()


# -- saves in the background -------------------------------------------------------------------------------------------


def step(run: Run) -> None:
    run.step()


def user_changes_parameters(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.numel() and not run.engine.sharded.plan.shard_parameters:
                parameter.mul_(2)
    run.step()


def masters_are_set(run: Run) -> None:
    weight = run.model.head.weight
    shardwise.utils.safe_set_full_fp32_param(weight, torch.ones(weight.shape))


def gathered_parameters_are_changed(run: Run) -> None:
    weight = run.model.head.weight
    with shardwise.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(3)


def another_is_loaded(run: Run) -> None:
    path = run.engine.last_async_save.path
    run.load(os.path.dirname(path), tag="first")


def batch_statistics_change(run: Run) -> None:
    run.micro_batch()


DISTURBANCES = [
    user_changes_parameters,
    step,
    masters_are_set,
    gathered_parameters_are_changed,
    another_is_loaded,
    batch_statistics_change,
]


@pytest.mark.parametrize(
    ("stage", "dtype"), [thorough(0, "fp32"), thorough(1, "bf16"), thorough(2, "fp32"), (3, "bf16")]
)
@on_ranks(2)
def test_snapshots_have_what_was_there_when_they_were_taken(stage: int, dtype: str, tmp_path: Path) -> None:
    """Save while the device copies as late as it may; whatever is done meanwhile, what was there before is saved."""
    with far() as streams:
        run = Run(config(stage, dtype), seed=1)
        run.step()
        run.engine.save_checkpoint(tmp_path, tag="first", asynchronous=True)
        run.engine.wait_for_checkpoint()
        stream = streams[0]  # that of the snapshot
        for disturb in DISTURBANCES[stage == 3 :]:  # at stage 3 the first is the second
            run.step()
            run.engine.save_checkpoint(tmp_path, tag="sync")
            stream.needed.clear()
            run.engine.save_checkpoint(tmp_path, tag="async", asynchronous=True)
            first, before = stream.done, stream.log.count("stream waits")
            disturb(run)
            # Nothing but what may write the optimizer's memory waits for the rest.
            waits = disturb is not batch_statistics_change
            assert (stream.log.count("stream waits") > before) is (stream.done > first) is waits, disturb.__name__
            stream.needed.set()
            run.engine.wait_for_checkpoint()
            assert content(f"{tmp_path}/async") == content(f"{tmp_path}/sync"), disturb.__name__
            run.micro_batch() if disturb is batch_statistics_change else None


def test_a_snapshot_comes_behind_what_has_been_brought() -> None:
    near, lent, also_lent = torch.zeros(64), torch.zeros(64), torch.zeros(64)

    def bring(tensors: Sequence[tuple[str, torch.Tensor]], use: Callable[[Sequence[str]], None]) -> None:
        for name, tensor in tensors:
            if tensor is not near:
                tensor.fill_(1.0)  # its values come to the device
            use([name])

    with recording() as recorder, mock.patch("shardwise.checkpoint.async_save.is_far", lambda device: True):
        snapshot = Snapshot(CPU)
        snapshot.take({"near": near, "lent": lent, "also lent": also_lent}, {"lent", "also lent"}, bring)
        snapshot.close()
    assert checking.check_order(recorder.trace, 0) == []
    assert any(event.kind == "kernel" and event.stream == "copies" for event in recorder.trace.events)
