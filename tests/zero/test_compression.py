"""Gradient compression in engines: the same bits at every stage, the bytes of the closed forms, resuming, overflows."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.compression.powersgd import elements, split
from shardwise.errors import UsageError
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import (
    DTYPES,
    Setting,
    assert_close,
    assert_identical,
    engine_of,
    masters,
    plain,
    resumes,
    start,
    take_steps,
    trained,
)
from tests.models import CASES

METHODS: dict[str, dict[str, Any]] = {
    "powerSGD": {"matrix_approximation_rank": 2, "start_compressing_after_step": 0, "min_compression_rate": 1.5},
    "topk": {"ratio": 0.1},
    "dgc": {"ratio": 0.1, "momentum": 0.5, "warmup_steps": 2, "local_clipping": 0.5},
}

CODED = {"use_error_feedback": True, "block_size": 32}


def compressed(method: str, **changes: Any) -> tuple[tuple[str, Any], ...]:
    params = {key: value for key, value in {**METHODS.get(method, CODED), **changes}.items() if value is not None}
    return (("compression", {"type": method, "params": params}),)


# -- the same at every stage -------------------------------------------------------------------------------------------


HALF: dict[str, Any] = {"precision": "bf16", "optimizer": "Adagrad", "cap": 100}
TWICE: dict[str, Any] = {"accumulation": 2, "clip": 0.5}


@pytest.mark.parametrize(
    ("method", "name", "stages", "how"),
    [
        ("dgc", "odd_mlp", (0, 3), HALF),
        ("dgc", "odd_mlp", (2, 3), TWICE),
        ("int8", "gpt", range(4), {"optimizer": "AdamW", "lr": 1e-2}),
        *(
            thorough(method, *case)
            for method in METHODS
            for case in (
                ("gpt_groups", range(4), {}),
                ("odd_mlp", (0, 2, 3), HALF),
                ("odd_mlp", (0, 1), TWICE),  # with accumulation sums are formed in another order
                ("odd_mlp", (2, 3), TWICE),
            )
        ),
    ],
)
def test_stages_give_the_same_bits(method: str, name: str, stages: Sequence[int], how: dict[str, Any]) -> None:
    settings = [Setting(stage=stage, extra=compressed(method), **how) for stage in stages]
    first, *others = trained(name, settings, 3, 3)
    for other in others:
        assert_identical(first, other, method)


@pytest.mark.parametrize("method", [thorough("powerSGD"), "topk", thorough("dgc")])
def test_where_gradients_are_divided_does_not_matter(method: str) -> None:
    """Powers of two: the same bits, whether sums are divided before, after or by the learning rate."""
    ways: list[dict[str, Any]] = [{}, {"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}]
    settings = [Setting(stage=1, extra=(*compressed(method), *way.items())) for way in ways]
    if method != "dgc":
        settings.append(Setting(stage=1, lr=0.05, extra=(*compressed(method), ("gradient_allreduce_op", "sum"))))
    assert len({outcome.parameters for outcome in trained("odd_mlp", settings, 2, 3)}) == 1


def test_before_the_first_compressed_step_nothing_is_different() -> None:
    late = [compressed(method, start_compressing_after_step=1) for method in ("topk", "powerSGD")]
    settings = [Setting(stage=2, precision="bf16", extra=extra) for extra in ((), *late)]
    exact, *lossy = trained("gpt", settings, 2, 2)
    for other in lossy:
        assert other.losses == exact.losses and other.parameters != exact.parameters


PLAIN_DGC = {"ratio": 1.0, "local_clipping": 0.0, "warmup_steps": 0, "momentum_factor_masking": False}


@pytest.mark.parametrize(
    ("method", "params", "optimizer"),
    [
        ("powerSGD", {"matrix_approximation_rank": 31, "min_compression_rate": 0.1}, "SGD"),
        ("topk", {"ratio": 1.0}, "SGD"),
        ("dgc", {**PLAIN_DGC, "momentum": 0.9}, "heavy ball"),
    ],
)
def test_with_everything_sent_training_is_that_of_the_plain_loop(
    method: str, params: dict[str, Any], optimizer: str
) -> None:
    def momentum(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    setting = Setting(stage=2, extra=compressed(method, **params), cap=400)
    (outcome,) = trained("gpt", [setting], 3, 4)
    expected = plain(CASES["gpt"], Setting(), 3, 4, optimizer=None if optimizer == "SGD" else momentum)
    assert_close(outcome.masters, expected.masters, 1e-5, method)


# -- bytes -------------------------------------------------------------------------------------------------------------


def reduced(setting: Setting) -> tuple[Any, list[Any]]:
    """Return an engine after three steps, and records of the third backward pass without gathers of parameters."""
    case = CASES["gpt"]
    engine = start(case, setting)
    for number in range(3):
        engine.sharded.finish_gathers()
        first = engine.ledger.sequence
        engine.backward(case.loss(engine, case.data(number, 0, dist.get_rank(), DTYPES[setting.precision])))
        records = list(engine.ledger.records(since=first))
        engine.step()
    return engine, records


@pytest.mark.parametrize(("method", "stage"), [("powerSGD", 2), ("dgc", 0)])
@on_ranks(3)
def test_bytes_are_those_of_the_closed_form(method: str, stage: int) -> None:
    world, aligned = 3, lambda size: -(-size // 8) * 8
    exact = Setting(stage=stage, precision="bf16", cap=400)
    engine, records = reduced(exact.with_stage(stage, extra=compressed(method)))
    registry, units = engine.sharded.registry, [unit for unit in engine.sharded.units if unit.trainable]
    sections = [section for unit in units for section in unit.trainable]
    calls, sent = Counter((r.op, r.label) for r in records), sum(r.sent for r in records)
    if method == "powerSGD":
        shapes = [[(slot.offset, torch.Size(registry[slot.index].shape)) for slot in s.layout.slots] for s in sections]
        parts = [split(some, 2, 1.5) for some in shapes]
        sizes = [-(-elements(some) // world) * world for part in parts for some in (part.first, part.second)]
        # A sum that all ranks get: each sends (world - 1) / world of it twice.
        assert sent == 2 * sum(sizes) * 4 * (world - 1) // world
        most = {(op, unit.name): 2 for op in ("reduce_scatter", "all_gather") for unit in units}
        assert all(count <= most[call] for call, count in calls.items())
    else:
        # After the warm-up: positions and values, each part of a message begun at a multiple of eight bytes.
        counts = [math.ceil(0.1 * (section.layout.numel // world)) for section in sections]
        message = sum(2 * aligned(4 * count) for count in counts)
        assert sent == message * (world - 1) * world
        assert calls == Counter({("all_gather", unit.name): 1 for unit in units})
        assert sent < sum(record.sent for record in reduced(exact)[1])


# -- resuming ----------------------------------------------------------------------------------------------------------


CODES = {"type": "int4", "params": {"error_feedback": True, "stochastic_rounding": True}}


@pytest.mark.parametrize(
    "setting",
    [
        Setting(stage=3, extra=compressed("dgc")),
        Setting(stage=3, precision="fp16", extra=compressed("powerSGD", start_compressing_after_step=2)),
        Setting(stage=1, optimizer="AdamW", extra=(("compression", CODES),)),
        thorough(Setting(stage=0, extra=compressed("powerSGD"))),
        thorough(Setting(stage=2, extra=compressed("topk"))),
    ],
    ids=["dgc", "late powerSGD", "int4", "powerSGD", "topk"],
)
def test_resuming_is_as_never_having_stopped(tmp_path: Path, setting: Setting) -> None:
    run_ranks(resumes, 2, "gpt", setting, setting, str(tmp_path))


@on_ranks(2)
def test_powersgd_goes_on_with_other_options(tmp_path: Path) -> None:
    case = CASES["gpt"]
    for number, changes in enumerate([{}, {"matrix_approximation_rank": 4}, {"min_compression_rate": 3.0}]):
        engine = start(case, Setting(stage=1, extra=compressed("powerSGD", **changes)))
        if number:
            engine.load_checkpoint(str(tmp_path))
        take_steps(engine, case, range(2 * number, 2 * number + 2))
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()


def load_others(path: str, settings: list[Setting]) -> list[tuple[list[str], bool]]:
    """Load what another run has kept, also in part; without settings: keep something."""
    case, found = CASES["gpt"], []
    if not settings:
        engine = start(case, Setting(stage=1, extra=compressed("topk")))
        take_steps(engine, case, range(2))
        engine.save_checkpoint(path)
        engine.destroy()
    for setting in settings:
        with logged(logging.WARNING) as heard:
            engine = start(case, setting)
            compressor = engine.sharded.compressor
            for options in ({"load_optimizer_states": False}, {"load_module_only": True}) if compressor else ():
                take_steps(engine, case, range(1))
                engine.load_checkpoint(path, **options)
                assert not compressor.state_dict()["tensors"]
            engine.load_checkpoint(path)
            kept = compressor is not None and bool(compressor.state_dict()["tensors"])
            take_steps(engine, case, range(2, 4))
            engine.destroy()
        found.append(([text for text in heard.lines if "compression" in text], kept))
    return found


@on_ranks(2)
def test_momentum_that_would_be_applied_twice_is_warned_of() -> None:
    for optimizer, count in (("momentum", 1), ("SGD", 0)):
        with logged(logging.WARNING) as heard:
            start(CASES["gpt"], Setting(optimizer=optimizer, extra=compressed("dgc"))).destroy()
        warnings = sum("momentum 0.9) on top" in text for text in heard.lines)
        assert warnings == count


@on_ranks(2)
def test_a_wire_that_cannot_hold_what_is_kept() -> None:
    engine = start(CASES["gpt"], Setting(extra=compressed("topk")))
    engine.communication_data_type = "bf16"
    with pytest.raises(UsageError, match="fp16 cannot hold"):
        engine.communication_data_type = torch.float16


def test_what_was_kept_elsewhere_is_dropped_with_a_warning(tmp_path: Path) -> None:
    run_ranks(load_others, 2, str(tmp_path), [])
    settings = [
        Setting(stage=1, extra=compressed("dgc")),
        Setting(stage=1),
        Setting(stage=1, cap=300, extra=compressed("topk")),
        Setting(stage=2, extra=compressed("topk")),
    ]
    reasons = ['the method is "dgc"', "there is no compression", "laid out in other units", None]
    for (texts, kept), reason in zip(run_ranks(load_others, 2, str(tmp_path), settings)[0], reasons, strict=True):
        assert kept is (reason is None)
        assert len(texts) == (reason is not None)
        assert not texts or (reason in texts[0] and "is dropped" in texts[0])
    ((texts, kept),) = run_ranks(load_others, 3, str(tmp_path), settings[3:])[0]
    assert not kept and "2 ranks have kept it, and there are 3" in texts[0]
    ((texts, _),) = run_ranks(load_others, 1, str(tmp_path), settings[3:])[0]
    assert "there is one rank" in texts[0]


# -- fp16 --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_overflow_is_agreed_and_does_not_stay() -> None:
    """Rank 1's gradient overflows in the third step: (applied, everything kept is finite) of each step."""
    scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    setting = Setting(stage=2, precision="fp16", extra=(*compressed("dgc"), ("fp16", scale)), lr=0.01)
    case = CASES["gpt"]
    engine = start(case, setting)
    found = []
    for number in range(5):
        loss = case.loss(engine, case.data(number, 0, dist.get_rank(), torch.float16))
        if number == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        tensors = engine.sharded.compressor.state_dict()["tensors"].values()
        found.append((engine.was_step_applied(), all(bool(t.isfinite().all()) for t in tensors) and len(tensors) > 0))
    assert all(bool(value.isfinite().all()) for value in masters(engine.module).values())
    assert found == [(True, True), (True, True), (False, True), (True, True), (True, True)]


