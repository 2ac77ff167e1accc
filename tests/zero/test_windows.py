"""Accumulation windows: weights of micro-batches, windows that the script counts, and sums that lose no digits."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.engine.window import checked_weight
from shardwise.errors import UsageError
from shardwise.utils import safe_get_full_grad
from tests.engine.late import late_reads
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    Setting,
    Tensors,
    assert_close,
    config_of,
    engine_of,
    goes_on,
    gradients,
    make_optimizer,
    masters,
    start,
)
from tests.models import CASES, GPT

MICROS = 3
SCRIPT = {"gradient_accumulation_steps": 1, "managed_gradient_accumulation": False}


def model() -> nn.Module:
    torch.manual_seed(3)
    return GPT(layers=2, dim=12, vocabulary=31)


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    """Ragged: 0 to 9 tokens to predict; rank 1 has none in the second micro-batch."""
    count = 0 if (micro, rank) == (1, 1) else (7 * step + 5 * micro + 3 * rank) % 9 + 1
    return torch.randint(0, 31, (1, count + 1), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def token_losses(module: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = module(ids[:, :-1] if ids.shape[1] > 1 else ids)
    logits = logits[:, : ids.shape[1] - 1]
    return F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="none")


def configured(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": 700, **more.pop("zero", {})}
    return config_of(stage, rows=1, zero=zero, **{"gradient_accumulation_steps": MICROS, **more})


def begin(config: dict[str, Any], module: nn.Module | None = None, lr: float = 0.5) -> Any:
    module = model() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return shardwise.initialize(model=module, optimizer=optimizer, config=config)[0]


def window(engine: Any, step: int, kind: str = "number") -> Tensors:
    """Take a step with token weights; return the gradients before it."""
    for micro in range(MICROS):
        ids = tokens(step, micro, dist.get_rank())
        weight: Any = torch.tensor(ids.numel() - 1) if kind == "tensor" else ids.numel() - 1
        # The mean over no tokens is NaN, and must not matter.
        engine.backward(token_losses(engine, ids).mean(), weight=weight)
        found = gradients(engine.module) if micro == MICROS - 1 else {}
        if micro == MICROS - 1 or engine.config.get("managed_gradient_accumulation", True):
            engine.step()
    return found


def weighted(settings: list[dict[str, Any]], kind: str) -> list[Any]:
    """Two steps with token weights under each configuration."""
    results = []
    for config in settings:
        engine, seen = begin(config), []
        for step in range(2):
            seen += [window(engine, step, kind), float(engine.last_step.weight)]
            assert engine.was_step_applied()
        state = engine.loss_scaler.reference_weight if engine.loss_scaler is not None else None
        results.append((seen, masters(engine.module), engine.get_global_grad_norm(), state))
        engine.destroy()
    return results


def one_process(world: int) -> tuple[list[Any], Tensors]:
    """All tokens of a step in one mean, in fp64."""
    module = model().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        every = [tokens(step, micro, rank) for micro in range(MICROS) for rank in range(world)]
        losses = torch.cat([token_losses(module, ids) for ids in every if ids.numel() > 1])
        losses.mean().backward()
        seen += [{n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}, float(losses.numel())]
        optimizer.step()
    return seen, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_weighted_micro_batches_are_one_mean_over_all_tokens(kind: str) -> None:
    world, settings = 3, [configured(stage) for stage in range(4)]
    if kind == "tensor":
        world, settings = 2, [configured(1, **SCRIPT), configured(3, **SCRIPT), configured(2, prescale_gradients=True)]
        settings.append(configured(2, zero={"compute_grad_norm": False}))
    exact, final = one_process(world)
    results = run_ranks(weighted, world, settings, kind)[0]
    for first, second in ((0, 1), (2, 3)) if kind == "number" else ():
        assert all(torch.equal(value, results[second][1][name]) for name, value in results[first][1].items())
    for config, (seen, found, norm, _) in zip(settings, results, strict=True):
        assert seen[1::2] == exact[1::2]
        for mine, theirs in zip(seen[::2], exact[::2], strict=True):
            assert_close(mine, theirs, 1e-6, str(config))
        assert_close(found, final, 1e-6, str(config))
        if norm is not None:
            expected = math.sqrt(sum(float(g.square().sum()) for g in exact[-2].values()))
            assert norm == pytest.approx(expected, rel=1e-6)


def test_fp16_counts_weights_in_a_power_of_two_that_ranks_share() -> None:
    settings = [configured(stage, fp16={"enabled": True, "loss_scale": 1024.0}) for stage in (0, 2, 3)]
    results = run_ranks(weighted, 2, settings, "number")
    exact, _ = one_process(2)
    first = [tokens(0, 0, rank).numel() - 1 for rank in range(2)]
    for one, other in zip(*results, strict=True):
        assert one[3] == other[3] == 2.0 ** round(math.log2(sum(first) / 2))
        assert one[0][1::2] == exact[1::2]
        assert_close(one[0][0], exact[0], 2.0**-7)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("weights", [([3, None], [None, 4]), ([3, 3], [None, None])], ids=["mixed", "by rank"])
@on_ranks(2)
def test_a_window_is_weighted_on_all_ranks_or_on_none(weights: tuple[list[float | None], ...], stage: int) -> None:
    module = nn.Linear(3, 1, bias=False)
    nn.init.ones_(module.weight)
    engine = begin(configured(stage, gradient_accumulation_steps=2), module, lr=1.0)

    def passes(first: float | None, second: float | None) -> None:
        engine.backward(engine(torch.ones(2, 3)).mean(), weight=first)
        engine.step()
        engine.backward(engine(torch.ones(2, 3)).mean(), weight=second)

    passes(*weights[dist.get_rank()])
    for ask in (lambda: safe_get_full_grad(module.weight), engine.step):
        with pytest.raises(UsageError, match="of the 4 backward passes of this window on all ranks, 2 had a weight"):
            ask()
    engine.zero_grad()
    passes(2.0, 2.0)
    engine.step()
    with shardwise.zero.GatheredParameters(module.weight):
        assert float(module.weight[0, 0]) == 0.0  # 1 - 1.0 * 1


@on_ranks(2)
def test_mixed_weights_of_the_last_step_are_an_error_of_destroy() -> None:
    engine = engine_of(nn.Linear(3, 1), 2, {"type": "SGD", "params": {"lr": 0.1}})
    for weight in (None, 2.0 if dist.get_rank() else None):
        engine.backward(engine(torch.ones(2, 3)).mean(), weight=weight)
        with late_reads():
            engine.step()
    with pytest.raises(
        UsageError, match="step 1: of the 2 backward passes of this window on all ranks, 1 had a weight"
    ):
        engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        engine.step()


@on_ranks(1)
def test_weights_that_cannot_be() -> None:
    for wrong in (-1, float("nan"), "4", True, torch.ones(2), torch.tensor(True), torch.tensor(-2.0)):
        with pytest.raises(UsageError, match="expected one finite number >= 0"):
            checked_weight(wrong)
    for config, arguments, key in (
        (configured(2), {"scale_wrt_gas": False}, "scale_wrt_gas"),
        (configured(2, gradient_allreduce_op="sum"), {}, "gradient_allreduce_op"),
    ):
        engine = begin(config, nn.Linear(3, 1))
        with pytest.raises(UsageError, match=key):
            engine.backward(engine(torch.ones(2, 3)).mean(), weight=2.0, **arguments)
        engine.destroy()


@on_ranks(2)
def test_without_any_weight_the_gradient_is_zero() -> None:
    module = nn.Linear(3, 1, bias=False)
    engine = begin(configured(1, gradient_accumulation_steps=1), module, lr=1.0)
    before = masters(module)["weight"]
    for weight in (0, torch.zeros(())):
        engine.backward(engine(torch.ones(2, 3)).mean() * float("nan"), weight=weight)
        engine.step()
    assert [torch.equal(before, masters(module)["weight"]), float(engine.last_step.weight)] == [True, 0.0]


# -- windows of the script ---------------------------------------------------------------------------------------------

COUNTS = (1, 3, 2)


def sent(engine: Any) -> int:
    return sum(record.sent for record in engine.ledger.records() if record.kind == "reduce")


def loop_of_windows(world: int) -> tuple[list[Tensors], Tensors]:
    case = CASES["gpt"]
    module = case.make()

    optimizer = make_optimizer("momentum", case.groups(module), 0.1)
    seen = []
    for step, count in enumerate(COUNTS):
        optimizer.zero_grad(set_to_none=False)
        for micro in range(count):
            for rank in range(world):
                (case.loss(module, case.data(step, micro, rank, torch.float32)) / count / world).backward()
        seen.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return seen, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "declared", "unsynchronised"),
    [
        (3, True, False),
        (1, True, True),
        thorough(0, False, False),
        *itertools.starmap(thorough, [(1, True, False), (2, False, False), (0, True, True)]),
    ],
)
@on_ranks(2)
def test_windows_of_the_script(stage: int, declared: bool, unsynchronised: bool) -> None:
    """Unmanaged windows of 1, 3 and 2 micro-batches equal a plain loop; stages 0 and 1 reduce once a window."""
    case = CASES["gpt"]
    extra = (("managed_gradient_accumulation", False),)
    engine = start(case, Setting(stage=stage, cap=300, optimizer="momentum", clip=0.5, extra=extra))
    expected, final = loop_of_windows(2)
    reductions = []
    for step, count in enumerate(COUNTS):
        before = sent(engine)
        for micro in range(count):
            loss = case.loss(engine, case.data(step, micro, dist.get_rank(), torch.float32)) / count
            if declared and micro == count - 1:
                engine.set_gradient_accumulation_boundary(True)
            with engine.no_sync() if unsynchronised and micro < count - 1 else contextlib.nullcontext():
                engine.backward(loss)
        assert_close(gradients(engine.module), expected[step], 2e-6)
        engine.step()
        reductions.append(sent(engine) - before)
    assert_close(masters(engine.module), final, 2e-6)
    assert (engine.global_samples, engine.global_steps) == (2 * 2 * sum(COUNTS), len(COUNTS))
    assert reductions[0] > 0
    assert reductions == [reductions[0] * (1 if stage < 2 else count) for count in COUNTS]


@pytest.mark.parametrize("stage", [thorough(0), 1])
@on_ranks(2)
def test_ranks_may_have_different_numbers_of_micro_batches_where_sums_are_local(stage: int) -> None:
    """Rank 0 has two micro-batches in the first window and one in the second, rank 1 the other way round."""
    engine, plain = begin(configured(stage, **SCRIPT)), model().double()
    plainly = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        batches = {rank: [tokens(step, m, rank) for m in range(1 + (rank + step) % 2)] for rank in range(2)}
        for ids in batches[dist.get_rank()]:
            engine.backward(token_losses(engine, ids).mean(), weight=ids.numel() - 1)
        with late_reads(step == 1):
            engine.step()
        if step == 0:
            assert engine.global_samples == engine.last_step.samples == 3
        plainly.zero_grad()
        every = [ids for some in batches.values() for ids in some if ids.numel() > 1]
        torch.cat([token_losses(plain, ids) for ids in every]).mean().backward()
        plainly.step()
    assert_close(masters(engine.module), {name: p.detach() for name, p in plain.named_parameters()}, 1e-6)
    engine.module_state_dict()
    assert engine.global_samples == 6


# -- sums that lose no digits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "accumulate"),
    [(3, "bf16"), *itertools.starmap(thorough, [(n, None) for n in range(4)]), thorough(0, "bf16")],
)
@on_ranks(2)
def test_small_gradients_are_not_lost_on_large_ones(stage: int, accumulate: str | None) -> None:
    """bf16: one gradient of 1 and 63 of 2 ** -9, whose exact sum is 1.123046875; sums in bf16 stay at 1."""
    module = nn.Linear(1, 1, bias=False)
    more = {} if accumulate is None else {"data_types": {"grad_accum_dtype": accumulate}}
    engine = begin(configured(stage, gradient_accumulation_steps=64, bf16={"enabled": True}, **more), module, lr=1.0)
    for micro in range(64):
        x = torch.full((1, 1), 1.0 if micro == 0 else 2.0**-9, dtype=torch.bfloat16)
        engine.backward(engine(x).sum() * 1.0)
        if micro < 63:
            engine.step()
    gradient = safe_get_full_grad(module.weight)
    assert gradient is not None
    assert float(gradient) * 64 == (1 + 63 * 2.0**-9 if accumulate is None else 1.0)
    engine.step()


# -- resuming ----------------------------------------------------------------------------------------------------------


SCALING = {"initial_scale_power": 8, "loss_scale_window": 1}


@pytest.mark.parametrize(
    "config",
    [
        thorough(configured(0, **SCRIPT)),
        thorough(configured(1, fp16={"enabled": True, **SCALING})),
        configured(2, torch_autocast={"enabled": True, "dtype": "fp16"}, fp16=SCALING, **SCRIPT),
        configured(3, torch_autocast={"enabled": True}),
    ],
)
@on_ranks(2)
def test_resuming_is_exact(tmp_path: Any, config: dict[str, Any]) -> None:
    """Two weighted windows, a checkpoint, two more; the same from the checkpoint on, in a new engine."""

    def begin(again: bool) -> Any:
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return shardwise.initialize(model=module, optimizer=optimizer, config=config)[0]

    def train(engine: Any, first: int, last: int) -> None:
        for step in range(first, last):
            window(engine, step)

    scaler = goes_on(begin, train, tmp_path, 2, 4).loss_scaler
    assert scaler is None or scaler.reference_weight is not None
