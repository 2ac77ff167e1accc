"""Batches divided unequally among ranks: the same training as of all samples in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.data import RepeatingLoader
from shardwise.errors import ConfigError, UsageError
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.training import SGD, Tensors, assert_close, config_of, loop, masters, parameters_digest
from tests.parallel.tensor.together import RULES, decoder

WIDTH, MEAN, STEPS = 6, 4, 6
SECONDS = 0.008, 0.0216
"""Of a sample on each rank. 6 and 2 samples are the best parts if one takes 2 to 3.5 times as long as the other."""


def samples(count: int = 8 * 2 * MEAN) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator)
    return list(zip(x, torch.tanh(x.roll(1, 1)) * 2, strict=True))


class Slow(nn.Module):
    """Takes time for each sample."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return self.layers(x)


def engine_of(seconds: float = 0.0, stage: int = 0, data: Any = samples, **config: Any) -> Any:
    model = Slow(seconds)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    settings = config_of(stage, rows=MEAN, **{"dataloader_drop_last": True, **config})
    return shardwise.initialize(model=model, optimizer=optimizer, config=settings, training_data=data and data())[0]


def train(engine: Any, steps: int, batches: Any = None) -> None:
    batches = RepeatingLoader(engine.training_dataloader) if batches is None else batches
    for _ in range(steps * engine.gradient_accumulation_steps()):
        x, y = next(batches)
        engine.backward((engine(x) - y).square().mean())
        engine.step()


def alone(steps: int = STEPS, accumulation: int = 1, optimizer: Any = torch.optim.Adam, lr: float = 0.02) -> Tensors:
    """Train in one process on the micro-batches of all ranks."""
    model = Slow()
    batches = RepeatingLoader(shardwise.data.EngineDataLoader(samples(), 2 * MEAN, drop_last=True))

    def losses(step: int) -> list[torch.Tensor]:
        return [(model(x) - y).square().mean() for x, y in (next(batches) for _ in range(accumulation))]

    return loop(model, optimizer(model.parameters(), lr=lr), losses, steps)


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 2), (3, 1)])
@on_ranks(2)
def test_training_is_that_of_one_process(stage: int, accumulation: int) -> None:
    unequal = {"enabled": True, "samples": [7, 1]}
    engine = engine_of(stage=stage, gradient_accumulation_steps=accumulation, unequal_batches=unequal)
    train(engine, STEPS)
    assert_close(masters(engine.module), alone(accumulation=accumulation), 1e-5)
    assert engine.last_step.samples == 2 * MEAN * accumulation == engine.global_samples / STEPS


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_parts_follow_measured_speed(stage: int) -> None:
    """One rank takes longer for a sample, and waits of the other are not its work."""
    engine = engine_of(seconds=SECONDS[dist.get_rank()], stage=stage, unequal_batches={"enabled": True, "every": 2})
    assert engine.training_dataloader.parts == (4, 4)
    train(engine, STEPS)
    assert engine.training_dataloader.parts == (6, 2)
    assert_close(masters(engine.module), alone(), 1e-5)


@on_ranks(2)
def test_memory_limits_the_largest_part() -> None:
    engine = engine_of(seconds=SECONDS[dist.get_rank()], unequal_batches={"enabled": True, "every": 2, "largest": 1.3})
    train(engine, 2)
    assert engine.training_dataloader.parts == (5, 3)


@on_ranks(4)
def test_ranks_that_share_samples_have_one_part() -> None:
    config = config_of(
        0,
        SGD,
        dataloader_drop_last=True,
        tensor_parallel={"autotp_size": 2, "partition_config": RULES},
        unequal_batches={"enabled": True, "every": 1},
    )
    rows = torch.randint(20, (32, 9), generator=torch.Generator().manual_seed(1))
    engine = shardwise.initialize(model=decoder(), config=config, training_data=list(rows))[0]
    for ids in engine.training_dataloader:
        places = torch.arange(9).expand(len(ids), -1)
        if engine.get_data_parallel_rank() == 1:
            time.sleep(0.01)
        engine.backward(torch.nn.functional.cross_entropy(engine(ids, places).flatten(0, 1), ids.flatten()))
        engine.step()
        assert len(set(of_all_ranks(engine.training_dataloader.parts))) == 1
    assert sum(engine.training_dataloader.parts) == 4


@on_ranks(2)
def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = {"seconds": SECONDS[dist.get_rank()], "unequal_batches": {"enabled": True, "every": 2}}
    engine = engine_of(**config)
    batches = RepeatingLoader(engine.training_dataloader)
    train(engine, 2, batches)
    parts = engine.training_dataloader.parts
    assert parts == (6, 2)
    engine.save_checkpoint(str(tmp_path))
    fixed = {"unequal_batches": {"enabled": True, "samples": list(parts)}}
    train(engine, 1, batches)  # those after it may have other parts
    again = engine_of(**fixed)
    again.load_checkpoint(str(tmp_path))
    train(again, 1)
    other = engine_of(**config)
    other.load_checkpoint(str(tmp_path))
    assert other.training_dataloader.parts == parts
    train(other, 1)
    assert parameters_digest(again.module) == parameters_digest(other.module) == parameters_digest(engine.module)


@on_ranks(2)
def test_replicas_count_by_their_samples() -> None:
    """Local SGD with the mean of parameters after each step: the mean of the replicas' steps, weighted."""
    local = {"enabled": True, "replica_size": 1, "sync_every": 1, "outer_optimizer": {"type": "Average"}}
    keys = {"dataloader_drop_last": True, "unequal_batches": {"enabled": True, "samples": [7, 1]}}
    config = config_of(0, SGD, rows=MEAN, local_sgd=local, **keys)
    engine = shardwise.initialize(model=Slow(), config=config, training_data=samples())[0]
    train(engine, 3)
    # One step of SGD each: means of steps are steps of means.
    assert_close(masters(engine.module), alone(3, optimizer=torch.optim.SGD, lr=0.1), 1e-5)


@on_ranks(2)
def test_what_has_no_weight_is_refused() -> None:
    engine = engine_of(unequal_batches={"enabled": True, "samples": [7, 1]})
    batches = RepeatingLoader(engine.training_dataloader)
    next(batches)
    with pytest.raises(UsageError, match="2 batches"):  # a reader ahead of the loop
        train(engine, 1, batches)
    x, y = next(batches)
    (engine(x) - y).square().mean().backward()
    with pytest.raises(UsageError, match=r"engine\.backward"):
        engine.step()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"dataloader_drop_last": False}, "dataloader_drop_last: .*; set it to true"),
        ({"sample_seed": 1}, "sample_seed"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"unequal_batches": {"enabled": True, "samples": [4]}}, "samples"),
        ({"unequal_batches": {"enabled": True, "samples": [8, 0]}}, "samples"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu"),
        ({"data": None}, "training_data"),
    ],
)
@on_ranks(2)
def test_configurations_without_meaning(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        engine_of(**{"unequal_batches": {"enabled": True}, **change})