def test_what_is_kept_follows_the_loss_scale() -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 1}
    still = [Setting(precision="fp16", stage=2, extra=compressed(method)) for method in METHODS]
    doubling = [Setting(precision="fp16", stage=2, extra=(*s.extra, ("fp16", fp16))) for s in still]
    outcomes = trained("odd_mlp", still + doubling, 2, 6)
    for first, other in zip(outcomes[:3], outcomes[3:], strict=True):
        assert_close(other.masters, first.masters, 1e-3)


# -- branches chosen by data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "units"), [("router", 2), thorough("router", 3), thorough("two_towers", 3)])
def test_branches_of_the_ranks_own_do_not_hang(name: str, units: int) -> None:
    """Lossy reductions have collectives after the first, for which ranks wait where others may still gather."""
    settings = [
        Setting(stage=stage, extra=compressed("powerSGD", min_compression_rate=0.1), cap=cap)
        for stage, cap in ((2, None), (3, None), (3, 60))[:units]
    ]
    outcomes = trained(name, settings, 3, 2)
    assert_identical(outcomes[0], outcomes[1], name)


class Skips(nn.Module):
    """A frozen layer in front, which only some ranks use, and the only trained one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(x)) if used else x)


@on_ranks(2)
def test_a_rank_that_has_reduced_everything_may_still_gather() -> None:
    """The other waits for the second factors of the last unit, and has not launched the gather of the frozen layer."""
    torch.manual_seed(0)
    model = Skips()
    keys = {"reduce_bucket_size": 3000, "stage3_prefetch_bucket_size": 0}
    more = dict(compressed("powerSGD", min_compression_rate=1.0))
    engine = engine_of(model, 3, torch.optim.SGD(model.last.parameters(), lr=0.1), zero=keys, **more)
    for number in range(4):
        x = torch.randn(4, 64).requires_grad_(True)
        engine.backward(engine(x, dist.get_rank() == number % 2).square().mean())
        engine.step()
    assert engine.global_steps == 4
