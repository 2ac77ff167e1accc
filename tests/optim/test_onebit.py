"""1-bit Adam, 1-bit LAMB and 0/1 Adam: exact where they are exact, and what their papers say where they are not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint.match import group_counters
from shardwise.config import resolve
from shardwise.errors import CheckpointError, ConfigError, ConflictError, UsageError
from shardwise.optim import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, sharding_of
from shardwise.optim.sharding import Sharding
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import Setting, digest, engine_of, parameters_digest, start, take_steps
from tests.models import CASES

BETAS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05}
QUICK: dict[str, dict[str, Any]] = {
    "OnebitAdam": {**BETAS, "freeze_step": 3},
    "OnebitLamb": {**BETAS, "freeze_step": 3},
    "ZeroOneAdam": {
        **BETAS,
        "var_freeze_step": 4,
        "var_update_scaler": 1,
        "local_step_scaler": 3,
        "local_step_clipper": 3,
    },
}
"""Options under which everything happens within a few steps: 0/1 Adam updates the variance in steps 0, 1 and 3, and
averages in steps 0 to 6, 8, 9 and 12."""

CLASSES = {cls.__name__: cls for cls in (OnebitAdam, OnebitLamb, ZeroOneAdam)}
NAMES = [thorough("OnebitAdam"), thorough("OnebitLamb"), "ZeroOneAdam"]
FP16 = Setting(precision="fp16", extra=(("fp16", {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}),))
Make = Callable[[Any], torch.optim.Optimizer]


def plain_of(name: str) -> Make:
    if name == "OnebitLamb":
        return lambda groups: Lamb(groups, **BETAS)
    return lambda groups: torch.optim.AdamW(groups, foreach=False, **BETAS)


def maker(name: str, **options: Any) -> Make:
    return lambda groups: CLASSES[name](groups, **{**QUICK[name], **options})


def stages_of(name: str) -> tuple[int, ...]:
    return (0,) if name == "ZeroOneAdam" else (0, 1)


def begin(make: Make, setting: Setting | None = None, case: str = "gpt_groups") -> Any:
    model = CASES[case].make()
    return start(CASES[case], setting or Setting(), model, make(CASES[case].groups(model)))


def go_on(engine: Any, steps: range, case: str = "gpt_groups") -> list[float]:
    return take_steps(engine, CASES[case], steps)


# -- exact steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_outside_of_an_engine_they_are_the_plain_optimizers(name: str) -> None:
    case, found = CASES["odd_mlp"], []
    for make in (maker(name), plain_of(name)):
        model = case.make()
        optimizer = make(model.parameters())
        assert (sharding_of(optimizer)[0] is Sharding.COMMUNICATES) == (type(optimizer) is CLASSES[name])
        for step in range(8):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            case.loss(model, case.data(step, 0, 0, torch.float32)).backward()
            optimizer.step()
        found.append(digest(list(model.parameters())))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precisions", [("bf16", "fp32"), thorough(("fp32", "bf16"))], ids=str)
@on_ranks(2)
def test_the_first_steps_are_bit_for_bit_the_plain_optimizer(name: str, precisions: tuple[str, str]) -> None:
    settings = [
        (Setting(stage, precision=kind), "gpt_groups") for stage, kind in zip(stages_of(name), precisions, strict=False)
    ]
    exact = {"var_update_scaler": 100, "var_freeze_step": 10**6} if name == "ZeroOneAdam" else {"freeze_step": 100}
    for setting, case in [*settings, (Setting(accumulation=2, clip=0.5), "odd_mlp")]:
        found = []
        for make in (plain_of(name), maker(name, **exact)):
            engine = begin(make, setting, case)
            go_on(engine, range(4), case)
            found.append(parameters_digest(engine.module))
            engine.destroy()
        assert found[0] == found[1], setting


@pytest.mark.parametrize("name", NAMES)
@on_ranks(1)
def test_one_rank_has_nothing_to_send_and_is_exact(name: str) -> None:
    found = []
    for make in (plain_of(name), maker(name)):
        engine = begin(make)
        go_on(engine, range(14))
        found.append(parameters_digest(engine.module))
        assert not any(totals.sent for totals in engine.ledger.totals.values())
        engine.destroy()
    assert found[0] == found[1]


# -- compressed steps against all ranks in one process -----------------------------------------------------------------

SIZES = (32, 64, 32)
"""Elements of three tensors; the ranges of two ranks meet in the middle of the second."""


class Simulated:
    """Two ranks in one process, in fp64; the tensors are one vector."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        self.name, self.rule = name, CLASSES[name]([torch.zeros(1)], **QUICK[name])
        zero = torch.zeros_like(values)
        self.x, self.m, self.u, self.error = ([t.clone(), t.clone()] for t in (values, zero, zero, zero))
        self.v, self.server, self.anchor, self.united = zero.clone(), zero.clone(), values, zero
        self.factor, self.coefficient = [1.0] * 3, [math.nan] * 3
        self.steps = self.variance_steps = 0
        self.rate = self.drift = 0.0

    def message(self, values: torch.Tensor) -> torch.Tensor:
        """Signs with a scale for each range; but for LAMB one for each tensor in it."""
        parts = []
        for part in values.split(64 if self.name == "OnebitLamb" else 32):
            size = part.abs().mean() if self.name == "ZeroOneAdam" else part.square().mean().sqrt()
            parts.append(torch.where(part >= 0, 1.0, -1.0).double() * float(size.float()))
        return torch.cat(parts)

    def mean(self, own: list[torch.Tensor]) -> torch.Tensor:
        for error, values in zip(self.error, own, strict=True):
            error += values
            message = self.message(error)
            error -= message
            self.server += message / 2
        message = self.message(self.server)
        self.server -= message
        return message

    def root(self, v: torch.Tensor, count: int) -> torch.Tensor:
        return v.sqrt() / math.sqrt(1 - BETAS["betas"][1] ** count) + BETAS["eps"]

    def step(self, gradients: list[torch.Tensor]) -> None:
        rule, number, (first, second) = self.rule, self.steps, BETAS["betas"]
        zero_one = isinstance(rule, ZeroOneAdam)
        exact = rule.updates_variance(number) if zero_one else number < rule.freeze_step
        before = self.m[0]
        mean = (gradients[0] + gradients[1]) / 2
        self.m = [first * m + (1 - first) * (mean if exact else g) for m, g in zip(self.m, gradients, strict=True)]
        self.steps += 1
        if exact:
            self.variance_steps += 1
            self.v = second * self.v + (1 - second) * mean * mean
        elif zero_one and rule.interval(number) > 1:
            self.local(rule.averages(number))
            return
        else:
            scale = self.unite(before) if self.name == "OnebitLamb" else 1.0
            self.m = [self.mean([m * scale for m in self.m]) / scale] * 2
            if self.name == "OnebitLamb":
                self.follow((self.m[0] - first * before) / (1 - first))
        direction = self.m[0] / (1 - first**self.steps) / self.root(self.v, self.variance_steps)
        self.x = [self.descend(direction, exact)] * 2

    def descend(self, direction: torch.Tensor, exact: bool) -> torch.Tensor:
        x, lr, decay = self.x[0], BETAS["lr"], BETAS["weight_decay"]
        if self.name != "OnebitLamb":
            return x * (1 - lr * decay) - lr * direction
        moved = []
        for place, (w, d) in enumerate(zip(x.split(SIZES), (direction + decay * x).split(SIZES), strict=True)):
            ratio = min(max(float(w.norm() / d.norm()), 0.01), 10.0)
            if exact:
                known = ratio if math.isnan(self.coefficient[place]) else self.coefficient[place]
                self.coefficient[place] = 0.9 * known + 0.1 * ratio
            else:
                ratio = self.coefficient[place] * self.factor[place]
            moved.append(w - lr * ratio * d)
        return torch.cat(moved)

    def unite(self, before: torch.Tensor) -> torch.Tensor:
        """Factors that give the momenta of all tensors one size, from the last exact step on."""
        if not self.united.any():
            sizes = [float(part.square().mean().sqrt()) for part in before.split(SIZES)]
            self.united = torch.cat([torch.full((n,), sum(sizes) / 3 / s) for n, s in zip(SIZES, sizes, strict=True)])
            self.united, self.fresh = self.united.double(), self.v
        return self.united

    def follow(self, g: torch.Tensor) -> None:
        """Factors of the coefficients: frozen against fresh variance."""
        self.fresh = BETAS["betas"][1] * self.fresh + (1 - BETAS["betas"][1]) * g * g
        ratios = self.root(self.v, self.variance_steps) / self.root(self.fresh, self.steps)
        for place, ratio in enumerate(ratios.split(SIZES)):
            known = self.factor[place]
            self.factor[place] = min(max(min(max(float(ratio.max()), 0.9 * known), 1.1 * known), 0.5), 4.0)

    def local(self, averages: bool) -> None:
        if not self.rate:
            self.anchor = self.x[0]
        rate = BETAS["lr"] / (1 - BETAS["betas"][0] ** self.steps)
        self.rate += rate
        self.drift += BETAS["lr"]
        self.u = [u + rate * m for u, m in zip(self.u, self.m, strict=True)]
        if averages:
            self.m = [self.mean([u / self.rate for u in self.u])] * 2
            self.u = [m * self.rate for m in self.m]
        begin = self.anchor * (1 - self.drift * BETAS["weight_decay"])
        self.x = [begin - u / self.root(self.v, self.variance_steps) for u in self.u]
        if averages:
            self.rate = self.drift = 0.0
            self.u = [torch.zeros_like(u) for u in self.u]


