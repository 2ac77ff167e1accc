"""The engine's table: planned against measured, the floor, and the order of the stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import checkpointing
from shardwise.memory import Category, MemoryReport, track_activations
from shardwise.precision.norms import CHUNK
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, engine_of
from tests.models import Block

ENGINE = [c for c in Category if c not in (Category.ACTIVATIONS, Category.OTHER)]
VOCABULARY, LENGTH, ROWS = 257, 24, 4


class GPT(nn.Module):
    """Small decoder; the head is the embedding, or has a weight of its own."""

    def __init__(self, tied: bool = True, layers: int = 5, dim: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.places = nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, 4, 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def settings(stage: int, precision: str, optimizer: str, accumulation: int, keep: int | None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": keep},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}),
        **({"torch_autocast": {"enabled": True}} if precision == "autocast" else {}),
    }


def report(
    stage: int,
    precision: str,
    tied: bool = True,
    optimizer: str = "AdamW",
    accumulation: int = 1,
    keep: int | None = None,
    managed: bool = True,
    zero: dict[str, Any] | None = None,
    model: Callable[[], nn.Module] | None = None,
    more: dict[str, Any] | None = None,
    warm_up: int = 2,
    circumstances: Sequence[Callable[[], AbstractContextManager[Any]]] = (contextlib.nullcontext,),
) -> tuple[MemoryReport, MemoryReport]:
    """Reports made before the first step and after tracked ones, one in each of some circumstances."""
    torch.manual_seed(5)
    config = settings(stage, precision, optimizer, accumulation if managed else 1, keep)
    config["managed_gradient_accumulation"] = managed
    config["zero_optimization"].update(zero or {})
    config.update(more or {})
    engine, *_ = shardwise.initialize(model=model() if model is not None else GPT(tied), config=config)
    batch = torch.randint(VOCABULARY, (ROWS, LENGTH))
    before = engine.memory_report(batch)

    def step() -> None:
        for micro in range(accumulation):
            engine.backward(engine(batch))
            if managed or micro == accumulation - 1:
                engine.step()

    for _ in range(warm_up):
        step()
    engine.accountant.reset_peak()
    with track_activations(engine.accountant):
        for circumstance in circumstances:
            with circumstance():
                step()
    after = engine.memory_report()
    engine.destroy()
    return before, after


def close(planned: int | None, measured: int | None, least: int = 0) -> bool:
    assert planned is not None and measured is not None
    return abs(planned - measured) <= 0.03 * max(measured, least)


def check(before: MemoryReport, after: MemoryReport, what: str, besides: Sequence[Category] = ()) -> None:
    for category in (c for c in (*ENGINE, Category.ACTIVATIONS) if c not in besides):
        planned, row = before.row(category).planned, after.row(category)
        assert close(planned, row.measured), f"{what}: {category.value} planned {planned}, measured {row.measured}"
    for planned, row in zip(before.elsewhere, after.elsewhere, strict=True):
        assert planned.name == row.name and close(planned.planned, row.measured), f"{what}: {row.name}"
    if not besides:
        assert close(before.row(Category.OTHER).planned, after.row(Category.OTHER).measured, least=1 << 13)
        assert close(before.total.planned, after.total.measured), f"{what}: total"


@pytest.mark.parametrize(
    ("tied", "precision", "stages"), [(False, "bf16", (0, 3)), thorough(True, "fp32", (0, 1, 2, 3))]
)
def test_a_higher_stage_takes_less_and_all_are_within_a_tenth_of_the_floor(
    tied: bool, precision: str, stages: tuple[int, ...]
) -> None:
    totals = []
    for stage in stages:
        for rank, (before, after) in enumerate(run_ranks(report, 2, stage, precision, tied)):
            check(before, after, f"stage {stage}, rank {rank}")
            measured, floor = after.total.measured, before.total.floor
            assert measured is not None and floor is not None
            # Numbers that an untracked step before has left are planned, and not measured.
            assert -0.001 * measured <= measured - floor <= 0.1 * measured, f"stage {stage}, rank {rank}"
        totals.append(measured)
    assert totals == sorted(totals, reverse=True), f"a higher stage took more: {totals}"


class Borrowing(nn.Module):
    """Uses weights outside of the modules that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 96)
        self.blocks = nn.ModuleList(Block(96, 4, 0.0) for _ in range(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        first = next(self.blocks[0].parameters())
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), tokens.flatten()) + first.square().mean()


