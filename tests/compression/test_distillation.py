"""Students of sharded teachers, against a loop in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.compression import Distillation
from shardwise.errors import UsageError
from shardwise.memory import Category
from tests.harness import run_ranks, thorough
from tests.harness.training import SGD, config_of, masters
from tests.models import GPT

STEPS, ROWS = 3, 2
HIDDEN = {"blocks.0": "blocks.2", "norm": "norm"}


def models() -> tuple[GPT, GPT]:
    torch.manual_seed(4)
    return GPT(layers=3), GPT(layers=1)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(31, (ROWS, 9), generator=torch.Generator().manual_seed(50 * step + rank))


def own_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def counted(ids: torch.Tensor) -> torch.Tensor:
    return (ids != 0) & (torch.arange(9) < 7)


def plain(ranks: int, micros: int) -> dict[str, torch.Tensor]:
    teacher, student = models()
    seen: dict[str, torch.Tensor] = {}
    for model, names in ((student, HIDDEN), (teacher, HIDDEN.values())):
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda _, __, out, key=(model is student, name): seen.__setitem__(key, out)
            )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro, rank in itertools.product(range(micros), range(ranks)):
            ids = tokens(micros * step + micro, rank)
            logits = student(ids)
            with torch.no_grad():
                wanted = (teacher(ids) / 3.0).softmax(-1)
            each = (wanted * (wanted.log() - (logits / 3.0).log_softmax(-1))).sum(-1)
            mask = counted(ids)
            loss = 0.75 * 9.0 * each[mask].mean() + 0.25 * own_loss(logits, ids)
            for own, of in HIDDEN.items():
                loss = loss + 0.5 * (seen[True, own] - seen[False, of]).square().mean()
            (loss / ranks / micros).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in student.named_parameters()}


def distilled(stage: int, micros: int, expected: dict[str, torch.Tensor]) -> None:
    teacher_model, student_model = models()
    window = {"gradient_accumulation_steps": micros}
    teacher = shardwise.initialize(model=teacher_model, config=config_of(3, rows=ROWS))[0]
    engine = shardwise.initialize(model=student_model, config=config_of(stage, SGD, rows=ROWS, **window))[0]
    distillation = Distillation(teacher, temperature=3.0, weight=0.75, student=engine, hidden=HIDDEN, hidden_weight=0.5)
    before = {name: value.clone() for name, value in masters(teacher.module).items()}
    for micro in range(micros * STEPS):
        ids = tokens(micro, dist.get_rank())
        logits = engine(ids)
        engine.backward(distillation(logits, own_loss(logits, ids), ids, mask=counted(ids)))
        engine.step()
    for name, value in masters(engine.module).items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    assert all(torch.equal(value, before[name]) for name, value in masters(teacher.module).items())
    nothing = (Category.GRADIENTS, Category.MASTER, Category.OPTIMIZER)
    assert not any(teacher.accountant.live.get(category) for category in nothing)
    distillation.close()
    engine(tokens(0, 0))
    assert not any(module._forward_hooks and _states(module) for module in student_model.modules())


def _states(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_hooks.values() if "_State" in repr(hook)]


CASES = [(1, 3, 1), (2, 0, 1), (2, 2, 2), (2, 3, 1), thorough(2, 1, 1), thorough(2, 2, 1)]


@pytest.mark.parametrize(("ranks", "stage", "micros"), CASES)
def test_a_student_of_a_sharded_teacher_trains_as_in_one_process(ranks: int, stage: int, micros: int) -> None:
    run_ranks(distilled, ranks, stage, micros, plain(ranks, micros))


def test_mistakes_are_refused() -> None:
    teacher, student = models()
    ids = tokens(0, 0)
    for arguments, text in (
        ({"temperature": 0.0}, "positive temperature"),
        ({"weight": 1.5}, r"weight in \[0, 1\]"),
        ({"hidden": HIDDEN}, "Pass student=engine"),
        ({"hidden": {"blocks.7": "norm"}, "student": student}, "GPT has no module 'blocks.7'"),
    ):
        with pytest.raises(UsageError, match=text):
            Distillation(teacher, **arguments)
    with pytest.raises(UsageError, match=r"own loss has the weight 0\.5"):
        Distillation(teacher)(student(ids), None, ids)
    with pytest.raises(UsageError, match=r"student are \[2, 9, 5\], of the teacher \[2, 9, 31\]"):
        Distillation(teacher, weight=1.0)(torch.zeros(2, 9, 5), None, ids)
    distillation = Distillation(teacher, weight=1.0, student=student, hidden={"norm": "norm"})
    distillation(student(ids), None, ids)
    with pytest.raises(UsageError, match="'norm' has not been called since the last loss"):
        distillation(torch.zeros(2, 9, 31), None, ids)


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self[1], self[0](x), use_reentrant=self.training)


def test_hidden_states_without_gradients_are_refused() -> None:
    student, teacher, x = Recomputed(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Linear(4, 3), torch.ones(2, 4)
    distillation = Distillation(teacher, weight=1.0, student=student, hidden={"1": ""}, hidden_weight=2.0)
    with pytest.raises(UsageError, match=r"'1' has run without gradients, .*Pass use_reentrant=False"):
        distillation(student(x), None, x)
    student.eval()
    with torch.no_grad():
        assert not distillation(student(x), None, x).requires_grad
    loss = distillation(student(x), None, x)
    wanted = Distillation(teacher, weight=1.0)(student(x), None, x) + 2 * F.mse_loss(student(x), teacher(x))
    assert torch.allclose(loss, wanted)
