"""1-bit Adam, 1-bit LAMB and 0/1 Adam: exact where they are exact, and what their papers say where they are not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.comm.compression import message_bytes
from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.optim import Lamb, OnebitAdam, OnebitLamb, ZeroOneAdam, build, sharding_of
from shardwise.optim.sharding import Sharding
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import digest, parameters_digest, take_steps
from tests.models import CASES, Case

BETAS = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05}
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


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "OnebitAdam": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False, **BETAS),
    "OnebitLamb": lambda ps: Lamb(ps, lr=1e-2, **BETAS),
    "ZeroOneAdam": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False, **BETAS),
}


def exact_options(name: str) -> dict[str, Any]:
    """Never compressed."""
    return {**BETAS, "var_update_scaler": 100} if name == "ZeroOneAdam" else dict(BETAS)


@dataclass(frozen=True)
class Run:
    """One training."""

    case: str = "gpt_groups"
    stage: int = 0
    precision: str = "fp32"
    accumulation: int = 1
    extra: tuple[tuple[str, Any], ...] = ()
    wide: bool = False

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage},
            **dict(self.extra),
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        return config

    def start(self, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
        case = CASES[self.case]
        model = case.make()
        if self.wide:
            model = model.double()
        engine, *_ = shardwise.initialize(model=model, optimizer=make(case.groups(model)), config=self.config())
        return engine

    def step(self, engine: Any, step: int) -> float:
        return take_steps(engine, CASES[self.case], [step])[0]


def maker(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: CLASSES[name](groups, **{"lr": 1e-2, **options})


# -- exact steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_outside_of_an_engine_they_are_the_plain_optimizers(name: str) -> None:
    case = CASES["odd_mlp"]
    model, twin = case.make(), case.make()
    for net, optimizer in (
        (model, maker(name, **QUICK[name])(model.parameters())),
        (twin, PLAIN[name](twin.parameters())),
    ):
        for step in range(8):
            optimizer.zero_grad(set_to_none=False)
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            case.loss(net, case.data(step, 0, 0, torch.float32)).backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert sharding_of(optimizer)[0] is not Sharding.COMMUNICATES
    saved = maker(name, **QUICK[name])(model.parameters())
    assert sharding_of(saved)[0] is Sharding.COMMUNICATES


def exact_run(name: str, runs: list[Run]) -> list[tuple[str, str]]:
    found = []
    for run in runs:
        pair = []
        for make in (PLAIN[name], maker(name, **exact_options(name))):
            engine = run.start(make)
            for step in range(4):
                run.step(engine, step)
            pair.append(parameters_digest(engine.module))
            engine.destroy()
        found.append((pair[0], pair[1]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_are_bit_for_bit_the_plain_optimizer(name: str) -> None:
    stages = (0,) if name == "ZeroOneAdam" else (0, 1)
    runs = [Run(stage=stage, precision=kind) for stage in stages for kind in ("fp32", "bf16")]
    runs += [Run("odd_mlp", accumulation=2, extra=(("gradient_clipping", 0.5),))]
    for pairs in run_ranks(exact_run, 2, name, runs):
        for run, (plain_bits, own) in zip(runs, pairs, strict=True):
            assert own == plain_bits, run


@pytest.mark.parametrize("name", CLASSES)
@on_ranks(1)
def test_one_rank_has_nothing_to_send_and_is_exact(name: str) -> None:
    run = Run()
    bits = []
    for make in (PLAIN[name], maker(name, **QUICK[name])):
        engine = run.start(make)
        for step in range(14):
            run.step(engine, step)
        bits.append(parameters_digest(engine.module))
        sent = any(totals.sent for totals in engine.ledger.totals.values())
        engine.destroy()
    plain_bits = bits[0]
    own = bits[1]
    assert own == plain_bits and not sent


# -- compressed steps against a simulation of all ranks in one process -------------------------------------------------


@dataclass
class Simulation:
    """All ranks in one process, in fp64.

    Args:
        name: of the optimizer.
        options: its arguments.
        case: what is trained.
        world: ranks.
        layout: (elements, [(parameter, start, stop)]) of each block, and the group of each parameter.
    """

    name: str
    options: dict[str, Any]
    case: Case
    world: int
    layout: list[tuple[int, list[tuple[int, int, int]]]]

    def __post_init__(self) -> None:
        self.models = [self.case.make().double() for _ in range(self.world)]
        self.parameters = [list(model.parameters()) for model in self.models]
        groups = list(self.case.groups(self.models[0]))
        entries = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.group_of: dict[int, dict[str, Any]] = {}
        for entry in entries:
            for p in entry["params"]:
                own = {"lr": 1e-2, **self.options, **{k: v for k, v in entry.items() if k != "params"}}
                self.group_of[next(i for i, q in enumerate(self.parameters[0]) if q is p)] = own
        zeros = [torch.zeros_like(p, dtype=torch.float64).flatten() for p in self.parameters[0]]
        self.v = [z.clone() for z in zeros]
        self.m = [[z.clone() for z in zeros] for _ in range(self.world)]
        self.u = [[z.clone() for z in zeros] for _ in range(self.world)]
        self.anchor = [p.detach().flatten().clone() for p in self.parameters[0]]
        self.rate, self.drift = {i: 0.0 for i in self.group_of}, {i: 0.0 for i in self.group_of}
        self.worker = [[torch.zeros(n, dtype=torch.float64) for n, _ in self.layout] for _ in range(self.world)]
        self.server = [torch.zeros(n, dtype=torch.float64) for n, _ in self.layout]
        self.fresh: list[torch.Tensor] = []
        self.coefficient: dict[int, float] = {}
        self.factor = {i: 1.0 for i in self.group_of}
        self.united: dict[int, float] = {}
        self.steps = self.variance_steps = 0

    def gradients(self, step: int) -> list[list[torch.Tensor]]:
        found = []
        for rank, model in enumerate(self.models):
            model.zero_grad(set_to_none=True)
            self.case.loss(model, self.case.data(step, 0, rank, torch.float64)).backward()
            found.append(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters[rank]]
            )
        return found

    def said(self, values: torch.Tensor, first: int, last: int, tensors: list[tuple[int, int, int]]) -> torch.Tensor:
        """What a message says of the elements from `first` to `last` of a block."""
        runs = [torch.arange(max(a, first), min(b, last)) for _, a, b in tensors if max(a, first) < min(b, last)]
        if self.name == "OnebitLamb" and runs:
            runs = [torch.cat(runs)]
        result = torch.zeros_like(values)
        for run in runs:
            part = values[run]
            size = part.abs().mean() if self.name == "ZeroOneAdam" else part.norm() / math.sqrt(len(run))
            result[run] = torch.where(part >= 0, 1.0, -1.0).double() * float(size.float())
        return result

    def mean(self, own: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The compressed mean of lists of tensors, one list for each rank."""
        result = [torch.zeros_like(tensor) for tensor in own[0]]
        for number, (numel, tensors) in enumerate(self.layout):
            shard = numel // self.world
            total = torch.zeros(numel, dtype=torch.float64)
            for rank in range(self.world):
                values = self.worker[rank][number]
                for index, start, stop in tensors:
                    values[start:stop] += own[rank][index]
                message = sum(self.said(values, at, at + shard, tensors) for at in range(0, numel, shard))
                values -= message
                total += message
            values = self.server[number]
            values += total / self.world
            message = sum(self.said(values, at, at + shard, tensors) for at in range(0, numel, shard))
            values -= message
            for index, start, stop in tensors:
                result[index] = message[start:stop].clone()
        return result

    def corrections(self, options: dict[str, Any], variance_steps: int | None = None) -> tuple[float, float]:
        first, second = options["betas"]
        count = self.variance_steps if variance_steps is None else variance_steps
        return 1 - first**self.steps, math.sqrt(1 - second**count)

    def root(self, index: int, frozen: bool) -> torch.Tensor:
        options = self.group_of[index]
        root = self.v[index].sqrt() / self.corrections(options)[1] + options["eps"]
        return torch.where(self.v[index] == 0, math.inf, root) if frozen else root

    @torch.no_grad()
    def put(self, index: int, values: torch.Tensor, rank: int | None = None) -> None:
        for number in range(self.world) if rank is None else [rank]:
            self.parameters[number][index].copy_(values.view_as(self.parameters[number][index]))

    def value(self, index: int) -> torch.Tensor:
        return self.parameters[0][index].detach().flatten()

    def descend(self, index: int, frozen: bool) -> None:
        """One step that is the same on all ranks."""
        options, x = self.group_of[index], self.value(index)
        first, _ = self.corrections(options)
        direction = self.m[0][index] / first / self.root(index, frozen)
        if self.name == "OnebitLamb":
            direction = direction + options["weight_decay"] * x
            if frozen:
                ratio = self.coefficient[index] * self.factor[index]
            else:
                ratio = float(x.norm() / direction.norm()) if x.norm() > 0 and direction.norm() > 0 else 1.0
                ratio = min(max(ratio, 0.01), 10.0) if x.norm() > 0 and direction.norm() > 0 else 1.0
                before = self.coefficient.get(index, ratio)
                self.coefficient[index] = 0.9 * before + 0.1 * ratio
            self.put(index, x - options["lr"] * ratio * direction)
        else:
            self.put(index, x * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * direction)

    def step(self, exact: bool, interval: int = 1, averages: bool = True) -> None:
        gradients = self.gradients(self.steps)
        self.steps += 1
        if exact:
            self.variance_steps += 1
            for index, options in self.group_of.items():
                first, second = options["betas"]
                g = sum(own[index] for own in gradients) / self.world
                for m in self.m:
                    m[index] = first * m[index] + (1 - first) * g
                self.v[index] = second * self.v[index] + (1 - second) * g * g
                self.descend(index, False)
            return
        before = [m.clone() for m in self.m[0]]
        for index, options in self.group_of.items():
            first = options["betas"][0]
            for m, own in zip(self.m, gradients, strict=True):
                m[index] = first * m[index] + (1 - first) * own[index]
        if self.name == "ZeroOneAdam" and interval > 1:
            self.local(averages)
            return
        if self.name == "OnebitLamb":
            self.lamb(before)
        else:
            mean = self.mean(self.m)
            self.m = [[t.clone() for t in mean] for _ in range(self.world)]
        for index in self.group_of:
            self.descend(index, True)

    def lamb(self, before: list[torch.Tensor]) -> None:
        if not self.united:
            sizes = {i: float(before[i].norm()) / math.sqrt(before[i].numel()) for i in self.group_of if len(before[i])}
            moving = [size for size in sizes.values() if size > 0]
            united = sum(moving) / len(moving)
            self.united = {i: united / sizes[i] if sizes.get(i, 0) > 0 else 1.0 for i in self.group_of}
            self.fresh = [v.clone() for v in self.v]
        scaled = [[t * self.united.get(i, 1.0) for i, t in enumerate(m)] for m in self.m]
        mean = [t / self.united.get(i, 1.0) for i, t in enumerate(self.mean(scaled))]
        self.m = [[t.clone() for t in mean] for _ in range(self.world)]
        for index, options in self.group_of.items():
            first, second = options["betas"]
            g = (mean[index] - first * before[index]) / (1 - first)
            self.fresh[index] = second * self.fresh[index] + (1 - second) * g * g
            if not len(g):
                continue
            _, correction = self.corrections(options, self.steps)
            moving = self.fresh[index].sqrt() / correction + options["eps"]
            ratio = float((self.root(index, False) / moving).max())
            known = self.factor[index]
            self.factor[index] = min(max(min(max(ratio, 0.9 * known), 1.1 * known), 0.5), 4.0)

    def local(self, averages: bool) -> None:
        for index, options in self.group_of.items():
            if not any(bool(u[index].any()) for u in self.u) and self.rate[index] == 0:
                self.anchor[index] = self.value(index).clone()
            rate = options["lr"] / self.corrections(options)[0]
            self.rate[index] += rate
            self.drift[index] += options["lr"]
            for u, m in zip(self.u, self.m, strict=True):
                u[index] += rate * m[index]
        if averages:
            mean = self.mean([[t / self.rate.get(i, 1.0) for i, t in enumerate(u)] for u in self.u])
            self.m = [[t.clone() for t in mean] for _ in range(self.world)]
            self.u = [[t * self.rate.get(i, 1.0) for i, t in enumerate(mean)] for _ in range(self.world)]
        for index, options in self.group_of.items():
            for rank in range(self.world):
                start = self.anchor[index] * (1 - self.drift[index] * options["weight_decay"])
                self.put(index, start - self.u[rank][index] / self.root(index, True), rank)
            if averages:
                self.rate[index] = self.drift[index] = 0.0
        if averages:
            self.u = [[torch.zeros_like(t) for t in u] for u in self.u]


