"""The end of an engine: what still works afterwards, and what says that there is no engine any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from tests.harness import on_ranks, thorough
from tests.harness.training import SGD, engine_of


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "destroyed"), (3, "wrapped again"), thorough(0, "wrapped again"), thorough(3, "destroyed")]
)
@on_ranks(2)
def test_an_engine_that_is_no_more_says_so_and_disturbs_nobody(stage: int, how: str, tmp_path: Path) -> None:
    model, directory = nn.Linear(3, 1), tmp_path
    torch.nn.init.ones_(model.weight)
    engine = engine_of(model, stage, SGD)
    step(engine)
    newer = engine_of(model, stage, SGD) if how == "wrapped again" else None
    engine.destroy()
    engine.destroy()
    before = shardwise.utils.safe_get_full_fp32_param(model.weight) if newer else model.weight.detach().clone()
    for call in (
        lambda: engine(torch.ones(2, 3)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.gathered,
        engine.memory_report,
        engine.module_state_dict,
        lambda: engine.no_sync().__enter__(),
        lambda: engine.save_checkpoint(directory),
        lambda: engine.load_checkpoint(directory),
        lambda: engine.save_16bit_model(directory),
        lambda: engine.export(directory),
        lambda: engine.load_weights(directory),
        lambda: engine.load_module_state_dict({}),
        engine._consolidated_16bit_state_dict,
    ):
        with pytest.raises(UsageError, match="the engine has been destroyed") as caught:
            call()
        assert ("initialize() again" in str(caught.value)) == (newer is not None)
    engine.zero_grad()
    if newer is not None:
        step(newer)
        newer.destroy()
    assert torch.allclose(model.weight, before - (0.1 if newer else 0.0))


def test_forward_is_compiled_once() -> None:
    engine = shardwise.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    assert not engine.is_compiled
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for name in ("schedule", "compiled_autograd_enabled"):
        with pytest.raises(UsageError, match=rf"engine\.compile\({name}=.*: .* not built yet"):
            engine.compile(**{name: [1]})
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    engine.compile(backend="nonsense")  # compiled already
    assert engine.is_compiled and engine(torch.ones(1, 2)).shape == (1, 1) and graphs >= 1
    engine.destroy()
