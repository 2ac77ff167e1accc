"""How often a step has the host read a tensor: on a CUDA device it would wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import shardwise

READS = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__)


class Reads(TorchFunctionMode):
    """Counts what is read of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


@pytest.mark.parametrize(
    "config",
    [
        FP16,
        {**FP16, "gradient_clipping": 0.1},
        {**FP16, "zero_optimization": {"stage": 1}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
        {"bf16": {"enabled": True}, "non_finite": "stop", "gradient_clipping": 0.1},
        {"gradient_clipping": 0.1},
    ],
)
def test_a_step_reads_all_that_it_needs_at_once(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2, **config})
    dtype = next(model.parameters()).dtype
    for value in (1.0, 1.0, float("nan"), 1.0):
        engine.backward(engine(torch.full((2, 4), value, dtype=dtype)).mean())
        with Reads() as reads:
            if value != value and config.get("non_finite") == "stop":
                with pytest.raises(shardwise.errors.NonFiniteError):
                    engine.step()
            else:
                engine.step()
        if value == value:
            assert reads.seen == ["tolist"]
            assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_step_counts_of_an_optimizer_with_state_are_read_at_once(stage: int) -> None:
    """They may lie on the device (`fused`, `capturable`)."""
    seen = []
    for layers in (2, 9):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.state[model[1].weight]["step"] += 5
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
        with Reads() as reads:
            engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
        counts = [float(state["step"]) for state in optimizer.state.values()]
        assert sorted(set(counts)) == [2.0, 7.0] and counts.count(7.0) == 1
        seen.append(reads.seen.count("tolist"))
        engine.destroy()
    assert seen == [1, 1]