SIMULATED_STEPS = 14


def for_simulation(name: str, runs: list[Run]) -> list[Any]:
    found = []
    for run in runs:
        engine = run.start(maker(name, **QUICK[name]))
        layout = [(block.numel, block.tensors) for block in engine.optimizer._blocks]
        values, norms = [], []
        for step in range(SIMULATED_STEPS):
            run.step(engine, step)
            values.append([p.detach().clone() for p in engine.module.parameters()])
            norms.append(engine.get_global_grad_norm())
        found.append((layout, values, norms))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, thorough(3)])
@pytest.mark.parametrize("name", NAMES)
def test_compressed_steps_are_those_of_a_simulation_of_all_ranks(name: str, world: int) -> None:
    stages = (0,) if name == "ZeroOneAdam" else (0, 1)
    cases = ["odd_mlp", "gpt_groups"] if world == 2 else ["odd_mlp"]
    runs = [Run(case, stage=stage, wide=True) for case in cases for stage in stages]
    found = run_ranks(for_simulation, world, name, runs)
    for number, run in enumerate(runs):
        simulation = Simulation(name, QUICK[name], CASES[run.case], world, found[0][number][0])
        told = CLASSES[name]([torch.zeros(1)], **QUICK[name])
        for step in range(SIMULATED_STEPS):
            if isinstance(told, ZeroOneAdam):
                simulation.step(told.updates_variance(step), told.interval(step), told.averages(step))
            else:
                simulation.step(step < told.freeze_step)
            for rank in range(world):
                values = found[rank][number][1][step]
                for mine, theirs in zip(values, simulation.parameters[rank], strict=True):
                    assert torch.allclose(mine, theirs.detach(), rtol=1e-6, atol=1e-7), (run, step, rank)


