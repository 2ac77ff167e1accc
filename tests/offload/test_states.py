"""Moving state off the device between steps: training goes on bit by bit, and the device is free meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.engine.states import get_state_devices
from shardwise.errors import UsageError
from shardwise.memory import Category, Tier
from shardwise.zero import OffloadStateTypeEnum as Kind
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    DTYPES,
    Outcome,
    Setting,
    assert_identical,
    digest,
    gradients,
    masters,
    parameters_digest,
    ranks_agree,
    start,
)
from tests.models import CASES
from tests.offload.settings import offload

CASE = CASES["gpt"]


def away_and_back(engine: Any, include: Sequence[Any] | None = None) -> None:
    engine.offload_states(include)
    engine.offload_states(include)
    engine.reload_states()
    engine.reload_states()


def train(setting: Setting, between: Callable[[Any], None] | None) -> Outcome:
    """Train; between steps and micro-batches something is done with the engine."""
    model = CASE.make()
    engine = start(CASE, setting, model)
    outcome = Outcome()
    for step in range(3):
        for micro in range(setting.accumulation):
            loss = CASE.loss(engine, CASE.data(step, micro, dist.get_rank(), DTYPES[setting.precision]))
            engine.backward(loss)
            if between is not None:
                between(engine)
            engine.step()
        outcome.losses.append(float(loss.detach()))
        outcome.norms.append(engine.get_global_grad_norm())
        if between is not None:
            between(engine)
        with torch.no_grad():
            outcome.losses.append(float(CASE.loss(engine, CASE.data(9, 0, 0, DTYPES[setting.precision]))))
    engine.backward(CASE.loss(engine, CASE.data(8, 0, dist.get_rank(), DTYPES[setting.precision])))
    if setting.accumulation == 1:
        outcome.gradients = [gradients(model)]
    if between is not None:
        between(engine)
    outcome.masters = masters(model)
    outcome.parameters = parameters_digest(model)
    outcome.buffers = digest(list(model.buffers()))
    engine.destroy()
    if dist.get_rank():
        seen = digest([*outcome.masters.values(), *(g for grads in outcome.gradients for g in grads.values())])
        outcome.masters = {"digest": torch.frombuffer(bytearray.fromhex(seen), dtype=torch.uint8)}
        outcome.gradients = []
    return outcome


def with_and_without(settings: Sequence[Setting]) -> list[Outcome]:
    return [train(setting, between) for setting in settings for between in (None, away_and_back)]


def compare(world: int, settings: Sequence[Setting]) -> None:
    outcomes = ranks_agree(run_ranks(with_and_without, world, settings))
    for setting, plain, moved in zip(settings, outcomes[::2], outcomes[1::2], strict=True):
        assert_identical(moved, plain, str(setting))


def test_the_same_bits_at_every_stage() -> None:
    setting = Setting(precision="bf16", accumulation=2, clip=0.5, optimizer="AdamW", lr=1e-2)
    compare(2, [setting.with_stage(stage) for stage in range(4)])


def test_the_same_bits_where_tensors_are_stepped_whole_or_measured() -> None:
    muon, lamb = (Setting(optimizer=name, lr=1e-2) for name in ("Muon", "Lamb"))
    compare(2, [muon.with_stage(0), lamb.with_stage(1, precision="bf16"), muon.with_stage(3)])


def test_the_same_bits_where_some_units_stay_whole_and_some_state_is_elsewhere(tmp_path: Path) -> None:
    places = ("half of the optimizer on host", "parameters on host", "all on disk")
    zero = [tuple(offload(place, str(tmp_path)).items()) for place in places]
    whole = Setting(3, precision="bf16", optimizer="AdamW", keep=2000)
    compare(2, [whole, *(whole.with_stage(3, keep=0, zero=keys) for keys in zero)])


def test_the_same_bits_among_groups_of_ranks_and_beside_gathers_as_codes() -> None:
    setting = Setting(3, precision="bf16", optimizer="AdamW")
    settings = [
        setting.with_stage(3, zero=(("zero_hpz_partition_size", 2),)),
        setting.with_stage(2, accumulation=2, zero=(("mics_shard_size", 2),)),
        setting.with_stage(3, zero=(("zero_quantized_weights", True),)),
    ]
    compare(4, settings)


def bytes_held(stage: int, precision: str, include: Sequence[Any] | None) -> dict[str, Any]:
    """Bytes by tier before, while and after state is away, in the middle of a window and after a step."""
    setting = Setting(stage, precision=precision, optimizer="AdamW", accumulation=2)
    engine = start(CASE, setting)
    account = engine.accountant

    def counts() -> tuple[dict[Category, int], dict[Category, int]]:
        return account.live_in(Tier.DEVICE), account.live_in(Tier.HOST)

    found = {}
    for micro in range(4):
        engine.backward(CASE.loss(engine, CASE.data(0, micro, dist.get_rank(), DTYPES[precision])))
        engine.step()
        before = counts()
        engine.offload_states(include)
        away = counts()
        devices = {kind.value: get_state_devices(engine, kind) for kind in Kind}
        engine.reload_states()
        found[f"micro {micro}"] = (before, away, counts(), devices)
    engine.destroy()
    assert not any(account.live_in(Tier.HOST).values())
    return found


@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), thorough(0, "fp32"), thorough(1, "bf16")])
def test_the_device_is_free_meanwhile(stage: int, precision: str) -> None:
    for found in run_ranks(bytes_held, 2, stage, precision, None):
        for when, (before, away, after, _) in found.items():
            assert away[0][Category.OPTIMIZER] < 1000, when  # counts of steps
            for category in (Category.PARAMETERS, Category.MASTER, Category.GRADIENTS, Category.GATHERED):
                assert not away[0][category], (when, category)
            assert not any(before[1].values()) and not any(after[1].values())
            spent = Category.GRADIENTS if when != "micro 2" else None  # kept for the next window only
            for category in (Category.PARAMETERS, Category.MASTER, Category.OPTIMIZER, Category.GRADIENTS):
                if category is not spent:
                    assert away[1][category] >= 0.98 * before[0][category] - 500, (when, category)
                    assert after[0][category] == before[0][category], (when, category)


@pytest.mark.parametrize(
    ("include", "moved"),
    [
        ([Kind.hp_params, "optim_states"], {Category.MASTER, Category.OPTIMIZER}),
        ([Kind.lp_params], {Category.PARAMETERS}),
    ],
)
def test_what_is_included_is_moved_and_nothing_else(include: list[Any], moved: set[Category]) -> None:
    for found in run_ranks(bytes_held, 2, 3, "bf16", include):
        before, away, after, devices = found["micro 3"]
        for category in (Category.PARAMETERS, Category.MASTER, Category.OPTIMIZER):
            gone = category in moved
            assert (away[0][category] < 0.05 * before[0][category]) == gone, category
            assert (away[1][category] > 0) == gone, category
            assert after[0][category] == before[0][category]
        assert devices["optim_states"] == {torch.device("cpu")}  # both tiers are the processor here
        assert not any(after[1].values())


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_what_needs_what_is_away_says_so(stage: int) -> None:
    model = CASE.make()
    engine = start(CASE, Setting(stage, precision="bf16", optimizer="AdamW"), model)
    batch = CASE.data(0, 0, 0, torch.bfloat16)
    engine.backward(CASE.loss(engine, batch))
    engine.step()
    loss = CASE.loss(engine, batch)
    weight = next(model.parameters())
    with pytest.raises(UsageError, match=r"device='nvme'\): state is moved to the host"):
        engine.offload_states(device="nvme")
    with pytest.raises(UsageError, match=r"'parameters' is not a valid .* There are optim_states, hp_params"):
        engine.offload_states(["parameters"])
    with engine.gathered(), pytest.raises(UsageError, match="parameters are gathered"):
        engine.offload_states()

    kept = engine.module_state_dict() if stage == 3 else dict(model.state_dict())
    values = {name: value.clone() for name, value in kept.items()}
    engine.optimizer.offload_states(include=["optim_states"], device="cpu", pin_memory=True, non_blocking=True)
    with torch.no_grad():
        CASE.loss(engine, batch)  # the parameters are there
    for call in (
        lambda: engine.backward(loss),
        lambda: loss.backward(),
        engine.step,
        lambda: engine.save_checkpoint("nowhere"),
        lambda: shardwise.utils.safe_get_full_fp32_param(weight),
    ):
        with pytest.raises(UsageError, match=r"optim_states have been moved .* Call engine.reload_states\(\)"):
            call()
    engine.offload_states()
    for call in (
        lambda: engine(**batch) if isinstance(batch, dict) else engine(batch),
        lambda: CASE.loss(model, batch),
        lambda: weight + 1,
        lambda: model.state_dict(),
        lambda: engine.module_state_dict(),
        lambda: engine.save_16bit_model("nowhere"),
        lambda: shardwise.zero.GatheredParameters(weight).__enter__(),
        lambda: engine.gathered().__enter__(),
    ):
        with pytest.raises(UsageError, match=r"lp_params.* have been moved .* Call engine.reload_states\(\)"):
            call()
    # What the script has kept is as it was.
    assert all(torch.equal(kept[name], value) for name, value in values.items())
    assert "released" in repr(weight) and engine.memory_report() is not None
    engine.optimizer.reload_states(non_blocking=True)
    engine.backward(CASE.loss(engine, batch))
    engine.step()
    engine.offload_states()
    optimizer = engine.optimizer
    engine.destroy()  # brings everything back
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not hasattr(optimizer, "offload_states")


@on_ranks(2)
def test_a_model_that_is_only_evaluated() -> None:
    model = CASE.make()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    engine, *_ = shardwise.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    )
    batch = CASE.data(0, 0, 0, torch.float32)
    before = CASE.loss(engine, batch)
    away_and_back(engine)
    assert torch.equal(CASE.loss(engine, batch), before)
    engine.destroy()


@on_ranks(2)
def test_an_optimizer_that_communicates_itself_is_refused() -> None:
    model = CASE.make()
    section = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
    engine, *_ = shardwise.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": section})
    with pytest.raises(UsageError, match="OnebitAdam communicates itself"):
        engine.offload_states()
    engine.destroy()
