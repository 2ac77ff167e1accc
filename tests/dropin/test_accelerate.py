"""Accelerate's Accelerator with a DeepSpeedPlugin, which finds shardwise: the numbers of its own data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.dropin.clients import MISSING, forget, gpt2, mean_over_ranks, on_clients, tokens
from tests.dropin.test_trainer import evaluated
from tests.harness import thorough

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def accelerator(plugin: dict[str, Any] | None, accumulation: int = 2, **options: Any) -> Any:
    """An Accelerator on CPU ranks, with a plugin of these arguments or without DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    forget()
    if plugin is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(**plugin), **options)


def logged(acc: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> dict[str, list[float]]:
    """One pass over the data, as in Accelerate's documentation; losses, rates and norms."""
    found: dict[str, list[float]] = {"loss": [], "lr": [], "norm": []}
    for batch in loader:
        with acc.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            acc.backward(loss)
            if acc.sync_gradients:
                found["norm"].append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
                found["lr"].append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
        found["loss"].append(mean_over_ranks(loss))
    return found


def train(acc: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """The losses of one pass."""
    return logged(acc, model, optimizer, loader)["loss"]


def prepared(acc: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer and data, prepared."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return acc.prepare(model, optimizer, torch.utils.data.DataLoader(tokens(32), batch_size=2))


def plugin_of(stage: int) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero3_save_16bit_model": True,
    }


@pytest.mark.parametrize("chosen", [(3,), thorough((0, 1, 2))], ids=str)
@on_clients(2)
def test_stages(tmp_path: Path, chosen: tuple[int, ...]) -> None:
    plain = accelerator(None)
    model, optimizer, loader = prepared(plain)
    without = train(plain, model, optimizer, loader)
    assert len(without) == 8 and without[-1] < without[0]
    weights = {name: value.clone() for name, value in plain.unwrap_model(model).state_dict().items()}
    for stage in chosen:
        acc = accelerator(plugin_of(stage))
        model, optimizer, loader = prepared(acc)
        assert isinstance(model, shardwise.Engine) and acc.num_processes == 2
        losses = train(acc, model, optimizer, loader)
        assert losses == pytest.approx(without, rel=1e-5)
        acc.save_state(f"{tmp_path}/{stage}")
        state = acc.get_state_dict(model)
        # Stage 3 gives the state to the first rank.
        assert set(state or weights) == set(weights)
        assert all(torch.allclose(state[name], weights[name], rtol=0, atol=1e-4) for name in state or ())
        after = train(acc, model, optimizer, loader)
        acc.load_state(f"{tmp_path}/{stage}")
        assert train(acc, model, optimizer, loader) == after != losses
        assert type(acc.unwrap_model(model)).__name__ == "GPT2LMHeadModel"
        model.destroy()


@on_clients(2)
def test_offload() -> None:
    found = []
    for places in ({}, {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}):
        acc = accelerator({**plugin_of(3), **places})
        model, optimizer, loader = prepared(acc)
        found.append(train(acc, model, optimizer, loader))
        model.destroy()
    # Where the optimizer is offloaded, Accelerate takes DeepSpeed's own instead of torch's.
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[1][-1] < found[1][0]


@on_clients(2)
def test_a_file(tmp_path: Path) -> None:
    """A configuration from a file with "auto" values and bf16."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    path = tmp_path / f"{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    acc = accelerator({"hf_ds_config": str(path)}, mixed_precision="bf16")
    model, optimizer, loader = prepared(acc)
    losses = train(acc, model, optimizer, loader)
    assert losses[-1] < losses[0] and next(acc.unwrap_model(model).parameters()).dtype is torch.bfloat16
    model.destroy()


@on_clients(2)
def test_two_models() -> None:
    """Two engines in one process, of different stages, by two plugins of one Accelerator."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugins = {"first": DeepSpeedPlugin(**plugin_of(2)), "second": DeepSpeedPlugin(**plugin_of(3))}
    acc = Accelerator(deepspeed_plugins=plugins)
    one, first, loader = prepared(acc)
    acc.state.select_deepspeed_plugin("second")
    # A second Accelerator for the second model, as Accelerate's documentation has it.
    other = Accelerator()
    two, second, more = prepared(other)
    assert (one.zero_optimization_stage(), two.zero_optimization_stage()) == (2, 3)
    losses = train(acc, one, first, loader)
    assert losses == train(other, two, second, more) and losses[-1] < losses[0]
    one.destroy()
    two.destroy()


class Net(torch.nn.Module):
    """Two layers with the calling convention of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 8)
        self.head = torch.nn.Linear(8, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from types import SimpleNamespace

        scores = self.head(torch.tanh(self.embedding(input_ids)))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


def loader(count: int = 32) -> Any:
    return torch.utils.data.DataLoader(tokens(count), batch_size=2)


# -- schedules and clipping --------------------------------------------------


def lambda_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def as_fast(optimizer: Any) -> Any:
    """That schedule as an engine steps it: once a step, not once for each of two ranks."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 2 * step))


def with_torch_schedule(stage: int | None) -> dict[str, list[float]]:
    """A schedule of torch, which Accelerate steps: once for each rank."""
    from accelerate.scheduler import AcceleratedScheduler

    acc = accelerator(None if stage is None else plugin_of(stage))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data, scheduler = acc.prepare(model, optimizer, loader(), lambda_schedule(optimizer))
    assert type(scheduler) is AcceleratedScheduler
    found = logged(acc, model, optimizer, data, scheduler)
    if stage is not None:
        model.destroy()
    return found


def with_dummies(config: dict[str, Any], own: bool) -> dict[str, list[float]]:
    """Optimizer and schedule from the configuration, or the schedule from a callable."""
    from accelerate.utils import DummyOptim, DummyScheduler
    from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

    acc = accelerator({"hf_ds_config": config})
    model = Net()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    if own:
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=as_fast)
    else:
        scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=4)
    model, optimizer, data, scheduler = acc.prepare(model, optimizer, loader(), scheduler)
    assert type(scheduler) is DeepSpeedSchedulerWrapper and isinstance(model, shardwise.Engine)
    found = logged(acc, model, optimizer, data, scheduler)
    model.destroy()
    return found