def test_when_0_1_adam_does_what() -> None:
    optimizer = ZeroOneAdam([torch.zeros(1)], **QUICK["ZeroOneAdam"])
    assert [step for step in range(20) if optimizer.updates_variance(step)] == [0, 1, 3]
    assert [optimizer.interval(step) for step in range(14)] == [1] * 7 + [2] * 3 + [3] * 4
    assert [step for step in range(17) if optimizer.averages(step)] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 15]
    paper = ZeroOneAdam([torch.zeros(1)], var_freeze_step=10**6)
    updates = [step for step in range(5000) if paper.updates_variance(step)]
    gaps = [after - before for before, after in pairwise(updates)]
    assert gaps == [1 << (number // 16) for number in range(len(gaps))]


# -- the same bits everywhere ------------------------------------------------------------------------------------------


def bits(name: str, runs: list[Run], steps: int) -> list[tuple[str, float]]:
    found = []
    for run in runs:
        engine = run.start(maker(name, **{**QUICK[name], "eps": 1e-3}))
        losses = [run.step(engine, step) for step in range(steps)]
        found.append((parameters_digest(engine.module), losses[-1]))
        engine.destroy()
    return found


KINDS = [
    Run("odd_mlp"),
    Run("frozen_half"),
    Run("router"),  # ranks use different parameters
    Run("gpt_groups", precision="bf16"),
    Run("gpt_groups", precision="fp16"),
    Run("odd_mlp", accumulation=3, extra=(("gradient_clipping", 0.3),)),
    Run("gpt"),  # tied
    Run("gpt", extra=(("prescale_gradients", True),)),
    Run("gpt", extra=(("gradient_predivide_factor", 4.0),)),
]
SHARDED = [0, 2, 3, 5, 6]
"""Those that are also trained at stage 1."""


@pytest.mark.parametrize("name", NAMES)
def test_ranks_and_stages_have_the_same_bits(name: str) -> None:
    steps = 10 if name == "ZeroOneAdam" else 6  # 0/1 Adam has just averaged then
    chosen = [] if name == "ZeroOneAdam" else [KINDS[number] for number in SHARDED]
    runs = KINDS + [replace(run, stage=1) for run in chosen]
    found = run_ranks(bits, 2, name, runs, steps)
    for run, first, second in zip(runs, *found, strict=True):
        assert first[0] == second[0], run
        assert math.isfinite(first[1]), run
    # Factors of two before and after a sum change no bits.
    plainly, prescaled, divided = (found[0][KINDS.index(run)][0] for run in KINDS[-3:])
    assert plainly == prescaled == divided
    for place, number in enumerate(SHARDED[: len(chosen)]):
        assert found[0][number] == found[0][len(KINDS) + place], runs[number]


def norms_of(stage: int) -> list[Any]:
    """Norm, clipping, gradients and refusals in compressed steps."""
    run = Run(stage=stage, accumulation=2, extra=(("gradient_clipping", 0.01),))
    engine = run.start(maker("OnebitAdam", **QUICK["OnebitAdam"]))
    for step in range(4):
        run.step(engine, step)
    case, rank = CASES[run.case], dist.get_rank()
    model = case.make()
    model.load_state_dict(engine.module_state_dict())
    with engine.no_sync():
        engine.backward(case.loss(engine, case.data(9, 0, rank, torch.float32)))
        assert not engine.sharded.reducer.boundary
    engine.micro_steps += 1
    engine.backward(case.loss(engine, case.data(9, 1, rank, torch.float32)))
    for micro in range(2):
        (case.loss(model, case.data(9, micro, rank, torch.float32)) / 2).backward()
    own = {n: p.grad for n, p in model.named_parameters()}
    seen = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
    message = ""
    try:
        safe_set_full_grad(next(engine.module.parameters()), torch.zeros(1))
    except UsageError as error:
        message = str(error)
    weight = next(engine.module.parameters())
    try:
        safe_set_full_grad(weight, torch.zeros_like(weight))
    except UsageError as error:
        message = str(error)
    engine.step()
    report = engine.last_step
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.set_gradient_accumulation_boundary(True)
    engine.step()  # no backward pass: nothing changes, and the momentum does not go on
    moved = any(not torch.equal(b, p) for b, p in zip(before, engine.module.parameters(), strict=True))
    result = [
        own,
        seen,
        engine.get_global_grad_norm(),
        float(report.grad_norm),
        float(report.clip_coefficient),
        message,
        moved,
    ]
    engine.destroy()
    return result


def test_norm_gradients_and_windows_of_compressed_steps() -> None:
    found = run_ranks(norms_of, 2, 1)
    squares = [sum(float(g.double().square().sum()) for g in own.values()) for own, *_ in found]
    for own, seen, last, norm, coefficient, message, moved in found:
        assert norm == pytest.approx(math.sqrt(sum(squares) / 2), rel=1e-5)
        assert coefficient == pytest.approx(0.01 / (norm + 1e-6), rel=1e-5)
        assert last == norm and not moved
        assert "takes each rank's own gradient" in message
        for name in own:
            mean = (found[0][0][name] + found[1][0][name]) / 2
            assert torch.allclose(seen[name], mean, atol=1e-6), name


# -- overflow ----------------------------------------------------------------------------------------------------------


def everything(engine: Any) -> str:
    owned = [p for group in engine.optimizer.param_groups for p in group["params"]]
    state = [engine.optimizer.state[p][key] for p in owned for key in sorted(engine.optimizer.state[p])]
    return digest([*engine.module.parameters(), *state, *engine.optimizer.extra_tensors()])


def overflowing(name: str, stage: int) -> list[Any]:
    run = Run(stage=stage, precision="fp16")
    engine = run.start(maker(name, **QUICK[name]))
    for step in range(8):
        run.step(engine, step)
    counts = repr([dict(group, params=None) for group in engine.optimizer.param_groups])
    before, scale = everything(engine), engine.cur_scale
    case = CASES[run.case]
    loss = case.loss(engine, case.data(8, 0, dist.get_rank(), torch.float16))
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    same = everything(engine) == before
    same_counts = counts == repr([dict(group, params=None) for group in engine.optimizer.param_groups])
    result = [same, same_counts, engine.was_step_applied(), engine.cur_scale / scale]
    losses = [run.step(engine, step) for step in range(8, 13)]
    result += [engine.was_step_applied(), all(map(math.isfinite, losses)), parameters_digest(engine.module)]
    engine.destroy()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_on_one_rank_changes_nothing_on_any(name: str) -> None:
    for stage in (0,) if name == "ZeroOneAdam" else (0, 1):
        first, second = run_ranks(overflowing, 2, name, stage)
        assert first[:6] == second[:6] == [True, True, False, 0.5, True, True]
        assert first[6] == second[6] or name == "ZeroOneAdam"


# -- resuming ----------------------------------------------------------------------------------------------------------


def save(name: str, run: Run, directory: str, at: int, steps: int) -> list[str]:
    """Train, save in between, go on; what each rank has in the end."""
    engine = run.start(maker(name, **QUICK[name]))
    for step in range(steps):
        run.step(engine, step)
        if step + 1 == at:
            engine.save_checkpoint(directory, tag="here")
    result = [digest(list(engine.module.parameters())), everything(engine)]
    engine.destroy()
    return result


def resume(name: str, run: Run, directory: str, at: int, steps: int) -> list[Any]:
    engine = run.start(maker(name, **QUICK[name]))
    for step in range(2):
        run.step(engine, 50 + step)  # what is loaded has to replace it
    with logged(logging.WARNING) as heard:
        engine.load_checkpoint(directory, tag="here")
    agreed = digest([safe_get_full_fp32_param(p) for p in engine.module.parameters() if p.requires_grad])
    losses = [run.step(engine, step) for step in range(at, steps)]
    result = [digest(list(engine.module.parameters())), everything(engine), agreed, losses[-1]]
    result.append(sum("has not sent yet" in message and "is dropped" in message for message in heard.lines))
    engine.destroy()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_resuming_is_as_not_having_stopped(name: str, tmp_path: Path) -> None:
    if name == "ZeroOneAdam":
        wanted = [(Run("odd_mlp"), 3), (Run(precision="bf16"), 8)]  # the second between averages
    else:
        wanted = [(Run("odd_mlp", stage=1), 2), (Run(), 5), (Run(stage=1), 5), (Run("gpt", 1, precision="bf16"), 5)]
    for number, (run, at) in enumerate(wanted):
        directory = str(tmp_path / str(number))
        expected = run_ranks(save, 2, name, run, directory, at, 13)
        found = run_ranks(resume, 2, name, run, directory, at, 13)
        for mine, theirs in zip(expected, found, strict=True):
            assert mine == theirs[:2], (run, at)
            assert not theirs[4]
    run, at = wanted[1]
    for world in (1, 3):
        others = run_ranks(resume, world, name, run, str(tmp_path / "1"), at, 13)
        assert all(math.isfinite(other[3]) for other in others)
        assert [other[4] for other in others] == [1] + [0] * (world - 1)
        assert len({other[2] for other in others}) == 1
        assert len({other[0] for other in others}) == 1 or name == "ZeroOneAdam"


def apart(directory: str) -> list[Any]:
    """0/1 Adam between two averages."""
    run = Run("gpt_groups")
    engine = run.start(maker("ZeroOneAdam", **QUICK["ZeroOneAdam"]))
    optimizer, model = engine.optimizer, engine.module
    for step in range(8):
        run.step(engine, step)
    result: list[Any] = [optimizer.diverged, digest(list(model.parameters()))]
    weight = next(model.parameters())
    result.append(digest([safe_get_full_fp32_param(p) for p in model.parameters()]))
    engine.save_checkpoint(directory, tag="apart")
    with pytest.raises(UsageError, match=r"parameter '.*' changed while every rank has its own: ZeroOneAdam"):
        safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    with torch.no_grad():
        weight[0, 0] += 1
    try:
        run.step(engine, 8)
        result.append("accepted")
    except UsageError as error:
        result.append(str(error))
    engine.zero_grad()
    optimizer.synchronize()
    result += [optimizer.diverged, digest(list(model.parameters()))]
    optimizer.synchronize()  # nothing to do
    for step in range(8, 13):
        run.step(engine, step)
    result.append(digest(list(model.parameters())))
    engine.load_checkpoint(directory, tag="apart", load_optimizer_states=False)
    result += [optimizer.diverged, digest(list(model.parameters()))]
    engine.destroy()
    return result


def test_between_averages_ranks_differ_and_can_be_made_equal(tmp_path: Path) -> None:
    first, second = run_ranks(apart, 2, str(tmp_path))
    assert first[0] and second[0]
    assert first[1] != second[1]  # their own parameters
    assert first[2] == second[2]  # those of the last average
    for found in (first, second):
        assert "engine.optimizer.synchronize()" in found[3] and "local steps" in found[3]
        assert found[4] is False and found[7] is False
    assert first[5] == second[5] and first[6] == second[6]
    assert first[8] == second[8] == first[2]


# -- state -------------------------------------------------------------------------------------------------------------


def state_access(name: str, stage: int) -> list[Any]:
    run = Run(stage=stage)
    engine = run.start(maker(name, **QUICK[name]))
    for step in range(5):
        run.step(engine, step)
    weight = next(engine.module.parameters())
    shapes = [tuple(safe_get_full_optimizer_state(weight, key).shape) for key in ("exp_avg", "exp_avg_sq")]
    safe_set_full_optimizer_state(weight, torch.full_like(weight, 0.25), "exp_avg")
    kept = bool((safe_get_full_optimizer_state(weight, "exp_avg") == 0.25).all())
    run.step(engine, 5)
    result = [shapes == [tuple(weight.shape)] * 2, kept, parameters_digest(engine.module)]
    engine.destroy()
    return result


def test_state_can_be_read_and_set() -> None:
    for name in CLASSES:
        found = [run_ranks(state_access, 2, name, stage) for stage in ((0,) if name == "ZeroOneAdam" else (0, 1))]
        for first, second in found:
            assert first[:2] == second[:2] == [True, True]
            assert first[2] == second[2] == found[0][0][2]


def adopting(name: str) -> tuple[str, str]:
    """An instance that has stepped before goes on with its state."""
    case = CASES["gpt_groups"]
    model = case.make()
    optimizer = maker(name, **QUICK[name])(case.groups(model))
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        case.loss(model, case.data(step, 0, 0, torch.float32)).backward()
        optimizer.step()
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=Run().config())
    own = Run()
    for step in range(2, 6):
        own.step(engine, step)
    result = parameters_digest(model), str([group["step"] for group in optimizer.param_groups])
    engine.destroy()
    return result


@pytest.mark.parametrize("name", CLASSES)
def test_existing_state_is_adopted(name: str) -> None:
    first, second = run_ranks(adopting, 2, name)
    assert first == second and first[1] == "[6, 6]"


@on_ranks(2)
def test_elements_without_a_variance_stay_as_they_are() -> None:
    """Rows of an embedding that no rank has used before the variance is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 2))
    before = model[0].weight.detach().clone()
    optimizer = OnebitAdam(model.parameters(), lr=0.1, freeze_step=3)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=Run().config())
    for step in range(10):
        tokens = torch.tensor([0, 1, 2] if step < 5 else [0, 1, 7])
        engine.backward(engine(tokens).square().mean())
        engine.step()
    result = [torch.equal(before[3:], model[0].weight[3:]), float((before - model[0].weight).abs().max())]
    engine.destroy()
    same, moved = result
    assert same and 0 < moved < 5


# -- bytes and memory --------------------------------------------------------------------------------------------------


def traffic(name: str, stage: int, steps: int, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    if name == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = CLASSES[name](model.parameters(), lr=1e-4, **options)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.ones(2, 256)
    sent = []
    for _ in range(steps):
        before = {op: totals.sent for op, totals in engine.ledger.totals.items()}
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.sharded.finish_gathers()
        sent.append({op: totals.sent - before.get(op, 0) for op, totals in engine.ledger.totals.items()})
    blocks = [] if name == "AdamW" else [(block.numel, len(block.tensors)) for block in optimizer._blocks]
    scales = [] if name == "AdamW" else [reduction.scales for reduction in optimizer._means.values()]
    engine.destroy()
    return [sent, blocks, scales]


def all_traffic(wanted: list[tuple[str, int, int, dict[str, Any]]]) -> list[Any]:
    return [traffic(*arguments) for arguments in wanted]


def test_bytes_of_compressed_steps_are_those_of_the_closed_form() -> None:
    world = 3
    wanted: list[tuple[str, int, int, dict[str, Any]]] = [("AdamW", 0, 2, {})]
    wanted += [(name, stage, 5, QUICK[name]) for name in ("OnebitAdam", "OnebitLamb") for stage in (0, 1)]
    wanted.append(("ZeroOneAdam", 0, 5, QUICK["ZeroOneAdam"]))
    for found in run_ranks(all_traffic, world, wanted):
        dense = found[0][0][-1]
        for (name, stage, _, _), (steps, blocks, scales) in zip(wanted[1:], found[1:], strict=True):
            expected = 0
            for (numel, tensors), count in zip(blocks, scales, strict=True):
                assert count == 1 if name == "OnebitLamb" else count <= tensors
                expected += 2 * (world - 1) * message_bytes(numel // world, count)
            norm = 8 * (1 + 7) * (world - 1)  # the sum of squares, and facts about the window
            parameters = sum(numel for numel, _ in blocks) * 4 * (world - 1) // world if stage else 0
            ratios = (world - 1) * 4 * sum(tensors for _, tensors in blocks) if name == "OnebitLamb" and stage else 0
            assert sum(steps[-1].values()) == expected + norm + parameters + ratios, (name, stage)
            if stage == 0:
                exact = sum(dense.values()) - dense["all_reduce"]
                assert expected == pytest.approx(exact / 32, rel=0.02)


TRAINING: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "OnebitAdam": {"freeze_step": 6},
    "OnebitLamb": {"freeze_step": 6},
    "ZeroOneAdam": {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 8, "local_step_clipper": 4},
}
"""40 steps, of which 15 % are warm-up, as in the papers of 1-bit Adam and 1-bit LAMB."""


def byte_table() -> tuple[list[str], list[float]]:
    """The table of docs/onebit.md, and how many times fewer bytes each training sends than AdamW's."""
    found = run_ranks(all_traffic, 2, [(name, 0, 40, options) for name, options in TRAINING.items()])[0]
    sent = [[sum(step.values()) for step in steps] for steps, _, _ in found]
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


# -- training ----------------------------------------------------------------------------------------------------------


def learn(name: str, options: dict[str, Any], steps: int, lr: float) -> float:
    """Learn a function from noisy samples that no two ranks or steps share; what is left of the error in the end.

    Of the error against the samples 0.01 is noise.
    """
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    makers = {"AdamW": torch.optim.AdamW, "Lamb": Lamb, **CLASSES}
    optimizer = makers[name](model.parameters(), lr=lr, **options)
    engine, *_ = shardwise.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - 0.95 * step / steps),
        config={"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 0}},
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator)
        y = teacher(x).detach() + 0.1 * torch.randn(16, 4, generator=generator)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return sum(losses[-30:]) / 30


