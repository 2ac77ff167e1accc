"""Training on samples by difficulty and on micro-batches by tokens, from the configuration."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.data import MMapIndexedDataset, RepeatingLoader
from shardwise.data.token_batches import TokenBatches
from shardwise.errors import BatchSizeError, ConfigError, UsageError
from shardwise.utils.logging import warn_once
from tests.data.test_curriculum import COUNT, LENGTHS, RARITY, files, metric, section
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import assert_close, config_of, goes_on, loop, masters, parameters_digest

WIDTH = 6


def rows() -> list[torch.Tensor]:
    """Return samples whose first number is their own."""
    values = torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(1))
    values[:, 0] = torch.arange(COUNT) / COUNT
    return list(values)


ROWS = rows()


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))


def engine_of(data: dict[str, Any], stage: int = 0, training_data: Any = ROWS, **config: Any) -> Any:
    config = {"gradient_accumulation_steps": 2, "data_efficiency": data, **config}
    settings = config_of(stage, config.pop("optimizer", {"type": "Adam", "params": {"lr": 0.05}}), **config)
    return shardwise.initialize(model=net(), config=settings, training_data=training_data)[0]


def numbers(x: torch.Tensor) -> list[int]:
    return (x[:, 0] * COUNT).round().long().tolist()


def train(engine: Any, steps: int, batches: Any) -> list[int]:
    """Take steps; return the samples of this rank."""
    seen = []
    for x in islice(batches, steps * engine.gradient_accumulation_steps()):
        seen += numbers(x)
        engine.backward(engine(x).square().mean())
        engine.step()
    return seen


def by_difficulty(path: Path, *, write: bool = False) -> dict[str, Any]:
    """Return a section of the files of an analysis, which are written first."""
    names = {"index_to_sample_path": f"{path}/rarity_samples", "index_to_metric_path": f"{path}/rarity_values"}
    found = files(path, "rarity", RARITY) if write else names
    return section({"rarity": {**metric("percentile", 20, 100), **found}}, num_workers=0)


def first_part(path: Path, stage: int) -> tuple[list[list[int]], str]:
    engine = engine_of(by_difficulty(path), stage)
    batches = iter(RepeatingLoader(engine.training_dataloader))
    seen = of_all_ranks(train(engine, 3, batches))
    engine.save_checkpoint(str(path / "saved"))
    seen = [a + b for a, b in zip(seen, of_all_ranks(train(engine, 4, batches)), strict=True)]
    with pytest.raises(BatchSizeError, match="has formed batches of 2 micro-batches"):
        engine.set_train_batch_size(4 * dist.get_world_size())
    return seen, parameters_digest(engine.module)


def second_part(path: Path, stage: int, **config: Any) -> tuple[list[list[int]], str]:
    engine = engine_of(by_difficulty(path), stage, **config)
    engine.load_checkpoint(str(path / "saved"))
    seen = of_all_ranks(train(engine, 4, RepeatingLoader(engine.training_dataloader)))
    return seen, parameters_digest(engine.module)


@pytest.mark.parametrize("stage", [3, thorough(0)])
def test_sampling_resumes_on_other_ranks(stage: int, tmp_path: Path) -> None:
    by_difficulty(tmp_path, write=True)
    ((seen, digest), *_) = run_ranks(first_part, 2, tmp_path, stage)
    rank_of = {sample: place for place, sample in enumerate(sorted(range(COUNT), key=lambda one: RARITY[one]))}
    for step in range(7):
        batch = [sample for own in seen for sample in own[4 * step : 4 * step + 4]]
        percent = min(100, 20 + 80 * (step + 1) // 6)
        assert all(rank_of[sample] < -(-COUNT * percent // 100) for sample in batch)
    ((again, same), *_) = run_ranks(second_part, 2, tmp_path, 2 if stage == 3 else 1)
    assert [one[12:] for one in seen] == again and digest == same
    ((alone, _),) = run_ranks(second_part, 1, tmp_path, 0, gradient_accumulation_steps=4)
    for step in range(4):
        own = [set(one[12 + 4 * step : 16 + 4 * step]) for one in seen]
        assert set(alone[0][8 * step : 8 * step + 8]) == own[0] | own[1]


@on_ranks(1)
def test_a_stream_has_no_difficulties(tmp_path: Path) -> None:
    data = by_difficulty(tmp_path, write=True)
    with pytest.raises(ConfigError, match="list_iterator has no __getitem__ and __len__"):
        engine_of(data, training_data=iter([1]))
    engine = engine_of(data, training_data=None)
    with pytest.raises(UsageError, match="the engine has no training dataloader with a curriculum"):
        engine.set_data_post_process_func(lambda batch, state: batch)
    engine = engine_of(data)
    engine.set_data_post_process_func(lambda batch, state: (batch, state["current_difficulties"]["rarity"]))
    assert [most for _, most in islice(engine.training_dataloader, 4)] == [33, 33, 46, 46]


# -- batches by tokens -------------------------------------------------------------------------------------------------


def tokens(method: str = "linear", **more: Any) -> dict[str, Any]:
    dynamic = {"enabled": True, "max_tokens": 60, "lr_scaling_method": method, "sequence_picking_order": "random"}
    return {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": {**dynamic, **more}}}


SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 9, "warmup_type": "linear"},
}
"""The rate of update k is 0.01 + 0.04 k / 9."""
STEPS = 5


def batches_of(ranks: int, steps: int) -> list[list[list[int]]]:
    """Return the samples of the micro-batches of each step."""
    each, found = ranks * steps, []
    for epoch in range(2):
        batches = TokenBatches(LENGTHS, 60, order="random", seed=1234)
        batches.set_epoch(epoch)
        whole = list(batches)
        found += [whole[start : start + each] for start in range(0, len(whole) // each * each, each)]
    return found


def factors(ranks: int, steps: int, method: str) -> list[float]:
    base = 2 * ranks * steps
    ratios = [sum(map(len, batch)) / base for batch in batches_of(ranks, steps)]
    return [{"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[method] for ratio in ratios]


@pytest.mark.parametrize(("world", "method"), [(2, "linear"), (1, "sqrt"), thorough(2, "none")])
@on_ranks("world")
def test_the_rate_follows_the_samples_of_a_step(world: int, method: str, tmp_path: Path) -> None:
    rates, samples, loaders = [], [], {}

    def begin(again: bool) -> Any:
        optimizer = {"type": "SGD", "params": {"lr": 0.05}}
        engine = engine_of(tokens(method), 3 if again else 2, None, optimizer=optimizer, scheduler=SCHEDULE)
        engine.dynamic_batching(ROWS, LENGTHS)
        return engine

    def take(engine: Any, first: int, last: int) -> None:
        if engine not in loaders:
            loaders[engine] = RepeatingLoader(engine.training_dataloader)
        for _ in range(first, last):
            train(engine, 1, loaders[engine])
            rates.append(engine.last_step.lr[0])
            samples.append(engine.last_step.samples)

    engine = goes_on(begin, take, str(tmp_path), 2, STEPS)
    rates, samples = rates[:STEPS], samples[:STEPS]
    scale, batches = factors(world, 2, method), batches_of(world, 2)
    assert rates == pytest.approx([(0.01 + 0.04 * step / 9) * scale[step] for step in range(STEPS)])
    assert engine.get_lr() == pytest.approx([0.01 + 0.04 * STEPS / 9])  # the schedule's own
    assert samples == [sum(map(len, batch)) for batch in batches[:STEPS]]
    assert engine.global_samples == sum(samples)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def losses(step: int) -> list[torch.Tensor]:
        optimizer.param_groups[0]["lr"] = rates[step]
        return [model(torch.stack([ROWS[i] for i in own])).square().mean() for own in batches[step]]

    assert_close(masters(engine.module), loop(model, optimizer, losses, STEPS), 1e-5)


@on_ranks(1)
def test_a_skipped_step_moves_the_data_only() -> None:
    """A skipped step advances the data and not the schedule."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = engine_of(tokens(), training_data=None, fp16=fp16, scheduler=SCHEDULE)
    rates = []
    for number, x in enumerate(islice(engine.dynamic_batching(ROWS, LENGTHS), 8)):
        engine.backward(engine(x.half()).float().mean() * (float("inf") if number == 3 else 1.0))
        engine.step()
        rates.append((engine.last_step.lr[0], engine.last_step.applied) if number % 2 else None)
    scale = factors(1, 2, "linear")
    updates = [0, 1, 1, 2]
    wanted = [(pytest.approx((0.01 + 0.04 * k / 9) * scale[step]), step != 1) for step, k in enumerate(updates)]
    assert [rate for rate in rates if rate] == wanted


