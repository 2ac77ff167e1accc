"""Ranks that were given different arguments are told so before any collective that depends on them."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import DesyncError, ShardwiseError
from shardwise.utils.logging import logger
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.engines import forget_engines
from tests.scale.test_groups import TENSOR, Net

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def config(stage: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": zero, **more}


def failing(parameters: Any) -> torch.optim.Optimizer:
    raise ValueError("this optimizer cannot be made")


@on_ranks(4)
def test_what_some_ranks_refuse_all_ranks_refuse() -> None:
    """A list of experts lies otherwise than it has to on some ranks only."""
    torch.manual_seed(0)
    model = Net()
    model.experts = shardwise.moe.MoE(8, nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), num_experts=4, ep_size=2)
    with pytest.raises(ShardwiseError) as error:
        shardwise.initialize(model=model, config=config(tensor_parallel=TENSOR))
    kinds = of_all_ranks(type(error.value).__name__)
    assert set(kinds) == {"UsageError", "DesyncError"}
    assert type(error.value) is not DesyncError or "dividing experts: rank" in str(error.value)


# -- rank 0 has the values ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.words(ids))) * self.scale).pow(2).mean()


def from_first(stage: int, spread: bool) -> dict[str, list[float]]:
    torch.manual_seed(3)
    with torch.device("meta" if spread and dist.get_rank() else "cpu"):
        model = Tied()
    if not spread or dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
            model.norm.running_mean.fill_(0.25)
    engine = shardwise.initialize(model=model, config=config(stage))[0]
    for step in range(2):
        engine.backward(engine(torch.arange(4) + step + dist.get_rank()))
        engine.step()
    engine.destroy()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items() if "running" not in name}


@pytest.mark.parametrize("stage", [thorough(0), 1, thorough(2), 3])
def test_a_model_on_the_meta_device_but_on_rank_0_gets_the_values_of_rank_0(stage: int) -> None:
    plain = run_ranks(from_first, 2, stage, False)[0]
    assert run_ranks(from_first, 2, stage, True) == [plain, plain]


# -- what an engine leaves behind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "dropped"])
@on_ranks(4)
def test_an_engine_that_failed_or_was_dropped_leaves_no_group_behind(how: str) -> None:
    """Make an engine whose ranks share no tensors and all sequences, after one that has failed, or was dropped."""
    given = config(sequence_parallel_size=2, tensor_parallel=TENSOR)
    if how == "fails":
        with pytest.raises(ValueError, match="cannot be made"):
            shardwise.initialize(model=Net(), config=given, optimizer=failing)
    else:
        model = Net()
        engine = shardwise.initialize(model=model, config=given)[0]
        del engine
        forget_engines()
        gc.collect()
    kept = [] if shardwise.parallel.current_tensors() is None else [-1]
    engine = shardwise.initialize(model=Net(), config=config(sequence_parallel_size=4))[0]
    engine.backward(engine(torch.ones(1, 2, 8)))
    engine.step()
    assert kept + dist.get_process_group_ranks(engine.get_sequence_parallel_group()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stage", "trained"), [thorough(0, True), (1, True), thorough(2, True), (3, True), (0, False), (2, False)]
)
@on_ranks(2)
def test_an_engine_and_model_that_are_dropped_are_freed(stage: int, trained: bool) -> None:
    """The garbage collector frees them after passes, though threads and hooks of torch refer to their parts."""
    model = Net()
    given = config(stage) if trained else config(stage, optimizer=None)
    engine = shardwise.initialize(model=model, config=given)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2, 8)))
        if trained:
            engine.step()
    dropped = [engine, model, model.up.weight, engine.sharded, engine._step, engine._checkpoints, engine._faults]
    alive = list(map(weakref.ref, dropped))
    dist.barrier()
    del engine, model, dropped
    forget_engines()
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


@on_ranks(2)
def test_a_dropped_engine_that_is_logged_is_freed_with_its_log(tmp_path: Path) -> None:
    handlers, threads = list(logger.handlers), {*threading.enumerate()}
    given = config(run_log={"enabled": True, "path": str(tmp_path / "log")})
    given |= {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    engine = shardwise.initialize(model=Net(), config=given)[0]
    engine.backward(engine(torch.ones(1, 2, 8)))
    engine.step()
    alive = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine._step)]
    watchdog = ("shardwise-stalls", "shardwise-store")  # until the next engine's
    started = [one for one in threading.enumerate() if one not in threads and one.name not in watchdog]
    dist.barrier()
    del engine
    forget_engines()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    for thread in started:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert started and not {*logger.handlers} - {*handlers}


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_dropped_model_that_keeps_its_loss_is_freed(stage: int) -> None:
    model = Net()
    model.register_forward_hook(lambda module, _, output: module.__dict__.update(kept=output))
    model.up.register_forward_hook(lambda module, _, output: module.__dict__.update(kept=output))
    engine = shardwise.initialize(model=model, config=config(stage))[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2, 8)))
        engine.step()
    engine(torch.ones(1, 2, 8))
    alive = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.sharded)]
    dist.barrier()
    del engine, model
    forget_engines()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


@pytest.mark.parametrize("part", ["module", "parameter"])
@on_ranks(2)
def test_a_part_of_a_dropped_model_can_train_in_another_one(part: str) -> None:
    torch.manual_seed(0)
    model = Net()
    engine = shardwise.initialize(model=model, config=config(1))[0]
    up, weight, before = model.up if part == "module" else None, model.up.weight, model.up.weight.clone()
    del engine, model
    forget_engines()
    gc.collect()
    other = Net()
    other.up = up or other.up
    other.up.weight = weight
    engine = shardwise.initialize(model=other, config=config(2))[0]
    assert torch.equal(weight, before)
    engine.backward(engine(torch.ones(1, 2, 8)))
    engine.step()
    assert not torch.equal(weight, before)


@on_ranks(2)
def test_an_error_on_all_ranks_can_be_corrected() -> None:
    for _ in range(2):
        with pytest.raises(ShardwiseError):
            shardwise.initialize(model=Net(), config=config(no_such_key=1))
    with pytest.raises(DesyncError):
        shardwise.initialize(model=Net(), config=config(dist.get_rank()))
    shardwise.initialize(model=Net(), config=config())[0]
    assert True