class Recomputing(GPT):
    """Blocks are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        for block in self.blocks:
            block.forward = partial(checkpointing.checkpoint, block.forward)


def messages() -> AbstractContextManager[Any]:
    return mock.patch.dict("os.environ", SHARDWISE_TRANSPORT="messages")


def reported(within: Callable[[], AbstractContextManager[Any]], keys: dict[str, Any]) -> Any:
    with within():
        return report(**keys)


@dataclass(frozen=True)
class Row:
    """A way of training, and what parts of the parameters and of the optimizer's state each rank should have."""

    stage: int
    precision: str = "bf16"
    world: int = 2
    keys: dict[str, Any] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    shares: tuple[float, float] | None = None
    besides: tuple[Category, ...] = ()
    tries: int = 1


def compressing(method: str, **params: Any) -> dict[str, Any]:
    """The keys of an engine that compresses gradients."""
    base = {"powerSGD": {"matrix_approximation_rank": 2, "min_compression_rate": 1.5}}.get(method, {"ratio": 0.1})
    section = {"type": method, "params": {"start_compressing_after_step": 0, **base, **params}}
    return {"optimizer": "SGD", "more": {"compression": section}}


def onebit(name: str, **params: Any) -> dict[str, Any]:
    """The keys of an engine whose optimizer compresses its momentum from its second step on."""
    return {"more": {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}, "warm_up": 8}


QW, HP, QG = {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}, {"zero_quantized_gradients": True}
NODES = {"zero_node_size": 2}
LOCO = {**QG, **NODES, "zeropp_loco_param": {"err_beta": 0.5}}
PAIRS: dict[str, Any] = {"mics_shard_size": 2}
SPREAD = {**PAIRS, "optimizer_over_replicas": True}

MOVED = {"activation_offload": {"enabled": True, "min_bytes": 64}}
KEPT = {"activation_checkpointing": {"selective": "matmuls"}}

# A message of an exchange of whole tensors is now and then held longer (about one run of twelve, for a reason that is
# not known yet): the best of three runs counts. A thread launches the later collectives of a chain, at a time that no
# plan knows: on a busy machine they overlap with one unit more.
CHAINS = (Category.BUFFERS, Category.GRADIENTS)
QUICK = {
    "accumulation": Row(3, "fp32", keys={"accumulation": 2}),
    "weights of others": Row(3, "fp32", keys={"keep": 0, "model": Borrowing}),
    "products kept": Row(3, keys={"model": Recomputing, "more": KEPT}),
}
THOROUGH = {
    "autocast": Row(3, "autocast"),
    "activations on the host": Row(3, keys={"accumulation": 2, "more": MOVED}),
    "inputs of checkpoints on the host": Row(1, keys={"model": Recomputing, "more": MOVED}),
    "LAMB": Row(2, keys={"optimizer": "Lamb"}),
    "counted by the script": Row(1, keys={"accumulation": 2, "managed": False}),
    "four ranks": Row(2, "fp16", 4, {"keep": 0, "accumulation": 2}),
    "one rank": Row(3, world=1),
    "three ranks": Row(3, world=3),
    "messages": Row(2, keys={"accumulation": 2}, within=messages),
    "whole tensors": Row(3, keys={"optimizer": "Adafactor"}, tries=3),
    "matrices": Row(3, "fp32", keys={"optimizer": "Muon"}, tries=3),
    "powerSGD": Row(2, keys=compressing("powerSGD")),
    "powerSGD later": Row(
        0,
        "fp32",
        keys={
            **compressing("powerSGD", start_compressing_after_step=2),
            "warm_up": 0,
            "circumstances": (contextlib.nullcontext,) * 4,
        },
    ),
    "topk": Row(2, keys=compressing("topk")),
    "dgc": Row(0, "fp32", keys=compressing("dgc", momentum=0.5, local_clipping=0.5)),
    "1-bit Adam": Row(0, keys={**onebit("OneBitAdam", freeze_step=3), "accumulation": 2}),
    "1-bit LAMB": Row(1, keys=onebit("OneBitLamb", freeze_step=3), besides=(Category.BUFFERS,)),
    "0/1 Adam": Row(
        0, "fp32", keys=onebit("ZeroOneAdam", var_freeze_step=4, local_step_scaler=3), besides=(Category.BUFFERS,)
    ),
    "qwZ": Row(3, world=4, keys={"keep": 0, "zero": QW}),
    "hpZ": Row(3, world=4, keys={"keep": 0, "zero": HP}, shares=(3 / 4, 1 / 4)),
    "qgZ": Row(3, world=4, keys={"keep": 0, "zero": {**QG, **NODES}}, besides=CHAINS),
    "ZeRO++": Row(3, "fp32", 4, {"keep": 0, "accumulation": 2, "zero": {**QW, **HP, **LOCO}}, shares=(3 / 4, 1 / 4)),
    "groups of ranks": Row(3, "fp32", 4, {"keep": 0, "zero": PAIRS}, shares=(1 / 2, 1 / 2), besides=CHAINS),
    "spread state": Row(2, world=4, keys={"accumulation": 3, "zero": SPREAD}, shares=(1, 1 / 4), besides=CHAINS),
}