@on_ranks(1)
def test_samplers_without_a_loader_are_warned_about(tmp_path: Path) -> None:
    data = by_difficulty(tmp_path, write=True)
    for own in (True, False):
        warn_once.cache_clear()
        with logged() as told:
            engine = engine_of(data, training_data=None)
            train(engine, 2, [torch.ones(2, WIDTH)] * 4 if own else engine.deepspeed_io(ROWS))
        lines = [line for line in told.lines if "data_efficiency.data_sampling: the engine has made no" in line]
        assert len(lines) == own and all("if the script has a CurriculumSampler" in line for line in lines)


@on_ranks(1)
def test_lengths_come_from_an_analysis(tmp_path: Path) -> None:
    from shardwise.data import DataAnalyzer
    from shardwise.data.analysis import VALUE

    lengths = torch.tensor(LENGTHS)
    DataAnalyzer(
        ROWS,
        metric_names=["length"],
        metric_functions=[lambda batch: lengths[torch.tensor(numbers(batch))]],
        metric_types=[VALUE],
        batch_size=7,
        save_path=tmp_path,
    ).run_map_reduce()
    metrics = str(tmp_path / "length" / "length_sample_to_metric")
    assert MMapIndexedDataset(metrics).values.tolist() == LENGTHS
    engine = engine_of(tokens(metrics_path=metrics, verbose=True))
    (first, *_) = batches_of(1, 2)
    assert [numbers(x) for x in islice(engine.training_dataloader, 2)] == first
    with pytest.raises(UsageError, match="dynamic batching: 4 batches were taken"):
        train(engine, 1, engine.training_dataloader)
    with pytest.raises(ConfigError, match="metrics_path: the lengths of the samples are needed"):
        engine_of(tokens())
    with pytest.raises(ConfigError, match="metrics_path: 60 lengths for 3 samples"):
        engine_of(tokens(metrics_path=metrics), training_data=ROWS[:3])
    with pytest.raises(ConfigError, match="the section is not enabled"):
        engine_of({}).dynamic_batching(ROWS, LENGTHS)
    with pytest.raises(ConfigError, match="both form the batches"):
        both = by_difficulty(tmp_path, write=True)
        both["data_sampling"]["dynamic_batching"] = {"enabled": True, "max_tokens": 5}
        engine_of(both)
