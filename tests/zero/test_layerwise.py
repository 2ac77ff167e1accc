"""Optimizers that need more than single elements: norms of tensors (LAMB), whole matrices beside shards (Muon).

They are compared with the algorithms written out on whole tensors, in fp32 and in fp64, and with themselves at other
stages, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.memory import Category
from shardwise.optim import Lamb, Muon
from shardwise.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from shardwise.zero.updates.owner_sharded import owners
from tests.harness import run_ranks, thorough
from tests.harness.training import (
    DTYPES,
    Outcome,
    Setting,
    Tensors,
    assert_identical,
    assert_no_worse,
    masters,
    parameters_digest,
    plain,
    train,
)
from tests.models import CASES, Case, regression, squared
from tests.optim.reference import Written, WrittenLamb, WrittenMuon
from tests.optim.test_lamb import LARS, Lars

LAMB = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05, "max_coeff": 2.0, "min_coeff": 0.02}
MUON = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.05, "betas": (0.8, 0.9), "eps": 1e-6}


def by_dimensions(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups of Muon and of Adam, in one order."""
    entries = list(groups)
    found = []
    for group in entries if isinstance(entries[0], dict) else [{"params": entries}]:
        for flag in (True, False):
            members = [p for p in group["params"] if (p.dim() > 1) == flag]
            if members:
                found.append({**group, "params": members, "use_muon": flag})
    return found


MAKERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "lamb": lambda groups: Lamb(list(groups), **LAMB),
    "lars": lambda groups: Lars(list(groups), LARS),
    "muon": lambda groups: Muon(list(groups), **MUON),
}
WRITTEN: dict[str, Callable[[Iterable[Any]], Written]] = {
    "lamb": lambda groups: WrittenLamb(groups, **LAMB),
    "muon": lambda groups: WrittenMuon(by_dimensions(groups), nesterov=True, ns_steps=5, **MUON),
}


def train_every(name: str, kind: str, settings: list[Setting]) -> list[Outcome]:
    return [train(CASES[name], setting, 3, MAKERS[kind]) for setting in settings]


PLACES = (Setting(stage=0, cap=40), Setting(stage=1), Setting(stage=2, cap=40), Setting(stage=3, cap=40),
          Setting(stage=3, prefetch=False))  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "world", "changes"),
    [
        thorough("lamb", "odd_mlp", 1, {}),
        ("lamb", "gpt", 2, {"clip": 0.5}),
        thorough("lamb", "gpt_groups", 3, {}),
        thorough("lamb", "frozen_half", 2, {"accumulation": 2}),
        thorough("lamb", "gpt", 2, {"precision": "bf16"}),
        thorough("muon", "gpt", 2, {"clip": 0.5}),
        thorough("muon", "gpt_groups", 3, {}),
        thorough("muon", "frozen_half", 2, {"accumulation": 2}),
        thorough("muon", "gpt", 2, {"precision": "bf16"}),
        ("muon", "odd_mlp", 4, {}),
    ],
    ids=str,
)
def test_every_stage_equals_the_written_out_loop(kind: str, name: str, world: int, changes: dict[str, Any]) -> None:
    settings = [setting.with_stage(setting.stage, **changes) for setting in PLACES]
    per_rank = run_ranks(train_every, world, name, kind, settings)
    for other in per_rank[1:]:
        assert [outcome.parameters for outcome in other] == [outcome.parameters for outcome in per_rank[0]]
    found = per_rank[0]
    # With accumulation gradients of the two pairs of stages are rounded differently.
    pairs = ((0, 1), (2, 3), (2, 4)) if settings[0].accumulation > 1 else ((0, 1), (0, 2), (0, 3), (0, 4))
    for first, second in pairs:
        assert_identical(found[first], found[second], f"{settings[first]} {settings[second]}")
    loop = plain(CASES[name], settings[0], world, optimizer=WRITTEN[kind])
    if settings[0].precision == "fp32":
        exact = plain(CASES[name], settings[0], world, wide=True, optimizer=WRITTEN[kind])
        for outcome in (found[0], found[3]):
            # The iteration amplifies rounding of small singular values some hundred times, in every order of sums.
            assert_no_worse(outcome.masters, loop.masters, exact.masters, name, slack=5e-5 if kind == "muon" else 3e-7)
    else:
        for key, value in found[0].masters.items():
            gap = float((value - loop.masters[key]).norm() / (loop.masters[key].norm() + 1e-6))
            assert gap < 0.02, (key, gap)


