"""Checkpoints of a CUDA device: through pinned buffers, beside what the device computes, with what was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.device.staging import Staging, copy_stream
from tests.checkpoint.test_async import content
from tests.device.test_staging import TENSORS
from tests.harness.training import engine_of

_CYCLES = 20_000_000
"""About ten milliseconds."""


def test_files_are_those_of_the_host(tmp_path: Path) -> None:
    tensors = {f"t{number}": tensor for number, tensor in enumerate(TENSORS)}
    tensors["large"] = torch.randn(40_000_000)  # more than two buffers
    tensors["turned"] = torch.randn(300, 400).t()
    near = write_tensors(str(tmp_path / "near"), tensors)
    far = write_tensors(str(tmp_path / "far"), {name: tensor.cuda() for name, tensor in tensors.items()})
    assert far == near
    assert (tmp_path / "far").read_bytes() == (tmp_path / "near").read_bytes()
    with TensorFile(str(tmp_path / "far")) as file:
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(30_000_000, dtype=dtype, device="cuda")
            file.read_into("large", 1_000_001, out)
            assert torch.equal(out.cpu(), tensors["large"][1_000_001:31_000_001].to(dtype))


def test_copies_come_behind_what_the_device_computes() -> None:
    values = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    values.fill_(3)
    parts = [
        part.view(torch.float32).clone() for part in Staging(values.device, values.nbytes, 1 << 20).to_host([values])
    ]
    assert bool((torch.cat(parts) == 3).all())
    torch.cuda._sleep(_CYCLES)
    values.fill_(5)
    Staging(values.device, values.nbytes, 1 << 20).to_device(values, lambda part, first: part.fill_(first))
    assert values[:: 1 << 18].tolist() == [float(first) for first in range(0, 1 << 22, 1 << 18)]


def test_memory_is_pinned() -> None:
    assert copy_stream(torch.device("cuda", 0)).host_bytes(64).is_pinned()


class Counting(torch.nn.Module):
    """Has buffers that change with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1024))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean += 0.1 * (x.float().mean(0) - self.mean)
        return x


def engine(precision: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)), Counting())
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    return engine_of(model, 0, adam, gradient_clipping=1.0, **precision)


def backward(made: Any) -> None:
    dtype = next(made.module.parameters()).dtype
    made.backward(made(torch.randn(4, 1024, device="cuda", dtype=dtype)).float().square().mean())


def train(made: Any) -> None:
    backward(made)
    made.step()


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_snapshot_has_what_was_there_when_it_was_taken(precision: dict[str, Any], tmp_path: Path) -> None:
    made = engine(precision)
    train(made)
    for number in range(3):
        made.save_checkpoint(tmp_path, tag=f"sync{number}")
        made.save_checkpoint(tmp_path, tag=f"async{number}", asynchronous=True)
        for _ in range(3):
            train(made)
        made.wait_for_checkpoint()
        assert content(str(tmp_path / f"sync{number}")) == content(str(tmp_path / f"async{number}"))
    made.destroy()


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "loss_scale": 128}}, {"bf16": {"enabled": True}}])
def test_the_host_waits_for_one_event_at_most(precision: dict[str, Any]) -> None:
    """What waits otherwise, torch itself tells (it does not count waiting for an event)."""
    made = engine(precision)
    for _ in range(3):
        train(made)
    backward(made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.destroy()
