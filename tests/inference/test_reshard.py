"""Plans of weights between ranks, and their execution."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.boxes import whole
from shardwise.inference import InferenceEngine, WeightSync
from shardwise.inference.config import read_config
from shardwise.inference.reshard import Holding, match
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.training import config_of
from tests.inference.models import generating


class Mpu:
    """Gives an engine a part of the ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_model_parallel_group(self) -> Any:
        return None


def test_plans_are_linear_in_a_rank_s_tensors() -> None:
    for ranks in (8, 1024):
        shape, numel = (64, 128), 64 * 128
        step = numel // ranks
        held = [(r, Holding("w", shape, whole(shape), r * step, (r + 1) * step, "float32", True)) for r in range(ranks)]
        needed = [
            (ranks + r, Holding("w", shape, ((0, 64), (64 * r, 64 * r + 64)), 0, numel // 2, "bfloat16", False))
            for r in range(2)
        ]
        found, problems = match([*held, *needed])
        assert not problems
        assert len(found) <= 2 * ranks
        assert max(sum(sender == rank for sender, *_ in found) for rank in range(ranks)) <= 2


def test_incomplete_tensors_are_named() -> None:
    part = Holding("w", (4,), ((0, 4),), 0, 3, "float32", True)
    needed = Holding("w", (4,), ((0, 4),), 0, 4, "float32", False)
    assert match([(0, part), (1, needed)])[1] == ["w: rank 1 lacks 1 of 4 values"]
    other = Holding("w", (5,), ((0, 5),), 0, 5, "float32", True)
    assert match([(0, other), (1, needed)])[1] == ["w has shape [5], and [4] on rank 1"]


def synchronised(stage: int, offload: bool) -> Any:
    """Train on ranks 0 and 1, generate on ranks 2 and 3, which share a model; send weights twice."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = generating("llama", seed=rank // 2)
    model.register_buffer("seen", torch.full((3,), float(rank // 2)))
    found = []
    if rank < 2:
        stepped = {"type": "SGD", "params": {"lr": 0.1}}
        more: dict[str, Any] = {"offload_param": {"device": "cpu"}} if offload else {}
        config = config_of(stage, stepped, rows=2, **{"zero_optimization": {"stage": stage, **more}})
        engine, *_ = shardwise.initialize(model=model, config=config, mpu=Mpu(pairs[0]))
        sync = WeightSync(trainer=engine)
    else:
        settings = read_config(dtype="fp32", tensor_parallel={"tp_group": pairs[1]})
        rollout = InferenceEngine(model, settings, torch.device("cpu"))
        sync = WeightSync(rollout=rollout)
    for step in range(2):
        received = sync()
        if rank < 2:
            assert received == 0
            with engine.gathered():
                found.append(copy.deepcopy(engine.module.state_dict()))
            ids = torch.arange(8).view(2, 4) + 3 * step
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        else:
            found.append({name: value.clone() for name, value in rollout.module.state_dict().items()})
    rounds, sends = len(sync.plan.rounds), len(sync.plan.sends)
    dist.barrier()
    sync.close()
    (engine if rank < 2 else rollout).destroy()
    return found, rounds, sends


def expected_part(name: str, values: torch.Tensor, shape: tuple[int, ...], place: int) -> torch.Tensor:
    for dim, (size, own) in enumerate(zip(values.shape, shape, strict=True)):
        if size != own:
            return values.narrow(dim, place * own, own)
    return values


@pytest.mark.parametrize(("stage", "offload"), [thorough(1, False), (3, True)])
def test_trainer_ranks_send_weights_to_ranks_that_generate(stage: int, offload: bool) -> None:
    results = run_ranks(synchronised, 4, stage, offload)
    (whole_0, *_), (_, rounds, sends) = results[0], results[1]
    assert rounds == 1 and sends > 0
    for place in range(2):
        found = results[2 + place][0]
        assert results[2 + place][2] == 0
        for step in range(2):
            assert found[step].keys() == whole_0[step].keys()
            for name, values in whole_0[step].items():
                own = found[step][name]
                assert torch.equal(own, expected_part(name, values, tuple(own.shape), place)), (name, step)
    assert not torch.equal(whole_0[0]["lm_head.weight"], whole_0[1]["lm_head.weight"])


def changing() -> None:
    """Send to a receiver with other strides, which is then cast, from an engine that is then refreshed."""
    rollout = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    assert not rollout.weight.is_contiguous()
    torch.manual_seed(1)
    config = config_of(1, {"type": "SGD", "params": {"lr": 0.1}}, rows=2)
    engine, *_ = shardwise.initialize(model=torch.nn.Conv2d(2, 3, 3), config=config)
    sync = WeightSync(trainer=engine, rollout=rollout)
    for change in (lambda: None, rollout.bfloat16, lambda: engine.module.bias.requires_grad_(False)):
        change()
        engine.refresh()
        engine.backward(engine(torch.ones(2, 2, 3, 3)).sum())
        engine.step()
        sync()
        for name, value in engine.module_state_dict().items():
            assert torch.equal(rollout.get_parameter(name), value.to(rollout.weight.dtype)), name
    sync.close()
    engine.destroy()


def test_receivers_and_engines_may_change() -> None:
    run_ranks(changing, 2)


def other_model() -> None:
    rollout = shardwise.init_inference(torch.nn.Linear(3, 3), dtype="fp32")
    config = config_of(0, {"type": "SGD", "params": {"lr": 0.1}}, rows=2)
    engine, *_ = shardwise.initialize(model=torch.nn.Sequential(torch.nn.Linear(3, 3)), config=config)
    try:
        sync = WeightSync(trainer=engine, rollout=rollout, rename=lambda name: name.removeprefix("0."))
        sync()
        assert torch.equal(rollout.module.weight, engine.module[0].weight)
        WeightSync(trainer=engine, rollout=rollout)
    finally:
        engine.destroy()
        rollout.destroy()


def test_models_that_differ_are_refused_with_the_names() -> None:
    with pytest.raises(RankFailure, match=r"UsageError: .*weight: rank 0 lacks 9 of 9 values.*pass rename="):
        run_ranks(other_model, 2)
