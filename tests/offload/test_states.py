"""Moving state off the device between steps: training goes on bit by bit, and the device is free meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.harness import on_ranks, thorough
from tests.harness.training import DTYPES, Setting, assert_identical, start, train
from tests.models import CASES
from tests.offload.settings import offload

CASE = CASES["gpt"]


def away_and_back(engine: Any) -> None:
    engine.offload_states()
    engine.offload_states()
    engine.reload_states()
    engine.reload_states()


def compare(settings: Sequence[Setting]) -> None:
    for setting in settings:
        assert_identical(train(CASE, setting, 2, away_and_back), train(CASE, setting, 2), str(setting))


@pytest.mark.parametrize("stages", [(0,), thorough((1, 2, 3))], ids=str)
@on_ranks(2)
def test_the_same_bits_at_every_stage_also_where_tensors_are_stepped_whole_or_measured(stages: tuple[int, ...]) -> None:
    setting = Setting(precision="bf16", accumulation=2, clip=0.5, optimizer="AdamW", lr=1e-2)
    muon, lamb = (Setting(optimizer=name, lr=1e-2) for name in ("Muon", "Lamb"))
    others = [lamb.with_stage(1, precision="bf16"), muon.with_stage(3)]
    compare([*map(setting.with_stage, stages), *others])


@pytest.mark.parametrize(
    "places", [("half of the optimizer on host", "all on disk"), thorough(("parameters on host",))], ids=str
)
@on_ranks(2)
def test_the_same_bits_where_some_units_stay_whole_and_some_state_is_elsewhere(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    zero = [tuple(offload(place, str(tmp_path)).items()) for place in places]
    whole = Setting(3, precision="bf16", optimizer="AdamW", keep=2000)
    compare([whole, *(whole.with_stage(3, keep=0, zero=keys) for keys in zero)])


HPZ, QW = ("zero_hpz_partition_size", 2), ("zero_quantized_weights", True)


@pytest.mark.parametrize(
    ("stage", "accumulation", "zero"),
    [(3, 1, (HPZ, QW)), (2, 2, (("mics_shard_size", 2),)), thorough(3, 1, (HPZ,)), thorough(3, 1, (QW,))],
)
@on_ranks(4)
def test_the_same_bits_among_groups_of_ranks_and_beside_gathers_as_codes(
    stage: int, accumulation: int, zero: tuple[Any, ...]
) -> None:
    compare([Setting(stage, precision="bf16", optimizer="AdamW", accumulation=accumulation, zero=zero)])


MOVABLE = (Category.PARAMETERS, Category.MASTER, Category.OPTIMIZER, Category.GRADIENTS)


@pytest.mark.parametrize(
    ("include", "moved"),
    [
        (None, set(MOVABLE)),
        ([Kind.hp_params, "optim_states"], {Category.MASTER, Category.OPTIMIZER}),
        ([Kind.lp_params], {Category.PARAMETERS}),
    ],
)
@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), thorough(0, "fp32"), thorough(1, "bf16")])
@on_ranks(2)
def test_the_device_is_free_of_what_is_included_meanwhile(
    include: list[Any] | None, moved: set[Category], stage: int, precision: str
) -> None:
    """In the middle of a window and after a step."""
    engine = start(CASE, Setting(stage, precision=precision, optimizer="AdamW", accumulation=2))
    account = engine.accountant
    for micro in range(4):
        engine.backward(CASE.loss(engine, CASE.data(0, micro, dist.get_rank(), DTYPES[precision])))
        engine.step()
        before = account.live_in(Tier.DEVICE)
        assert not any(account.live_in(Tier.HOST).values())
        engine.offload_states(include)
        away, host = account.live_in(Tier.DEVICE), account.live_in(Tier.HOST)
        assert get_state_devices(engine, Kind.optim_states) == ({torch.device("cpu")} if micro else set())
        engine.reload_states()
        after = account.live_in(Tier.DEVICE)
        assert not any(account.live_in(Tier.HOST).values())
        assert include is not None or not away[Category.GATHERED]
        spent = Category.GRADIENTS if micro != 2 else None  # kept for the next window only
        for category in (category for category in MOVABLE if category is not spent):
            assert after[category] == before[category], (micro, category)
            if category in moved:
                assert away[category] < 1000, (micro, category)  # counts of steps
                assert host[category] >= 0.98 * before[category] - 500, (micro, category)
            elif category is not Category.GRADIENTS:
                assert away[category] == before[category] and not host[category], (micro, category)
    engine.destroy()
    assert not any(account.live_in(Tier.HOST).values())


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