def train_several_at_once() -> list[Outcome]:
    with mock.patch("shardwise.optim.muon.together", lambda shape, device: 3):  # as a device does
        return train_every("gpt_groups", "muon", list(PLACES))


def test_every_stage_is_the_same_where_matrices_are_orthogonalised_together() -> None:
    found = run_ranks(train_several_at_once, 2)[0]
    for outcome in found[1:]:
        assert_identical(found[0], outcome)


def test_a_class_of_ones_own_on_the_base() -> None:
    found = run_ranks(train_every, 2, "gpt_groups", "lars", list(PLACES))[0]
    for outcome in found[1:]:
        assert_identical(found[0], outcome)


def gone_on(kind: str, stages: list[int | None]) -> list[Tensors]:
    """Two plain steps on the same data on every rank, and two under an engine (None: plain ones) with the instance."""
    found = []
    for stage in stages:
        case = CASES["gpt"]
        model = case.make()
        optimizer = MAKERS[kind](case.groups(model))
        batches = [case.data(number, 0, 0, torch.float32) for number in range(4)]
        for batch in batches[:2] if stage is not None else batches:
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            optimizer.step()
        if stage is None:
            found.append({name: p.detach() for name, p in model.named_parameters()})
            continue
        engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=Setting(stage=stage).config())
        for batch in batches[2:]:
            engine.backward(case.loss(engine, batch))
            engine.step()
        found.append(masters(model))
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", [thorough("lamb"), "muon"])
def test_an_instance_goes_on_with_its_state(kind: str) -> None:
    expected, *found = run_ranks(gone_on, 2, kind, [None, 0, 1, 3])[0]
    for tensors in found:
        for name, value in tensors.items():
            assert torch.equal(value, found[0][name]), name
            gap = (value - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
            assert gap < (1e-3 if kind == "muon" else 1e-5), (name, gap)


# -- LAMB --------------------------------------------------------------------------------------------------------------


def coefficients(stage: int) -> tuple[list[float], list[tuple[str, int]]]:
    case = CASES["gpt"]
    engine, *_ = shardwise.initialize(
        model=case.make(),
        config={**Setting(stage=stage).config(), "optimizer": {"type": "LAMB", "params": {"lr": 0.01}}},
    )
    engine.backward(case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32)))
    first = engine.ledger.sequence
    engine.step()
    sent = [(r.op, r.size) for r in engine.ledger.records(since=first) if r.label == "tensor_norms"]
    ratios = engine.optimizer.get_lamb_coeffs()
    engine.destroy()
    return ratios, sent


def test_ratios_of_all_tensors_are_known_on_every_rank_from_one_small_exchange() -> None:
    case = CASES["gpt"]
    model = case.make()
    lamb = Lamb(model.parameters(), lr=0.01)
    for rank in range(2):
        (case.loss(model, case.data(0, 0, rank, torch.float32)) / 2).backward()
    lamb.step()
    for stage in (0, 1, 3):
        for ratios, sent in run_ranks(coefficients, 2, stage):
            assert ratios == pytest.approx(lamb.get_lamb_coeffs(), rel=1e-4)
            assert sent == [("all_reduce", 2 * len(ratios) * 8)]


def peaks(kind: str, stage: int, precision: str) -> dict[str, tuple[int, int]]:
    """Bytes that were planned and measured, by category and in all, in the second step."""
    from shardwise.memory import track_activations

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 400), nn.Linear(400, 160), nn.Linear(160, 160))
    config = Setting(stage=stage, precision=precision).config()
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
    engine, *_ = shardwise.initialize(model=model, config=config)
    for _ in range(2):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(torch.ones(2, 160, dtype=DTYPES[precision])).float().square().mean())
            engine.step()
    report = engine.memory_report(torch.ones(2, 160, dtype=DTYPES[precision]))
    rows = {c.value: report.row(c) for c in (Category.MASTER, Category.OPTIMIZER, Category.GRADIENTS)}
    engine.destroy()
    return {name: (row.planned or 0, row.measured or 0) for name, row in {**rows, "total": report.total}.items()}