@pytest.mark.parametrize("name", CLASSES)
@on_ranks(2)
def test_compressed_steps_are_those_of_all_ranks_in_one_process(name: str) -> None:
    random = torch.Generator().manual_seed(3)
    values = torch.randn(sum(SIZES), generator=random, dtype=torch.float64)
    scales = torch.cat([torch.full((n,), 10.0**-k) for k, n in enumerate(SIZES)])
    steps = [
        [torch.randn(sum(SIZES), generator=random, dtype=torch.float64) * scales for _ in range(2)] for _ in range(14)
    ]
    for stage in stages_of(name):
        model = nn.ParameterList(part.clone() for part in values.split(SIZES))
        engine = engine_of(model, stage, maker(name)(model.parameters()))
        simulated = Simulated(name, values.clone())
        for number, gradients in enumerate(steps):
            simulated.step(gradients)
            own = gradients[dist.get_rank()].split(SIZES)
            engine.backward(sum((p * g).sum() for p, g in zip(model, own, strict=True)))
            engine.step()
            found = torch.cat([p.detach() for p in model])
            assert torch.allclose(found, simulated.x[dist.get_rank()], rtol=1e-6, atol=1e-7), (stage, number)
        engine.destroy()


def test_when_0_1_adam_does_what() -> None:
    optimizer = ZeroOneAdam([torch.zeros(1)], **QUICK["ZeroOneAdam"])
    assert [step for step in range(20) if optimizer.updates_variance(step)] == [0, 1, 3]
    assert [optimizer.interval(step) for step in range(14)] == [1] * 7 + [2] * 3 + [3] * 4
    assert [step for step in range(17) if optimizer.averages(step)] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 15]
    paper = ZeroOneAdam([torch.zeros(1)], var_freeze_step=10**6)
    gaps = [after - before for before, after in pairwise(step for step in range(5000) if paper.updates_variance(step))]
    assert gaps == [1 << (number // 16) for number in range(len(gaps))]


# -- the same bits everywhere ------------------------------------------------------------------------------------------

KINDS: list[tuple[str, Setting]] = [
    ("odd_mlp", Setting()),
    ("router", Setting()),  # ranks use different parameters
    ("gpt_groups", Setting(precision="bf16")),
    ("gpt_groups", FP16),
    ("odd_mlp", Setting(accumulation=3, clip=0.3)),
    ("gpt", Setting()),  # tied
    ("gpt", Setting(extra=(("prescale_gradients", True),))),
    ("gpt", Setting(extra=(("gradient_predivide_factor", 4.0),))),
]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_ranks_and_stages_have_the_same_bits(name: str) -> None:
    steps = 10 if name == "ZeroOneAdam" else 6  # 0/1 Adam has just averaged then
    found = []
    for case, setting in KINDS:
        at_stages = []
        for stage in (0,) if setting.extra else stages_of(name):
            engine = begin(maker(name, eps=1e-3), replace(setting, stage=stage), case)
            assert math.isfinite(go_on(engine, range(steps), case)[-1])
            at_stages += of_all_ranks(parameters_digest(engine.module))
            engine.destroy()
        assert len(set(at_stages)) == 1, (case, setting)
        found.append(at_stages[0])
    assert len(set(found[-3:])) == 1  # factors of two before and after a sum change no bits


@on_ranks(2)
def test_norm_gradients_and_windows_of_compressed_steps() -> None:
    case, rank = CASES["gpt_groups"], dist.get_rank()
    engine = begin(maker("OnebitAdam"), Setting(1, accumulation=2, clip=0.01))
    go_on(engine, range(4))
    model = case.make()
    model.load_state_dict(engine.module_state_dict())
    for micro in range(2):
        if micro:
            engine.step()
        engine.backward(case.loss(engine, case.data(9, micro, rank, torch.float32)))
        (case.loss(model, case.data(9, micro, rank, torch.float32)) / 2).backward()
    own = of_all_ranks([p.grad for p in model.parameters()])
    for parameter, *grads in zip(engine.module.parameters(), *own, strict=True):
        assert torch.allclose(safe_get_full_grad(parameter), (grads[0] + grads[1]) / 2, atol=1e-6)
    with pytest.raises(UsageError, match="own gradient"):
        safe_set_full_grad(parameter, torch.zeros_like(parameter))
    engine.step()
    report = engine.last_step
    squares = sum(float(g.double().square().sum()) for grads in own for g in grads)
    assert float(report.grad_norm) == engine.get_global_grad_norm() == pytest.approx(math.sqrt(squares / 2), rel=1e-5)
    assert float(report.clip_coefficient) == pytest.approx(0.01 / (float(report.grad_norm) + 1e-6), rel=1e-5)
    before = parameters_digest(engine.module)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()  # no backward pass: nothing changes, and the momentum does not go on
    assert parameters_digest(engine.module) == before


# -- overflow ----------------------------------------------------------------------------------------------------------


def everything(engine: Any) -> str:
    groups = engine.optimizer.param_groups
    owned = [p for group in groups for p in group["params"]]
    state = [engine.optimizer.state[p][key] for p in owned for key in sorted(engine.optimizer.state[p])]
    tensors = [*engine.module.parameters(), *state, *engine.optimizer.extra_tensors()]
    return digest(tensors) + repr([dict(group, params=None) for group in groups])


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_an_overflow_on_one_rank_changes_nothing_on_any(name: str) -> None:
    case = CASES["gpt_groups"]
    for stage in stages_of(name):
        engine = begin(maker(name), replace(FP16, stage=stage))
        go_on(engine, range(8))
        before, scale = everything(engine), engine.cur_scale
        loss = case.loss(engine, case.data(8, 0, dist.get_rank(), torch.float16))
        engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
        engine.step()
        assert everything(engine) == before and not engine.was_step_applied() and engine.cur_scale == scale / 2
        losses = go_on(engine, range(8, 13))
        assert engine.was_step_applied() and all(map(math.isfinite, losses))
        engine.destroy()


# -- resuming ----------------------------------------------------------------------------------------------------------


def saved(name: str, setting: Setting, case: str, directory: str, at: int) -> str:
    """Train, save in between, go on; return what this rank has in the end."""
    engine = begin(maker(name), setting, case)
    go_on(engine, range(at), case)
    engine.save_checkpoint(directory)
    go_on(engine, range(at, 13), case)
    return everything(engine)


def resumed(name: str, setting: Setting, case: str, directory: str, at: int) -> tuple[str, str, int]:
    """Return what this rank has in the end, the parameters that were loaded, and the number of warnings."""
    engine = begin(maker(name), setting, case)
    go_on(engine, range(50, 52), case)  # what is loaded has to replace it
    with logged(logging.WARNING) as log:
        engine.load_checkpoint(directory)
    loaded = digest([safe_get_full_fp32_param(p) for p in engine.module.parameters()])
    assert math.isfinite(go_on(engine, range(at, 13), case)[-1])
    return everything(engine), loaded, sum("is dropped" in line for line in log.lines)


@pytest.mark.parametrize("name", NAMES)
def test_resuming_is_as_not_having_stopped(name: str, tmp_path: Path) -> None:
    if name == "ZeroOneAdam":
        wanted = [(Setting(), "odd_mlp", 3), (Setting(precision="bf16"), "gpt_groups", 8)]  # 8: between averages
    else:
        wanted = [(Setting(1), "odd_mlp", 2), (Setting(), "gpt_groups", 5), (Setting(1, precision="bf16"), "gpt", 5)]
    for number, (setting, case, at) in enumerate(wanted):
        directory = str(tmp_path / str(number))
        expected = run_ranks(saved, 2, name, setting, case, directory, at)
        found = run_ranks(resumed, 2, name, setting, case, directory, at)
        assert [mine for mine, *_ in found] == expected and not any(warnings for *_, warnings in found)
    setting, case, at = wanted[1]
    for world in (1, 3):
        others = run_ranks(resumed, world, name, setting, case, str(tmp_path / "1"), at)
        assert [other[2] for other in others] == [1] + [0] * (world - 1)
        assert len({other[1] for other in others}) == 1


@on_ranks(2)
def test_between_averages_ranks_differ_and_can_be_made_equal(tmp_path: Path) -> None:
    engine = begin(maker("ZeroOneAdam"))
    optimizer, model = engine.optimizer, engine.module

    def ranks_have() -> set[str]:
        return set(of_all_ranks(digest(list(model.parameters()))))

    go_on(engine, range(8))
    assert optimizer.diverged and len(ranks_have()) == 2
    average = set(of_all_ranks(digest([safe_get_full_fp32_param(p) for p in model.parameters()])))
    assert len(average) == 1
    engine.save_checkpoint(str(tmp_path), tag="apart")
    weight = next(model.parameters())
    with pytest.raises(UsageError, match="ZeroOneAdam"):
        safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    with torch.no_grad():
        weight[0, 0] += 1
    with pytest.raises(UsageError, match=r"engine\.optimizer\.synchronize\(\)"):
        go_on(engine, range(8, 9))
    engine.zero_grad()
    for _ in range(2):  # the second time there is nothing to do
        optimizer.synchronize()
        assert not optimizer.diverged and len(ranks_have()) == 1
    go_on(engine, range(8, 13))
    assert len(ranks_have()) == 1
    engine.load_checkpoint(str(tmp_path), tag="apart", load_optimizer_states=False)
    assert not optimizer.diverged and ranks_have() == average


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_state_is_adopted_read_and_set(name: str) -> None:
    case = CASES["gpt_groups"]
    for stage in stages_of(name):
        model = case.make()
        optimizer = maker(name)(case.groups(model))
        for step in range(2):
            optimizer.zero_grad(set_to_none=True)
            case.loss(model, case.data(step, 0, 0, torch.float32)).backward()
            optimizer.step()
        engine = start(case, Setting(stage), model, optimizer)
        go_on(engine, range(2, 6))
        assert [group["step"] for group in optimizer.param_groups] == [6, 6]
        weight = next(engine.module.parameters())
        assert safe_get_full_optimizer_state(weight, "exp_avg_sq").shape == weight.shape
        safe_set_full_optimizer_state(weight, torch.full_like(weight, 0.25), "exp_avg")
        assert bool((safe_get_full_optimizer_state(weight, "exp_avg") == 0.25).all())
        go_on(engine, range(6, 7))
        assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
        engine.destroy()


@on_ranks(2)
def test_elements_without_a_variance_stay_as_they_are() -> None:
    """Rows of an embedding that no rank has used before the variance is frozen."""
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 2))
    before = model[0].weight.detach().clone()
    engine = engine_of(model, 0, OnebitAdam(model.parameters(), lr=0.1, freeze_step=3))
    for step in range(10):
        tokens = torch.tensor([0, 1, 2] if step < 5 else [0, 1, 7])
        engine.backward(engine(tokens).square().mean())
        engine.step()
    assert torch.equal(before[3:], model[0].weight[3:])
    assert 0 < float((before - model[0].weight).abs().max()) < 5


