"""Accelerate's Accelerator with a DeepSpeedPlugin, which finds shardwise: the numbers of its own data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from tests.dropin.clients import MISSING, forget, gpt2, mean_over_ranks, on_clients, tokens
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
