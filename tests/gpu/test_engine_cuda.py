"""One CUDA device: training is that of a plain loop, in all precisions. Stages differ on several devices only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from tests.gpu.forced import MODELS, on_device
from tests.harness.training import ADAMW, DTYPES, SGD, Setting, distance, engine_of, plain, train


@pytest.mark.parametrize("precision", list(DTYPES))
def test_training_is_that_of_a_plain_loop(precision: str) -> None:
    setting = Setting(3, clip=1.0, precision=precision, optimizer="AdamW", lr=1e-2)
    case = on_device(MODELS["gpt"])
    begun = dict(case.make().named_parameters())
    found = train(case, setting, 4).masters
    expected = plain(case, setting, 1, 4, model=case.make().cuda()).masters
    for name, gap in distance(found, expected).items():
        moved = float((expected[name].cpu() - begun[name]).norm())
        assert gap < (1e-3 if precision == "fp32" else 0.1) * moved, name


def weighted(on_device: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(33, 7)
    more = {"gradient_clipping": 1.0, "torch_autocast": {"enabled": True}}
    engine = engine_of(model, 0, ADAMW, gradient_accumulation_steps=2, **more)
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).to(engine.device)
    for micro in range(4):
        weight = torch.tensor(3 + micro, device=engine.device) if on_device else 3 + micro
        out = engine(x * (micro + 1))
        assert out.dtype is torch.bfloat16
        engine.backward(out.float().square().mean(), weight=weight)
        engine.step()
    assert float(engine.last_step.weight) == 5 + 6
    values = [p.detach().cpu() for p in model.parameters()]
    engine.destroy()
    return values


def test_weights_may_be_on_the_device() -> None:
    for given, seen in zip(weighted(True), weighted(False), strict=True):
        assert torch.allclose(given, seen, rtol=1e-6, atol=1e-7)


def test_mixed_weights_are_refused_at_the_next_step_where_nobody_waits_for_the_device() -> None:
    engine = engine_of(nn.Linear(3, 1), 0, SGD, gradient_accumulation_steps=2)
    for weight in (2.0, None):
        engine.backward(engine(torch.ones(2, 3, device=engine.device)).mean(), weight=weight)
        engine.step()
    with pytest.raises(UsageError, match="of the 2 backward passes of this window on all ranks, 1 had a weight"):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3, device=engine.device)).mean())
            engine.step()
    engine.destroy()