LEARNING: dict[str, tuple[float, dict[str, Any]]] = {
    "AdamW": (1e-2, {}),
    "OnebitAdam": (1e-2, {"freeze_step": 60}),
    "ZeroOneAdam": (
        1e-2,
        {"var_freeze_step": 100, "var_update_scaler": 8, "local_step_scaler": 50, "local_step_clipper": 4},
    ),
    "Lamb": (2e-2, {}),
    "OnebitLamb": (2e-2, {"freeze_step": 60}),
}


def learn_all() -> dict[str, float]:
    common = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    return {name: learn(name, {**common, **options}, 300, lr) for name, (lr, options) in LEARNING.items()}


@pytest.mark.thorough
def test_they_learn_as_well_as_adam_and_lamb() -> None:
    first, second = run_ranks(learn_all, 2)
    found = {name: (first[name] + second[name]) / 2 for name in LEARNING}
    assert found["AdamW"] < 0.013 and found["Lamb"] < 0.013, found
    for name, reference in (("OnebitAdam", "AdamW"), ("ZeroOneAdam", "AdamW"), ("OnebitLamb", "Lamb")):
        assert found[name] <= 1.05 * found[reference], found


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(config: dict[str, Any], given: str) -> str:
    model = nn.Linear(3, 2)
    optimizer = CLASSES[given](model.parameters()) if given else None
    try:
        shardwise.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2, **config})
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_combinations_that_cannot_work_are_refused_with_the_reason() -> None:
    whole = "compresses a momentum with its own unsharded gradient"
    averages = "between averages ranks have parameters of their own"
    for name, stage, reason in (("OnebitAdam", 2, whole), ("OnebitLamb", 3, whole), ("ZeroOneAdam", 1, averages)):
        zero = {"zero_optimization": {"stage": stage}}
        for message in run_ranks(refused, 2, zero, name) + run_ranks(
            refused, 2, {**zero, "optimizer": {"type": name.upper(), "params": {"lr": 0.1}}}, ""
        ):
            assert message.startswith(ConflictError.__name__)
            assert "zero_optimization.stage" in message and name.lower() in message.lower() and reason in message
    compressed = {"compression": {"type": "powersgd"}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}
    assert "compression.type" in refused(compressed, "") and "optimizer.type" in refused(compressed, "")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("OnebitAdam", {"freeze_step": 0}, r"freeze_step.*integer >= 1.*0"),
        ("OnebitAdam", {"amsgrad": True}, r"amsgrad.*frozen"),
        ("OnebitAdam", {"betas": (0.9, 1.0)}, r"betas.*\[0, 1\)"),
        ("OnebitAdam", {"comm_backend_name": "ucc"}, r"comm_backend_name.*\"nccl\", \"mpi\""),
        ("OnebitLamb", {"min_coeff": 20.0}, r"min_coeff.*max_coeff"),
        ("OnebitLamb", {"factor_min": 5.0}, r"factor_min.*factor_max"),
        ("ZeroOneAdam", {"local_step_clipper": 0}, r"local_step_clipper.*integer >= 1"),
        ("ZeroOneAdam", {"eps_inside_sqrt": True}, r"eps_inside_sqrt.*root"),
        ("ZeroOneAdam", {"freeze_step": 3}, "did you mean `.*var_freeze_step`"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=message):
        build(name, [weight], options, device="cpu")
    source = {"train_batch_size": 2, "optimizer": {"type": name, "params": options}}
    with pytest.raises(ConfigError) as caught:
        shardwise.initialize(model=nn.Linear(2, 2), config=source)
    assert next(iter(options)) in str(caught.value)