@pytest.mark.parametrize("kind", [thorough("lamb"), thorough("muon"), "Adafactor"])
def test_memory_is_as_planned(kind: str) -> None:
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "fp32")):
        for rank, found in enumerate(run_ranks(peaks, 2, kind, stage, precision)):
            for name, (planned, measured) in found.items():
                assert abs(planned - measured) <= 0.1 * measured + 4096, (kind, stage, precision, rank, name, found)


def lamb_needs_no_more_than_adam(stage: int) -> dict[str, int]:
    return {kind: peaks(kind, stage, "fp32")["total"][1] for kind in ("AdamW", "lamb")}


def test_lamb_needs_no_more_memory_than_adam() -> None:
    for found in run_ranks(lamb_needs_no_more_than_adam, 2, 2):
        assert found["lamb"] <= found["AdamW"] + (1 << 16)


# -- whole tensors -----------------------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(0, 1000), max_size=40), world=st.integers(1, 9))
def test_owners_are_balanced(costs: list[int], world: int) -> None:
    found = owners(costs, world)
    load = [sum(cost for cost, rank in zip(costs, found, strict=True) if rank == r) for r in range(world)]
    assert len(found) == len(costs) and all(0 <= rank < world for rank in found)
    assert max(load) <= sum(costs) / world + max(costs, default=0)


class Undeclared(torch.optim.AdamW):
    """Says nothing: whole tensors."""


def holdings(kind: str, stage: int) -> tuple[int, int, int, int, int]:
    """Elements of masters and bytes of state on this rank, trained elements, the largest tensor, and what Muon has."""
    case = CASES["gpt_groups"]
    model = case.make()
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "Adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        "undeclared": lambda: Undeclared(model.parameters(), lr=1e-2),
        "muon": lambda: Muon(model.named_parameters(), lr=1e-2),
    }
    engine, optimizer, *_ = shardwise.initialize(
        model=model, optimizer=makers[kind](), config=Setting(stage=stage).config()
    )
    engine.backward(case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32)))
    engine.step()
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    state = engine.accountant.live[Category.OPTIMIZER]
    matrices = [p for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]]
    result = (
        held,
        state,
        sum(p.numel() for p in model.parameters()),
        max(p.numel() for p in model.parameters()),
        len(matrices),
    )
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("world", "kind"), [thorough(2, "Adafactor"), (2, "muon"), thorough(3, "muon"), (3, "undeclared")]
)
def test_no_rank_holds_all(kind: str, world: int) -> None:
    for stage in (1, 3):
        found = run_ranks(holdings, world, kind, stage)
        total, largest = found[0][2:4]
        padding = 16 * 64 * world if kind == "muon" else 0
        assert sum(held for held, *_ in found) <= total + padding
        for held, state, _, _, matrices in found:
            assert held <= total / world + largest + padding
            assert state <= 1.6 * sum(s for _, s, *_ in found) / world
            assert kind != "muon" or 0 < matrices < 13


# -- configuration -----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 12)
        self.hidden = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.wide = nn.Linear(12, 30)
        self.lm_head = nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.lm_head(torch.tanh(self.wide(x)))


WORDS = Case("words", Words, regression(7, 3), lambda model, batch: squared(model(batch["x"]), batch["y"]))


def step(engine: Any, number: int) -> None:
    engine.backward(WORDS.loss(engine, WORDS.data(number, 0, dist.get_rank(), torch.float32)))
    engine.step()


def by_name(kind: str, params: dict[str, Any], stage: int) -> tuple[Tensors, list[Any], Tensors]:
    config = {**Setting(stage=stage, cap=200).config(), "optimizer": {"type": kind, "params": params}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    model = Words()
    WORDS_STATE = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=WORDS_STATE) / 3)
    engine, optimizer, *_ = shardwise.initialize(model=model, config=config)
    for number in range(2):
        step(engine, number)
    states = {}
    for name, p in model.named_parameters():
        for key in ("momentum_buffer", "exp_avg"):
            value = safe_get_full_optimizer_state(p, key)
            if value is not None:
                states[f"{name} {key}"] = value
                safe_set_full_optimizer_state(p, torch.full_like(value, 0.25), key)
                again = safe_get_full_optimizer_state(p, key)
                assert again is not None and bool((again == 0.25).all())
    groups = [(type(optimizer).__name__, group["use_muon"], group["lr"]) for group in optimizer.param_groups]
    result = masters(model), groups, states
    engine.destroy()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 8]
    return result


