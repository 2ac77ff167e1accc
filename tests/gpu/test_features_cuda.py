"""What scripts do around steps, on one CUDA device that shards by force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

import shardwise
from shardwise import utils
from shardwise.pipe import PipelineModule
from shardwise.trees import map_tensors
from tests.gpu.forced import MODELS, assert_equal, late_collectives, masters_on_host, start_group
from tests.gpu.standin import rehearsing
from tests.models import GPT
from tests.pipeline.training import batch as of_pipeline
from tests.pipeline.training import loss_of, untied

CASE = MODELS["gpt"]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "bf16": {"enabled": True},
}


def config(stage: int = 3, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    found = {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}
    return {**CONFIG, "zero_optimization": found, **more}


def start(model: nn.Module | None = None, **how: Any) -> Any:
    start_group()
    if model is None:
        torch.manual_seed(0)
        model = GPT(dropout=0.1)
    engine, *_ = shardwise.initialize(model=model, config=config(**how))
    return engine


def batch(step: int = 0) -> Any:
    return map_tensors(CASE.data(step, 0, 0, torch.bfloat16), torch.Tensor.cuda)


def train(engine: Any, steps: int = 3, between: Callable[[Any], None] = lambda engine: None) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    for step in range(steps):
        engine.backward(CASE.loss(engine, batch(step)))
        engine.step()
        between(engine)
    return masters_on_host(engine)


# -- models that are made in parts -------------------------------------------------------------------------------------


def test_models_larger_than_what_stays() -> None:
    """Under zero.Init only the module that is being made is whole."""
    start_group()
    width = 1024
    with late_collectives():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        away = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        init = shardwise.zero.Init(config_dict_or_path=config(), remote_device="cpu", dtype=torch.bfloat16)
        with torch.device("cuda"), init:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
        whole = 2 * sum(parameter.numel() for parameter in model.parameters())
        assert rehearsing() or torch.cuda.max_memory_allocated() - before < whole / 2
        first, last = model[0].weight, model[-1].weight
        with shardwise.zero.GatheredParameters([first, last], modifier_rank=0):
            assert first.device.type == "cuda" and first.dtype is torch.bfloat16
            last.data.copy_(first)
        engine, *_ = shardwise.initialize(model=model, config=config(zero=away))
        engine.backward(engine(torch.ones(2, width, device="cuda", dtype=torch.bfloat16)).float().square().mean())
        assert rehearsing() or torch.cuda.max_memory_allocated() - before < whole
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("how", ["init", "meta", "default device"])
def test_models_are_the_same_however_they_are_made(how: str) -> None:
    start_group()

    def made() -> nn.Module:
        torch.manual_seed(3)
        if how == "default device":
            with torch.device("cuda"):
                return GPT()
        with torch.device("meta") if how == "meta" else shardwise.zero.Init(config_dict_or_path=config()):
            return GPT()

    with late_collectives():
        engine = start(made())
        with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
            assert all(bool(p.isfinite().all()) and p.device.type == "cuda" for p in engine.module.parameters())
        train(engine)


# -- between steps -----------------------------------------------------------------------------------------------------


def evaluated(engine: Any) -> None:
    engine.eval()
    with torch.no_grad(), engine.gathered():
        for step in range(2):
            CASE.loss(engine, batch(90 + step))
    with torch.no_grad():
        CASE.loss(engine, batch(99))
    engine.train()


def moved(engine: Any) -> None:
    engine.offload_states(pin_memory=True, non_blocking=True)
    engine.reload_states(non_blocking=True)


def read(engine: Any) -> None:
    for parameter in list(engine.module.parameters())[:4]:
        value = utils.safe_get_full_fp32_param(parameter)
        state = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert value is not None and state is not None and value.device.type == "cuda"
        utils.safe_set_full_fp32_param(parameter, value)
        utils.safe_set_full_optimizer_state(parameter, state, "exp_avg")
        part = utils.safe_get_local_fp32_param(parameter)
        assert part is not None
        utils.safe_set_local_fp32_param(parameter, part)
        assert utils.safe_get_local_optimizer_state(parameter, "exp_avg") is not None


PLACES: dict[str, dict[str, Any]] = {
    "here": {},
    "optimizer on host": {"offload_optimizer": {"device": "cpu"}},
    "half of it": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "all on host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@pytest.mark.parametrize("between", [evaluated, moved, read])
@pytest.mark.parametrize("place", PLACES)
def test_what_scripts_do_between_steps_changes_nothing(between: Callable[[Any], None], place: str) -> None:
    with late_collectives():
        expected = train(start(zero=PLACES[place]))
        assert_equal(train(start(zero=PLACES[place]), between=between), expected)


def test_half_of_a_layerwise_optimizer_on_the_host() -> None:
    lamb = {"type": "Lamb", "params": {"lr": 1e-2}}
    with late_collectives():
        expected = train(start(optimizer=lamb))
        found = train(start(zero=PLACES["half of it"], optimizer=lamb))
        for name, value in expected.items():  # a step on the host rounds otherwise
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)


def clamped(engine: Any) -> None:
    weight = engine.module.tokens.weight
    with shardwise.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.clamp_(max=2**-7)


@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_masters_take_over_changes_of_parameters(stage: int) -> None:
    with late_collectives():
        expected = train(start(stage=stage), between=clamped)
        assert 2**-8 < expected["tokens.weight"].max() < 2**-7 * (1 + 2**-8)
        found = train(start(stage=stage, zero=PLACES["optimizer on host"]), between=clamped)
        for name, value in expected.items():  # a step on the host rounds otherwise
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)


def test_gradients_are_read_and_set() -> None:
    with late_collectives():
        for zero in PLACES.values():
            engine = start(zero=zero)
            engine.backward(CASE.loss(engine, batch()))
            for parameter in list(engine.module.parameters())[:4]:
                gradient = utils.safe_get_full_grad(parameter)
                assert gradient is not None and utils.safe_get_local_grad(parameter) is not None
                utils.safe_set_full_grad(parameter, gradient * 2)
                assert torch.equal(utils.safe_get_full_grad(parameter), gradient * 2)
            engine.step()
            engine.destroy()


def test_pipelines_take_batches_of_the_host() -> None:
    """As a data loader gives them."""
    start_group()
    with late_collectives():
        engine, *_ = shardwise.initialize(
            model=PipelineModule(untied(), num_stages=1, loss_fn=loss_of),
            config={**config(0), "gradient_accumulation_steps": 2},
        )
        batches = [of_pipeline(0, number, 0) for number in range(2)]
        assert all(tensor.device.type == "cpu" for pair in batches for tensor in pair)
        for call in (engine.train_batch, engine.eval_batch):
            assert torch.isfinite(call(iter(batches))) and call(iter(batches)).device.type == "cuda"
        engine.destroy()


def test_changes_of_a_model_are_watched_from_the_next_step_on() -> None:
    """The numbers of the step before are read late, and are those of the parameters of that time."""
    watch = {"enabled": True, "grad_norm_spike": "warn"}
    with late_collectives():
        engine = start(anomaly_watch=watch)
        for step in range(5):
            if step == 2:
                engine.module.extra = nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)
                engine.refresh()
            engine.backward(CASE.loss(engine, batch(step)))
            engine.step()
        assert engine.global_steps == 5
        engine.destroy()


# -- activations, profiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_activations_on_the_host(stage: int) -> None:
    with late_collectives():
        expected = train(start(stage=stage))
        assert_equal(train(start(stage=stage, activation_offload={"enabled": True, "min_bytes": 0})), expected)


def test_our_recomputation() -> None:
    with late_collectives():
        expected = train(start())
        torch.manual_seed(0)
        model = GPT(dropout=0.1)
        model.run = lambda block, x: shardwise.checkpointing.checkpoint(block, x)
        assert_equal(train(start(model)), expected)


def test_profiles_show_ranges() -> None:
    with late_collectives(nccl=True):
        engine = start()
        train_once = [CASE.loss(engine, batch())]
        engine.backward(train_once.pop())
        engine.step()
        activities = [ProfilerActivity.CPU] if rehearsing() else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            engine.backward(CASE.loss(engine, batch(1)))
            engine.step()
            torch.cuda.synchronize()
        seen = {event.name for event in profile.events()}
        for what in ("forward", "backward", "step", "gather", "reduce", "wait for gather"):
            assert any(name.startswith(f"shardwise::{what}") for name in seen), what
        assert rehearsing() or any("nccl" in name.lower() for name in seen)
        engine.destroy()


def test_other_reports() -> None:
    """What asks the device for its memory, its name and its times."""
    with late_collectives(nccl=True):
        engine = start(wall_clock_breakdown=True, steps_per_print=1, comms_logger={"enabled": True})
        for step in range(3):
            engine.backward(CASE.loss(engine, batch(step)))
            engine.step()
        assert engine.memory_report(CASE.data(0, 0, 0, torch.bfloat16)["tokens"][:, :-1]).render()
        utils.see_memory_usage("here", force=True)
        engine.destroy()
