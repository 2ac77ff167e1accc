"""Files of tensors on a device that the host cannot read: what is written and read through buffers is the same."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import tensorfile
from shardwise.checkpoint.statefile import StateFileWriter
from shardwise.checkpoint.tensorfile import Spec, TensorFile
from shardwise.checkpoint.tensorwriter import TensorWriter, write_tensors
from shardwise.device import staging
from shardwise.errors import CheckpointError
from tests.checkpoint.job import Run, config, differences, on_ranks
from tests.checkpoint.test_tensorfile import TENSORS, equal
from tests.device.streams import far

LATE = pytest.mark.parametrize("late", [True, False], ids=["late", "early"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files take many buffers."""
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (192,))
    monkeypatch.setattr(tensorfile, "_STAGE", 128)


@LATE
@pytest.mark.parametrize("direct", [False, True])
def test_files_are_the_same(late: bool, direct: bool, tmp_path: Path, small: None) -> None:
    tensors = {**TENSORS, "turned": torch.randn(40, 30).t()}
    near = write_tensors(str(tmp_path / "near"), tensors, direct=direct)
    with far(late) as streams:
        found = write_tensors(str(tmp_path / "far"), tensors, direct=direct)
    assert found == near
    assert (tmp_path / "far").read_bytes() == (tmp_path / "near").read_bytes()
    assert len(streams) == 1  # all tensors go through the same buffers


@LATE
def test_parts_in_any_order(late: bool, tmp_path: Path, small: None) -> None:
    values = torch.randn(500)
    with far(late):
        writer = TensorWriter(str(tmp_path / "a"), {"x": Spec(torch.float32, (500,))}, checksums=False)
        writer.write_part("x", 300, values[300:])
        writer.write_part("x", 0, values[:300])
        writer.close()
    with TensorFile(str(tmp_path / "a")) as file:
        assert torch.equal(file.read("x"), values)


@LATE
def test_state_files(late: bool, tmp_path: Path, small: None) -> None:
    values = torch.randn(20, 20)
    with far(late):
        writer = StateFileWriter(str(tmp_path / "a"), {"x": Spec(torch.float32, (20, 20))})
        writer.write_part("x", 0, values.view(-1)[:150])
        writer.write_part("x", 150, values.view(-1)[150:])
        writer.close()
    assert zipfile.is_zipfile(tmp_path / "a")
    assert torch.equal(torch.load(tmp_path / "a", weights_only=True)["x"], values)


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


@LATE
def test_a_file_that_ends_too_early(late: bool, tmp_path: Path, small: None) -> None:
    path = str(tmp_path / "a")
    write_tensors(path, {"x": torch.randn(1000)})
    with TensorFile(path) as file, far(late):
        os.truncate(path, 3000)
        with pytest.raises(CheckpointError, match="ends at byte 3000"):
            file.read_into("x", 0, torch.empty(1000))


def there_and_back(root: str, stage: int, late: bool) -> None:
    # Without dropout: both draw from the same random numbers.
    near = Run(config(stage, "bf16"), seed=1, noise=False)
    near.step()
    with far(late) as streams:
        near.engine.save_checkpoint(root, tag="far")
        assert streams
        other = Run(config(stage, "bf16"), seed=2, noise=False)
        made = len(streams)
        other.engine.load_checkpoint(root, tag="far")
        assert len(streams) > made
    assert differences(near.fingerprint(), other.fingerprint()) == []
    assert near.step() == other.step()


@LATE
@pytest.mark.parametrize("stage", [0, 3])
def test_whole_checkpoints(late: bool, stage: int, tmp_path: Path) -> None:
    on_ranks(there_and_back, 2, str(tmp_path), stage, late)
