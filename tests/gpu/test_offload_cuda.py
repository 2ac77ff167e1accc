"""State on the host and on disks of a CUDA device: the same training, less on the device, copies in order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.async_save import Snapshot
from shardwise.compat import has_values
from shardwise.device.hostmemory import HostMemory
from shardwise.device.staging import CopyStream
from shardwise.memory import Tier
from shardwise.zero.units.flat_param import FlatParamStorage
from tests.gpu import standin
from tests.harness.training import DTYPES, engine_of
from tests.offload.settings import FROM_STAGE_1, PLACES, offload

WIDTH, LAYERS = 512, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def train(zero: dict[str, Any], precision: str, optimizer: str = "AdamW") -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after some steps, and most bytes that the device has held in the last one."""
    torch.manual_seed(0)
    config: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    config |= {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    engine = engine_of(Net(), optimizer={"type": optimizer, "params": {"lr": 1e-3}}, zero=zero, **config)
    for step in range(4):
        engine.accountant.reset_peak()
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            engine.backward(engine(torch.randn(8, WIDTH, device="cuda", dtype=DTYPES[precision])))
            engine.step()
    peak = engine.accountant.peak_total_in(Tier.DEVICE)
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: parameter.detach().cpu().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return found, peak


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("place", PLACES)
def test_training_is_the_same_with_less_on_the_device(tmp_path: Path, place: str, precision: str) -> None:
    for stage in (1, 3) if place in FROM_STAGE_1 else (3,):
        resident, most = train({"stage": stage}, precision)
        away, held = train({"stage": stage, **offload(place, str(tmp_path))}, precision)
        assert held < most
        for name, values in resident.items():
            # The processor's Adam and norm round differently from the device's in their last digits.
            torch.testing.assert_close(away[name], values, rtol=2e-2 if precision != "fp32" else 1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["parameters on host", "parameters on disk"])
def test_one_rank_copies_parameters_on_another_stream(tmp_path: Path, place: str) -> None:
    """Beside what it computes; a program that has one rank on its device takes no other way."""
    streams: list[torch.cuda.Stream] = []
    bring = FlatParamStorage.bring_shard

    def brought(self: FlatParamStorage) -> None:
        if has_values(self.full):  # not in a plan of memory
            streams.append(torch.cuda.current_stream())
        bring(self)

    with mock.patch.object(FlatParamStorage, "bring_shard", brought):
        train({"stage": 3, **offload(place, str(tmp_path))}, "bf16")
    assert len(streams) > LAYERS and torch.cuda.current_stream() not in streams


@pytest.mark.parametrize("place", PLACES)
def test_the_same_bits_each_time(tmp_path: Path, place: str) -> None:
    """What is read too early or overwritten too soon differs from run to run."""
    first, second = (train({"stage": 3, **offload(place, str(tmp_path))}, "bf16")[0] for _ in range(2))
    assert all(torch.equal(values, second[name]) for name, values in first.items())


@pytest.mark.parametrize("optimizer", ["Lamb", "Muon", "Lion"])
def test_other_optimizers(tmp_path: Path, optimizer: str) -> None:
    resident, _ = train({"stage": 3}, "fp32", optimizer)
    for place in ("optimizer on host", "all on disk"):
        away, _ = train({"stage": 3, **offload(place, str(tmp_path))}, "fp32", optimizer)
        for name, values in resident.items():
            torch.testing.assert_close(away[name], values, rtol=1e-3, atol=1e-4)


def test_memory_is_pinned_on_the_device_that_copies_it() -> None:
    """A new thread's current device is device 0, of another rank: no call may create a context there."""
    if not standin.rehearsing():
        pytest.skip("needs the second device of the stand-in")
    device, before = torch.device("cuda", 1), len(standin.calls)

    def work() -> None:
        copies = CopyStream(device)
        memory = HostMemory(copies, 5000)
        memory.used(copies.mark())
        del memory
        snapshot = Snapshot(device)
        snapshot.take({"a": torch.ones(5)})
        snapshot.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found = standin.calls[before:]
    assert [call for call, _ in found if call != "wait"] == ["pin", "unpin", "pin", "unpin"]
    assert {current for _, current in found} == {1}
