"""Ways of writing the training loop: all give what the plain loop gives, at every stage.

Each function runs one way of writing the loop on the ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import SyncError
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.training import (
    Setting,
    assert_close,
    masters,
    parameters_digest,
    plain,
    start,
)
from tests.models import CASES, Batch, Case

STEPS = 2
Loop = Callable[[Any, Case, Setting], None]


def data(case: Case, step: int, micro: int = 0) -> Batch:
    return case.data(step, micro, dist.get_rank(), torch.float32)


def micros(setting: Setting) -> Iterator[tuple[int, int]]:
    """The numbers of steps and of their micro-batches."""
    return itertools.product(range(STEPS), range(setting.accumulation))


def standard(engine: Any, case: Case, setting: Setting) -> None:
    for step, micro in micros(setting):
        engine.backward(case.loss(engine, data(case, step, micro)))
        engine.step()


def plain_backward(engine: Any, case: Case, setting: Setting) -> None:
    """`loss.backward()` instead of `engine.backward(loss)`."""
    for step, micro in micros(setting):
        case.loss(engine, data(case, step, micro)).backward()
        engine.step()


def declared_boundary(engine: Any, case: Case, setting: Setting) -> None:
    """The script says where the boundary is, before the forward pass; what it says holds until changed."""
    for step, micro in micros(setting):
        engine.set_gradient_accumulation_boundary(micro == setting.accumulation - 1)
        assert engine.is_gradient_accumulation_boundary() == (micro == setting.accumulation - 1)
        engine.backward(case.loss(engine, data(case, step, micro)))
        engine.step()
    assert engine.global_steps == STEPS


def late_boundary(engine: Any, case: Case, setting: Setting) -> None:
    """The boundary is declared after the last backward pass, once for all micro-batches before it."""
    for step, micro in micros(setting):
        if micro == 0:
            engine.set_gradient_accumulation_boundary(False)
        engine.backward(case.loss(engine, data(case, step, micro)))
        if micro == setting.accumulation - 1:
            engine.set_gradient_accumulation_boundary(True)
        engine.step()


def one_step_call(engine: Any, case: Case, setting: Setting) -> None:
    """Every micro-batch is a backward pass of one `step()`."""
    engine.set_gradient_accumulation_boundary(True)
    for step, micro in micros(setting):
        engine.backward(case.loss(engine, data(case, step, micro)))
        if micro == setting.accumulation - 1:
            engine.step()


def undivided(engine: Any, case: Case, setting: Setting) -> None:
    """The script divides the loss by the number of accumulation steps and says so."""
    for step, micro in micros(setting):
        engine.backward(case.loss(engine, data(case, step, micro)) / setting.accumulation, scale_wrt_gas=False)
        engine.step()


def forwards_first(engine: Any, case: Case, setting: Setting) -> None:
    """All forward passes before one backward pass over the mean of the losses."""
    engine.set_gradient_accumulation_boundary(True)
    for step in range(STEPS):
        losses = [case.loss(engine, data(case, step, micro)) for micro in range(setting.accumulation)]
        engine.backward(torch.stack(losses).sum())
        engine.step()


def forwards_then_backwards(engine: Any, case: Case, setting: Setting) -> None:
    """All forward passes, then their backward passes, last one first."""
    engine.set_gradient_accumulation_boundary(True)
    for step in range(STEPS):
        losses = [case.loss(engine, data(case, step, micro)) for micro in range(setting.accumulation)]
        for loss in reversed(losses):
            engine.backward(loss)
        engine.step()


def twice_half(engine: Any, case: Case, setting: Setting) -> None:
    """The same graph is differentiated twice, each time with half of the loss."""
    for step, micro in micros(setting):
        loss = case.loss(engine, data(case, step, micro)) * 0.5
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()


def with_evaluation(engine: Any, case: Case, setting: Setting) -> None:
    """Evaluation between micro-batches, and a graph that is never differentiated."""
    for step, micro in micros(setting):
        engine.eval()
        with torch.no_grad():
            case.loss(engine, data(case, step + 7, micro))
        engine.train()
        dropped = case.loss(engine, data(case, step + 8, micro))
        loss = case.loss(engine, data(case, step, micro))
        with torch.no_grad():
            case.loss(engine, data(case, step + 9, micro))
        engine.backward(loss)
        del dropped
        engine.step()


class Boom(Exception):
    pass


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Boom


def explode(*_: Any) -> None:
    raise Boom


@contextlib.contextmanager
def hooked(case: Case, engine: Any, hook: Any) -> Iterator[None]:
    """Have a hook on a module in the middle of the model that every batch uses."""
    name = {"gpt": "blocks.1.up", "lora": "layers.1", "router": "last"}[case.name]
    handle = engine.module.get_submodule(name).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def fail_in_forward(engine: Any, case: Case, setting: Setting, ranks: tuple[int, ...] = (0, 1)) -> None:
    """A module raises in the middle of a forward pass, on some ranks; all go on with the next batch."""
    for step, micro in micros(setting):
        if dist.get_rank() in ranks:
            with hooked(case, engine, explode), pytest.raises(Boom):
                case.loss(engine, data(case, step + 5, micro))
        else:
            case.loss(engine, data(case, step + 5, micro))
        engine.backward(case.loss(engine, data(case, step, micro)))
        engine.step()


def fail_in_backward(engine: Any, case: Case, setting: Setting, ranks: tuple[int, ...] = (0, 1)) -> None:
    """The backward pass at the end of a window raises half way, on some ranks; all drop the window and repeat it."""
    for step, micro in micros(setting):
        if micro == setting.accumulation - 1:
            if dist.get_rank() in ranks:
                with hooked(case, engine, lambda module, args, out: Bomb.apply(out)):
                    loss = case.loss(engine, data(case, step + 5, micro))
                with pytest.raises(Boom):
                    engine.backward(loss)
            else:
                engine.backward(case.loss(engine, data(case, step + 5, micro)))
            engine.zero_grad()
            for again in range(micro):
                engine.backward(case.loss(engine, data(case, step, again)))
        engine.backward(case.loss(engine, data(case, step, micro)))
        engine.step()


def fail_in_forward_on_one_rank(engine: Any, case: Case, setting: Setting) -> None:
    fail_in_forward(engine, case, setting, ranks=(0,))


def fail_in_backward_on_one_rank(engine: Any, case: Case, setting: Setting) -> None:
    fail_in_backward(engine, case, setting, ranks=(1,))


def dropped_window(engine: Any, case: Case, setting: Setting) -> None:
    """`zero_grad()` drops what has been accumulated."""
    for step, micro in micros(setting):
        if micro == 0:
            engine.backward(case.loss(engine, data(case, step + 5, micro)))
            engine.zero_grad()
        engine.backward(case.loss(engine, data(case, step, micro)))
        engine.step()


LOOPS: dict[str, Loop] = {
    f.__name__: f
    for f in (
        standard,
        plain_backward,
        declared_boundary,
        late_boundary,
        one_step_call,
        undivided,
        forwards_first,
        forwards_then_backwards,
        twice_half,
        with_evaluation,
        fail_in_forward,
        fail_in_forward_on_one_rank,
        fail_in_backward,
        fail_in_backward_on_one_rank,
        dropped_window,
    )
}


QUICK = ("forwards_then_backwards", "fail_in_backward_on_one_rank", "dropped_window")


@pytest.mark.parametrize("loop", [loop if loop in QUICK else thorough(loop) for loop in LOOPS])
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("router", ((1, 300), (2, 300), (3, 50))),
        thorough("router", ((0, 300), (3, 300))),
        *(thorough(name, ((0, 300), (1, 300), (2, 300), (3, 300), (3, 50))) for name in ("gpt", "lora")),
    ],
    ids=str,
)
@on_ranks(2)
def test_every_way_of_writing_the_loop_gives_the_same(name: str, ways: tuple[tuple[int, int], ...], loop: str) -> None:
    case, base = CASES[name], Setting(accumulation=2, cap=300)
    expected = plain(case, base, 2, STEPS).masters
    for stage, cap in ways:
        setting = base.with_stage(stage, cap=cap)
        engine = start(case, setting)
        LOOPS[loop](engine, case, setting)
        assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1, f"ranks differ after {loop}: {setting}"
        assert_close(masters(engine.module), expected, 1e-6, f"{loop} at {setting}")
        engine.destroy()


# -- no_sync -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_no_sync_adds_up_locally_and_reduces_once() -> None:
    # The engine is told of one micro-batch a step and sums three; the plain loop takes their mean.
    case = CASES["gpt"]
    engine = start(case, Setting(stage=1, lr=0.1 / 3))

    def reductions() -> int:
        return engine.ledger.totals["reduce_scatter"].count if "reduce_scatter" in engine.ledger.totals else 0

    for step in range(STEPS):
        before = reductions()
        with engine.no_sync():
            engine.backward(case.loss(engine, data(case, step, 0)))
            engine.backward(case.loss(engine, data(case, step, 1)))
            with pytest.raises(SyncError, match="no_sync"):
                engine.step()
        assert reductions() == before
        engine.backward(case.loss(engine, data(case, step, 2)))
        engine.step()
        assert reductions() == before + len(engine.sharded.units)
    found = masters(engine.module)
    assert_close(found, plain(case, Setting(accumulation=3, lr=0.1), 2, STEPS).masters, 1e-6)


# -- steps without gradients, losses without the model ------------------------------------------------------------


@on_ranks(2, timeout=20)
def test_a_loss_that_does_not_touch_the_model_does_not_hang_the_others() -> None:
    """Rank 1's loss does not depend on the model in the first step."""
    case = CASES["odd_mlp"]

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        return case.loss(model, batch) * (0.0 if batch["absent"] else 1.0)

    def batch(generator: torch.Generator, seed: int) -> Batch:
        return {**case.batch(generator, seed), "absent": seed == 2}

    engine = start(case, Setting(stage=3))
    for step in range(STEPS):
        found = case.loss(engine, data(case, step))
        engine.backward(torch.ones((), requires_grad=True) * 2 if (dist.get_rank(), step) == (1, 0) else found)
        engine.step()
    expected = plain(Case("", case.build, batch, loss), Setting(), 2, STEPS).masters
    assert_close(masters(engine.module), expected, 1e-6)
