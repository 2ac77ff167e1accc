"""Checkpoints of a CUDA device that shards by force: training goes on bit by bit, at its stage and at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.trees import map_tensors
from tests.gpu.forced import MODELS, late_collectives, start_group
from tests.harness.training import DTYPES, masters, parameters_digest
from tests.models import GPT

CASE = MODELS["gpt"]


class Run:
    """An engine, and the steps that it has taken."""

    def __init__(self, stage: int, precision: str, zero: dict[str, Any] | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.dtype = DTYPES[precision]
        self.engine, *_ = shardwise.initialize(
            model=GPT(dropout=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
                **({} if precision == "fp32" else {precision: {"enabled": True}}),
            },
        )

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            batch = map_tensors(CASE.data(step, 0, 0, self.dtype), torch.Tensor.cuda)
            self.engine.backward(CASE.loss(self.engine, batch))
            self.engine.step()

    def end(self) -> tuple[dict[str, torch.Tensor], str]:
        found = {name: value.cpu() for name, value in masters(self.engine.module).items()}
        parameters = parameters_digest(self.engine.module)
        self.engine.destroy()
        return found, parameters


def equal(first: Any, second: Any) -> bool:
    return first[1] == second[1] and all(torch.equal(value, second[0][name]) for name, value in first[0].items())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stages", [(0, 3), (3, 3), (3, 1), (2, 0)])
def test_training_goes_on(stages: tuple[int, int], precision: str, asynchronous: bool, tmp_path: Path) -> None:
    start_group()
    with late_collectives():
        first = Run(stages[0], precision)
        first.train(0, 2)
        first.engine.save_checkpoint(tmp_path, asynchronous=asynchronous)
        first.train(2, 4)  # while it is written
        first.engine.wait_for_checkpoint()
        second = Run(stages[1], precision, seed=1)
        second.engine.load_checkpoint(tmp_path)
        second.train(2, 4)
        assert equal(first.end(), second.end())


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_state_elsewhere(place: str, tmp_path: Path) -> None:
    start_group()
    away = {
        "offload_optimizer": {"device": place, "nvme_path": str(tmp_path / "state")},
        "offload_param": {"device": place, "nvme_path": str(tmp_path / "state")},
    }
    with late_collectives():
        first = Run(3, "bf16", away)
        first.train(0, 2)
        first.engine.save_checkpoint(tmp_path / "saved", asynchronous=True)
        first.train(2, 3)
        first.engine.wait_for_checkpoint()
        second = Run(3, "bf16", away, seed=1)
        second.engine.load_checkpoint(tmp_path / "saved")
        second.train(2, 3)
        assert equal(first.end(), second.end())


def test_whole_weights(tmp_path: Path) -> None:
    start_group()
    with late_collectives():
        run = Run(3, "bf16")
        run.train(0, 1)
        run.engine.save_16bit_model(tmp_path)
        state = run.engine.module_state_dict()
        other = Run(3, "bf16", seed=1)
        other.engine.load_module_state_dict(state)
        expected, found = run.end(), other.end()
    assert expected[1] == found[1]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 0