def test_muon_by_name_on_ranks() -> None:
    found = [run_ranks(by_name, 2, kind, {"muon_lr": 0.01}, stage)[0] for kind, stage in (("muon", 0), ("Muon", 3))]
    for masters_, groups, states in found:
        assert groups == [("Muon", True, 0.01), ("Muon", False, 3e-4)]
        assert all(torch.equal(value, found[0][0][name]) for name, value in masters_.items())
        kinds = {name: name.split()[1] for name in states}
        matrices = [f"hidden.{n}.weight momentum_buffer" for n in range(3)] + ["wide.weight momentum_buffer"]
        assert sorted(name for name, kind in kinds.items() if kind == "momentum_buffer") == sorted(matrices)
        assert len(kinds) == 12 and "embed.weight exp_avg" in kinds and "lm_head.weight exp_avg" in kinds
        assert all(torch.equal(value, found[0][2][name]) for name, value in states.items())


def resumed(directory: str, kind: str, write: int | None, read: int | None) -> list[str]:
    """Save after two steps, or load and take the third."""
    config = {**Setting(stage=write if read is None else read, cap=200).config(), "train_batch_size": 12}
    del config["train_micro_batch_size_per_gpu"]
    config["optimizer"] = {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.1}}
    torch.manual_seed(11)
    engine, *_ = shardwise.initialize(model=Words(), config=config)
    seen = []
    if read is None:
        for number in range(2):
            step(engine, number)
        engine.save_checkpoint(directory, tag="two")
    else:
        engine.load_checkpoint(directory, tag="two")
        seen.append(parameters_digest(engine.module))
    seen.append(parameters_digest(engine.module))
    # The same gradient whatever the number of ranks.
    engine.backward(WORDS.loss(engine, WORDS.data(5, 0, 0, torch.float32)))
    engine.step()
    seen.append(parameters_digest(engine.module))
    states = [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]
    seen.append(str([None if value is None else float(value.double().sum()) for value in states]))
    engine.destroy()
    return seen[-3:]


@pytest.mark.parametrize("kind", [thorough("lamb"), thorough("muon"), "Adafactor"])
def test_resuming_at_another_stage_and_number_of_ranks(tmp_path: Path, kind: str) -> None:
    straight = run_ranks(resumed, 2, str(tmp_path), kind, 1, None)[0]
    for world, stage in ((2, 1), (2, 3), (2, 0)):
        assert run_ranks(resumed, world, str(tmp_path), kind, None, stage)[0] == straight, (world, stage)
    for world, stage in ((3, 2), (1, 3)):
        again = run_ranks(resumed, world, str(tmp_path), kind, None, stage)[0]
        assert again[0] == straight[0], (world, stage)


def test_what_a_configuration_may_not_say() -> None:
    def refusal(kind: str, **params: Any) -> str:
        config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": params}}
        with pytest.raises(ConfigError) as error:
            shardwise.initialize(model=Words(), config=config)
        return str(error.value)

    assert 'did you mean "lamb"' in refusal("lambb")
    assert "gradient_clipping" in refusal("Lamb", max_grad_norm=1.0)
    assert "no such variant" in refusal("lamb", amsgrad=True)
    assert "did you mean `optimizer.params.max_coeff`" in refusal("lamb", max_coef=1.0)
    assert 'expected one of "gram", "standard"' in refusal("Muon", ns_method="polar")
    assert "unsplit" in refusal("muon", per_head_muon=True)
    assert "adam_lr: expected a number >= 0" in refusal("muon", adam_lr=-1)


class WithoutMethod(torch.optim.SGD):
    shardwise_sharding = "mixed"


class WithWrongMethod(torch.optim.SGD):
    shardwise_sharding = "mixed"

    def shardwise_group_sharding(self, group: dict[str, Any]) -> str:
        return "half"


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (WithoutMethod, "no method shardwise_group_sharding"),
        (WithWrongMethod, "expected 'elementwise', 'norms' or 'whole', found 'half'"),
    ],
)
def test_wrong_declarations(cls: type[torch.optim.SGD], message: str) -> None:
    model = Words()
    with pytest.raises(ConfigError, match=message):
        shardwise.initialize(model=model, optimizer=cls(model.parameters(), lr=0.1), config={"train_batch_size": 2})
