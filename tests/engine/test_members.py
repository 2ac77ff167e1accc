"""Loaders of an engine, and errors of unknown attributes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ConfigError, UsageError
from tests.harness import on_ranks

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
    engine.destroy()


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
    engine.destroy()
