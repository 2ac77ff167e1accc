"""Optimizers that raise in `step()`: before anything is stepped the step can be taken again, and later it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import UsageError
from tests.harness import on_ranks
from tests.harness.training import engine_of, parameters_digest
from tests.models import CASES

CASE = CASES["odd_mlp"]


class Raising(torch.optim.SGD):
    """Raises in its second step, before or after it has stepped the first parameter."""

    late = hidden = False
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.calls == 2 and not self.late:
                    raise MemoryError("no memory")
                target = parameter.data if self.hidden else parameter
                target.add_(parameter.grad, alpha=-group["lr"])
                if self.calls == 2:
                    raise MemoryError("no memory")


class RaisingByElement(Raising):
    """The same, in segments."""

    shardwise_sharding = "elementwise"


class RaisingUnseen(Raising):
    """Steps without a new version of the parameters."""

    hidden = True


class RaisingUnseenByElement(RaisingByElement):
    hidden = True


KINDS = [(0, Raising), (2, RaisingByElement), (2, RaisingUnseen), (0, RaisingUnseenByElement)]


def train(kind: type[Raising], stage: int, late: bool, raises: bool = True) -> tuple[str, str]:
    engine = engine_of(CASE.make(), stage, lambda ps: kind(ps, lr=0.1), gradient_clipping=0.1)
    engine.optimizer.late, engine.optimizer.calls = late, 0 if raises else 10
    refusal = ""
    for step in range(3):
        engine.backward(CASE.loss(engine, CASE.data(step, 0, dist.get_rank(), torch.float32)))
        if step != 1 or not raises:
            engine.step()
            continue
        with pytest.raises(MemoryError) as kept:  # its frames refer to gradients
            engine.step()
        assert kept.traceback
        try:
            engine.step()
        except UsageError as error:
            refusal = str(error)
            break
    digest = "" if refusal else parameters_digest(engine.module)
    return refusal, digest


@on_ranks(2)
def test_a_step_that_has_stepped_nothing_is_taken_again() -> None:
    digests = {train(kind, stage, late=False) for stage, kind in KINDS}
    assert digests == {train(Raising, 0, late=False, raises=False)}


@on_ranks(2)
def test_after_half_a_step_the_engine_refuses_to_go_on() -> None:
    for stage, kind in KINDS:
        refusal, _ = train(kind, stage, late=True)
        assert "a step was cut short before" in refusal and "Restart the job from the last checkpoint" in refusal, kind