# -- bytes -------------------------------------------------------------------------------------------------------------

TRAINING: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "OnebitAdam": {"freeze_step": 6},
    "OnebitLamb": {"freeze_step": 6},
    "ZeroOneAdam": {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 8, "local_step_clipper": 4},
}
"""40 steps, of which 15 % are warm-up, as in the papers of 1-bit Adam and 1-bit LAMB."""


def traffic() -> list[list[int]]:
    """Return the bytes that this rank sends in each step of each training."""
    found = []
    for name, options in TRAINING.items():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        engine = engine_of(
            model, 0, {**CLASSES, "AdamW": torch.optim.AdamW}[name](model.parameters(), lr=1e-4, **options)
        )
        sent = [sum(totals.sent for totals in engine.ledger.totals.values())]
        for _ in range(40):
            engine.backward(engine(torch.ones(2, 256)).square().mean())
            engine.step()
            engine.sharded.finish_gathers()
            sent.append(sum(totals.sent for totals in engine.ledger.totals.values()))
        found.append([after - before for before, after in pairwise(sent)])
        engine.destroy()
    return found


def byte_table() -> tuple[list[str], list[float]]:
    """The table of docs/onebit.md, and how many times fewer bytes each training sends than AdamW's."""
    sent = run_ranks(traffic, 2)[0]
    rows, fewer = [], []
    for (name, options), own in zip(TRAINING.items(), sent, strict=True):
        what = ", ".join(f"`{key}` {value}" for key, value in options.items())
        fewer.append(sum(sent[0]) / sum(own))
        averaging = min(size for size in own[8:] if size > 1000)  # not in steps of a rank's own
        rows.append(f"| {name} | {what} | {own[1]:,} | {averaging:,} | {sum(own):,} | {fewer[-1]:.1f} |")
    return rows, fewer


