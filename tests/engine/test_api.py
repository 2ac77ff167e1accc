"""What scripts written against the API call, and what they get where a rank has nothing, or a call means nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise.errors import CheckpointError, ConfigError, UsageError
from tests.harness import on_ranks, thorough
from tests.harness.training import engine_of


def build(stage: int, model: nn.Module, **config: Any) -> Any:
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    return engine_of(model, stage, adam, train_micro_batch_size_per_gpu=1, **config)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("stage", [0, thorough(1), 2])
@on_ranks(2)
def test_transforms_of_torch_func_over_the_engine(stage: int) -> None:
    """In front of steps and after one, as over a plain model."""
    engine, x = build(stage, net()), torch.randn(8)
    for _ in range(2):
        plain = net()
        plain.load_state_dict(engine.module_state_dict())
        for transform in (
            lambda model: torch.func.grad(lambda v: model(v).sum())(x),
            lambda model: torch.func.vjp(model, x)[1](torch.ones(4))[0],
            lambda model: torch.func.jacrev(model)(x),
            lambda model: torch.func.vmap(model)(torch.stack([x, 2 * x])),
        ):
            assert torch.allclose(transform(engine), transform(plain), rtol=1e-5)
        counters = engine.micro_steps
        engine.step()  # a transform is no micro-batch
        assert engine.micro_steps == counters
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert engine.was_step_applied()


@on_ranks(2)
def test_arguments_and_errors_of_the_api() -> None:
    engine = build(1, net())
    loss = engine(torch.ones(1, 8))
    for call in (engine.scale, engine.backward):
        with pytest.raises(AssertionError, match="scalar tensor"):
            call(loss)
    assert engine.scale(loss.sum()) is not None
    whole = engine.module_state_dict()
    before = engine.module_state_dict()["2.bias"]
    del whole["2.bias"]
    with pytest.raises(CheckpointError, match=r"missing: 2\.bias"):
        engine.load_module_state_dict(whole, allowed_missing_keys=["2.weight"])
    whole["0.bias"].fill_(0.25)
    engine.load_module_state_dict(whole, allowed_missing_keys=["2.bias"])
    now = engine.module_state_dict()
    assert torch.equal(now["2.bias"], before) and bool((now["0.bias"] == 0.25).all())


SETTINGS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}


@on_ranks(2)
def test_loaders() -> None:
    rank, data = dist.get_rank(), torch.arange(12.0).view(12, 1)
    engine, _, made, _ = shardwise.initialize(model=torch.nn.Linear(1, 1), config=SETTINGS, training_data=data)
    assert made is engine.training_dataloader
    given = [batch.flatten().tolist() for batch in engine.deepspeed_io(data)]
    assert given == [batch.flatten().tolist() for batch in made]  # the same order, this rank's share, two at a time
    flat = [value for batch in given for value in batch]
    assert [len(batch) for batch in given] == [2, 2, 2] and flat != sorted(flat)
    everything: list[list[float]] = [[], []]
    dist.all_gather_object(everything, flat)
    assert sorted([*everything[0], *everything[1]]) == data.flatten().tolist()
    for route in ("eval", "predict"):
        batches = list(engine.deepspeed_io(data, batch_size=3, route=route))
        assert [batch.flatten().tolist() for batch in batches] == [
            [rank, rank + 2, rank + 4],
            [rank + 6, rank + 8, rank + 10],
        ]
    own = engine.deepspeed_io(data, 4, data_sampler=range(rank, 4 + rank), collate_fn=len, num_local_io_workers=0)
    assert list(own) == [4]
    with pytest.raises(UsageError, match=r"deepspeed_io\(route='test'\): expected one of train, eval, predict"):
        engine.deepspeed_io(data, route="test")
    with pytest.raises(ConfigError, match="iterable"):
        engine.deepspeed_io(Stream(), data_sampler=range(2))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(4))


@on_ranks(1)
def test_unknown_attributes() -> None:
    engine, *_ = shardwise.initialize(model=torch.nn.Linear(1, 1), config=SETTINGS)
    with pytest.raises(AttributeError, match="neither the engine nor its module has an attribute 'nothing'") as error:
        _ = engine.nothing
    assert type(error.value) is AttributeError and "did you mean" not in str(error.value)
    for name, meant in (("store_checkpoint", "save_checkpoint"), ("optimiser", "optimizer")):
        with pytest.raises(AttributeError, match=rf"{name}'; did you mean {meant}\?") as error:
            getattr(engine, name)
        assert type(error.value) is AttributeError


READS = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__)


class Reads(TorchFunctionMode):
    """Counts what is read of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


@pytest.mark.parametrize(
    "config",
    [
        FP16,
        {**FP16, "gradient_clipping": 0.1},
        {**FP16, "zero_optimization": {"stage": 1}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
        {"bf16": {"enabled": True}, "non_finite": "stop", "gradient_clipping": 0.1},
        {"gradient_clipping": 0.1},
    ],
)
def test_a_step_reads_all_that_it_needs_at_once(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2, **config})
    dtype = next(model.parameters()).dtype
    for value in (1.0, 1.0, float("nan"), 1.0):
        engine.backward(engine(torch.full((2, 4), value, dtype=dtype)).mean())
        with Reads() as reads:
            if value != value and config.get("non_finite") == "stop":
                with pytest.raises(shardwise.errors.NonFiniteError):
                    engine.step()
            else:
                engine.step()
        if value == value:
            assert reads.seen == ["tolist"]
            assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_step_counts_of_an_optimizer_with_state_are_read_at_once(stage: int) -> None:
    """They may lie on the device (`fused`, `capturable`)."""
    seen = []
    for layers in (2, 9):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.state[model[1].weight]["step"] += 5
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
        with Reads() as reads:
            engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
        counts = [float(state["step"]) for state in optimizer.state.values()]
        assert sorted(set(counts)) == [2.0, 7.0] and counts.count(7.0) == 1
        seen.append(reads.seen.count("tolist"))
        engine.destroy()
    assert seen == [1, 1]