@pytest.mark.parametrize("what", [*QUICK, *map(thorough, THOROUGH)])
def test_plans_are_the_measurements(what: str) -> None:
    row, numel = {**QUICK, **THOROUGH}[what], sum(p.numel() for p in GPT().parameters())
    keys = {"stage": row.stage, "precision": row.precision, **row.keys}
    for attempt in range(row.tries):
        try:
            for before, after in run_ranks(reported, row.world, row.within, keys, timeout=300):
                check(before, after, what, row.besides)
                measured = after.row(Category.PARAMETERS).measured, after.row(Category.OPTIMIZER).measured
                wide = 4 if row.precision == "fp32" else 2
                if row.shares is not None:
                    assert measured[0] == pytest.approx(row.shares[0] * numel * wide, rel=0.02)
                    assert measured[1] == pytest.approx(row.shares[1] * numel * 8, rel=0.02)
            return
        except AssertionError:
            if attempt == row.tries - 1:
                raise


@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [thorough("fp32", 3, (2, 2, 0, 4)), ("bf16", 2, (2, 2, 2, 4))],
)
def test_the_arithmetic_of_the_table(precision: str, stage: int, expected: tuple[int, ...]) -> None:
    """Bytes per parameter of the stages: fp32 Adam on 2 ranks, and bf16 with masters."""
    numel = sum(p.numel() for p in GPT().parameters())
    _, after = run_ranks(report, 2, stage, precision, keep=0)[0]
    kinds = (Category.PARAMETERS, Category.GRADIENTS, Category.MASTER, Category.OPTIMIZER)
    for category, factor in zip(kinds, expected, strict=True):
        row = after.row(category)
        for value in (row.planned, row.measured, row.floor):
            assert value is not None
            assert abs(value - factor * numel) <= 0.01 * numel, category


@pytest.mark.parametrize(("stage", "norm"), [(1, False), (3, True)])
@on_ranks(2)
def test_scratch_of_the_norm_is_planned(stage: int, norm: bool) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = engine_of(nn.Linear(1024, 512), stage, sgd, zero={"compute_grad_norm": norm})
    for _ in range(2):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(torch.ones(1, 1024)).sum())
            engine.step()
    row = engine.memory_report().row(Category.OTHER)
    engine.destroy()
    assert row.planned is not None and row.measured is not None
    assert abs(row.planned - row.measured) <= 16  # a number or two
    assert 0 <= row.planned - (8 * CHUNK if norm else 0) < 1 << 10


@on_ranks(2)
def test_an_engine_without_optimizer() -> None:
    engine = engine_of(nn.Linear(64, 64))
    engine(torch.ones(1, 64))
    found = engine.memory_report()
    engine.destroy()
    assert found.row(Category.OPTIMIZER).planned == found.row(Category.GRADIENTS).planned == 0
    assert found.row(Category.GATHERED).planned == found.row(Category.GATHERED).measured == 64 * 65 * 4


def test_rendering_and_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(nn.Linear(8, 8), 0, ADAMW)
    found = engine.memory_report(torch.ones(2, 8))
    text = found.render()
    for category in Category:
        assert category.value in text
    assert "Resident set size" in text and "No step has been taken" in text
    found.print()
    assert "total" in capsys.readouterr().out
    assert found.as_dict()["parameters"] == 72
    # Memory that others have freed may have gone back to the system meanwhile: neither bounds the other.
    assert found.resident is None or (found.process is not None and found.process > 0)
    assert found.construction >= 72 * 4
    engine.destroy()