def test_a_whole_training_sends_a_fifth_and_the_table_of_the_docs_says_so() -> None:
    rows, fewer = byte_table()
    assert min(fewer[1:]) >= 5
    page = (Path(__file__).parents[2] / "docs" / "onebit.md").read_text()
    for row in rows:
        assert row in page, f"docs/onebit.md should have the row\n{row}"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stage"), [("OnebitAdam", 2), ("OnebitLamb", 3), ("ZeroOneAdam", 1)])
@on_ranks(2)
def test_stages_that_cannot_work_are_refused(name: str, stage: int) -> None:
    model = nn.Linear(3, 2)
    for optimizer in (CLASSES[name](model.parameters()), {"type": name.upper(), "params": {"lr": 0.1}}):
        with pytest.raises(ConflictError, match=r"zero_optimization\.stage"):
            engine_of(model, stage, optimizer)


def test_by_configuration_alone() -> None:
    params = {"lr": 0.1, "freeze_step": 1, "cuda_aware": True, "comm_backend_name": "mpi"}
    config = {"train_batch_size": 2, "optimizer": {"type": "oneBitAdam", "params": params}}
    engine, optimizer, *_ = shardwise.initialize(model=nn.Linear(4, 2), config=config)
    assert type(optimizer) is OnebitAdam and optimizer.freeze_step == 1
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    with pytest.raises(UsageError, match=r"engine\.step"):
        optimizer.step()
    engine.destroy()
    notes = {note.path for note in resolve(config).no_effect}
    assert notes == {"optimizer.params.cuda_aware", "optimizer.params.comm_backend_name"}
    with pytest.raises(ConfigError, match=r"compression\.type"):
        resolve({**config, "compression": {"type": "powersgd"}})