@on_clients(2)
def test_schedules_and_norms() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    }
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    decay = {"type": "WarmupDecayLR", "params": params | {"total_num_steps": "auto"}}
    plain, *by_stage = (with_torch_schedule(stage) for stage in (None, 0, 2, 3))
    warmed, own = with_dummies(config | {"scheduler": decay}, False), with_dummies(config, True)
    assert plain["lr"] == pytest.approx([0.01 / n for n in (1, 3, 3, 5, 5, 7, 7, 9)])
    for found in by_stage:
        assert found["lr"] == plain["lr"]
    for found in (*by_stage, own):
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(plain["norm"], rel=1e-4)
    # The rates that the engine's schedule gives to the following steps.
    assert warmed["lr"] == pytest.approx([0.0, 0.0025, 0.0025, 0.005, 0.005, 0.0075, 0.0075, 0.01])
    assert warmed["loss"][:2] == pytest.approx(plain["loss"][:2], rel=1e-5) and warmed["loss"] != plain["loss"]


# -- saving, gathering --------------------------------------------------


def saved(directory: Path, stage: int) -> list[float]:
    """`save_model`, `unwrap_model`, `gather_for_metrics` with a short last batch."""
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    from shardwise.zero.units.released import is_released

    place = directory / str(stage)
    if dist.get_rank() == 0:
        gpt2(seed=7).save_pretrained(f"{place}/given")
    dist.barrier()
    acc = accelerator(plugin_of(stage) | {"zero3_init_flag": True if stage == 3 else None})
    model = GPT2LMHeadModel.from_pretrained(f"{place}/given")
    assert is_released(model.transformer.wte.weight) == (stage == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    evaluation = loader(7)
    model, optimizer, data, evaluation = acc.prepare(model, optimizer, loader(), evaluation)
    losses = train(acc, model, optimizer, data)
    seen = []
    model.eval()
    with torch.no_grad():
        for batch in evaluation:
            model(input_ids=batch)
            seen.append(acc.gather_for_metrics(batch))
    acc.save_model(model, f"{place}/plain")
    acc.wait_for_everyone()
    unwrapped = acc.unwrap_model(model)
    state = acc.get_state_dict(model)
    unwrapped.save_pretrained(f"{place}/hf", is_main_process=acc.is_main_process, state_dict=state)
    acc.wait_for_everyone()
    ours = evaluated(model)
    model.destroy()
    forget()
    loaded = GPT2LMHeadModel.from_pretrained(f"{place}/hf")
    other = gpt2()
    missing = other.load_state_dict(load_file(f"{place}/plain/model.safetensors"), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    for made in (loaded, other):
        assert evaluated(made) == pytest.approx(ours, abs=1e-6)
    assert sorted(torch.cat(seen).tolist()) == sorted(tokens(7).tolist())
    return losses


@on_clients(2)
def test_saving_and_gathering(tmp_path: Path) -> None:
    assert saved(tmp_path, 2) == pytest.approx(saved(tmp_path, 3), rel=1e-5)


# -- fp16 --------------------------------------------------


@on_clients(2)
def test_steps_that_overflow() -> None:
    """fp16 with a loss scale that is too large at first."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "zero_optimization": {"stage": 2},
    }
    acc = accelerator({"hf_ds_config": config}, mixed_precision="fp16")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data, scheduler = acc.prepare(model, optimizer, loader(64), lambda_schedule(optimizer))
    skipped, rates, losses = [], [], []
    for batch in data:
        loss = model(input_ids=batch, labels=batch).loss
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        skipped.append(acc.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
        losses.append(mean_over_ranks(loss))
    assert sum(skipped) == model.skipped_steps
    model.destroy()
    taken = skipped.index(False)
    assert skipped == [True] * taken + [False] * (len(skipped) - taken) and 0 < taken < 12
    assert rates == pytest.approx([0.01] * taken + [0.01 / (1 + 2 * n) for n in range(1, 1 + len(rates) - taken)])
    assert losses[-1] < losses[0]