def test_by_configuration_alone() -> None:
    params = {"lr": 0.1, "freeze_step": 1, "cuda_aware": True, "comm_backend_name": "mpi"}
    section = {"type": "oneBitAdam", "params": params}
    engine, optimizer, *_ = shardwise.initialize(
        model=nn.Linear(4, 2), config={"train_batch_size": 2, "optimizer": section}
    )
    assert type(optimizer) is OnebitAdam and optimizer.freeze_step == 1
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    with pytest.raises(UsageError, match=r"engine\.step"):
        optimizer.step()
    engine.destroy()
    assert not optimizer.attached and optimizer.param_groups[0]["step"] == 0
    notes = {note.path for note in resolve({"train_batch_size": 2, "optimizer": section}).no_effect}
    assert notes == {"optimizer.params.cuda_aware", "optimizer.params.comm_backend_name"}


@pytest.mark.thorough
@on_ranks(2)
def test_settings_are_planned_beside_a_running_engine() -> None:
    run = Run()
    engine = run.start(maker("OnebitAdam", **QUICK["OnebitAdam"]))
    for step in range(5):
        run.step(engine, step)
    momenta = [state["exp_avg"].norm() for state in engine.optimizer.state.values()]
    assert 0 < engine.optimizer.compression_error_norm() < 10 * float(torch.stack(momenta).norm())
    before = everything(engine)
    plans = engine.memory_plans(CASES[run.case].data(0, 0, 0, torch.float32)["tokens"], stages=[0, 1, 2]).plans
    same = before == everything(engine)
    run.step(engine, 5)
    own = engine.memory_report().total.planned
    engine.destroy()
    totals = [plan.total for plan in plans]
    note = plans[-1].note
    assert same and totals[0] and totals[1] < totals[0] and own
    assert totals[2] is None and "needs stage 0 or 1" in note