@on_ranks(2)
def test_a_checkpoint_from_before_compression_is_loaded_during_it(tmp_path: Path) -> None:
    engine = begin(maker("OnebitLamb"))
    engine.save_checkpoint(str(tmp_path))
    first = go_on(engine, range(8))
    assert engine.optimizer.param_groups[0]["coefficient"] is not None
    engine.load_checkpoint(str(tmp_path))
    assert engine.optimizer.param_groups[0]["coefficient"] is None
    assert go_on(engine, range(8)) == first


@on_ranks(2)
def test_steps_are_loaded_without_the_settings_of_groups(tmp_path: Path) -> None:
    engine = begin(maker("OnebitAdam"))
    go_on(engine, range(4))
    engine.save_checkpoint(str(tmp_path))
    other = begin(maker("OnebitAdam", eps=1e-3))
    other.load_checkpoint(str(tmp_path), load_param_groups=False)
    groups = other.optimizer.param_groups
    assert [(group["step"], group["variance_step"], group["eps"]) for group in groups] == [(4, 3, 1e-3)] * 2
    with pytest.raises(CheckpointError, match=r"a: parameter groups .* different counters"):
        group_counters(other.sharded.state, [{"step": 1}, {"step": 2}], "a")


@on_ranks(2)
def test_coefficients_are_loaded_without_the_settings_of_groups(tmp_path: Path) -> None:
    engine = begin(maker("OnebitLamb"))
    go_on(engine, range(8))
    engine.save_checkpoint(str(tmp_path))
    other = begin(maker("OnebitLamb"))
    other.load_checkpoint(str(tmp_path), load_param_groups=False)
    assert engine.optimizer.param_groups[0]["factor"] is not None
    assert go_on(other, range(8, 10)) == go_on(engine, range(8, 10))
