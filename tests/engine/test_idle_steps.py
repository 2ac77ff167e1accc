"""step() without anything to step: nothing changes, on all ranks alike, and the log says so once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.utils.logging import warn_once
from tests.harness import of_all_ranks, on_ranks
from tests.harness.logs import logged
from tests.harness.training import config_of, engine_of


def build(stage: int, config: dict[str, Any], client: bool) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    if not client:
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        return engine_of(model, stage, {"type": "AdamW", "params": {"lr": 0.1}}, scheduler=schedule, **config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    return shardwise.initialize(model=model, config=config_of(stage, **config), **given)[0]


def known(engine: Any) -> list[Any]:
    """Everything that a step changes."""
    values = [value.clone() for runs in engine.sharded.state.value_runs().values() for _, _, value in runs]
    state = [value.clone() for s in engine.optimizer.state.values() for value in s.values() if torch.is_tensor(value)]
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
    return [values, state, counters, engine.get_lr(), engine.lr_scheduler.state_dict(), engine.cur_scale]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def exchange_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@pytest.mark.parametrize(
    ("stage", "config", "client", "plain"),
    [
        (0, {}, False, False),
        (1, {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}, False, True),
        (2, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, False, False),
        (3, {"gradient_accumulation_steps": 4}, True, True),
        (3, {"fp16": {"enabled": True, "initial_scale_power": 4}}, False, False),
        (1, {"managed_gradient_accumulation": False}, True, False),
    ],
)
@on_ranks(2)
def test_a_second_step_changes_nothing(stage: int, config: dict[str, Any], client: bool, plain: bool) -> None:
    """Training with every step() called once ends as that with more calls of it."""
    warn_once.cache_clear()
    ends = []
    with logged() as kept:
        for often in (1, 3):
            engine = build(stage, config, client)
            for number in range(4):
                x = torch.full((2, 4), 0.1 * (number + 1) + exchange_rank(), dtype=engine.module[0].weight.dtype)
                loss = engine(x).float().square().mean()
                loss.backward() if plain else engine.backward(loss)
                engine.step()
                for _ in range(often - 1):
                    with torch.no_grad():
                        engine(x)  # an evaluation is no micro-batch
                    before, passes = known(engine), len(list(engine.ledger.records()))
                    engine.step()
                    assert same(before, known(engine)) and not engine.was_step_applied()
                    assert len(list(engine.ledger.records())) - passes <= 1  # the all-reduce of every step
            ends.append(known(engine))
            assert engine.global_steps == 4 // config.get("gradient_accumulation_steps", 1)
            assert len(set(of_all_ranks(engine.micro_steps))) == 1
            engine.destroy()
    assert same(*ends)
    warnings = sum("there is nothing to step" in line and "test_idle_steps.py" in line for line in kept.lines)
    # Once for the line; the call ends a window, or is in the middle of one.
    assert warnings in ((1, 2) if exchange_rank() == 0 else (0,))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_window_without_any_backward_pass_changes_nothing(stage: int) -> None:
    """Windows without a backward pass, and with one that was left out."""
    engine = build(stage, {"gradient_accumulation_steps": 2}, False)
    x = torch.full((2, 4), 1.0 + exchange_rank())
    before = known(engine)
    for _ in range(4):
        engine(x)
        engine.step()
    assert same(before, known(engine))
    for number, counts in enumerate([(0, 1), (1, 2), (1, 3), (2, 4)]):
        loss = engine(x).mean()
        if number != 1:
            engine.backward(loss)
        engine.step()
        assert (engine.global_steps, engine.micro_steps) == counts
    engine.backward(engine(x).mean())
    engine.zero_grad()
    engine.step()
    engine.step()
    engine(x)
    before = known(engine)
    engine.step()
    assert same(before[:2], known(engine)[:2])


def test_a_closure_is_refused() -> None:
    """It would be left out: step() takes a scheduler's arguments."""
    engine = build(0, {}, False)
    with pytest.raises(UsageError, match=r"has got <function .*run the forward pass and engine.backward\(\) before"):
        engine.step(lambda: engine(torch.ones(2, 4)).mean())
    engine.destroy()


@pytest.mark.parametrize("how", ["weights", "module only"])
@on_ranks(2)
def test_a_load_in_the_middle_of_a_window_begins_it_again(how: str, tmp_path: Path) -> None:
    """Otherwise the mean of the rest would be divided by the number of all."""
    torch.manual_seed(0)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    engine = engine_of(nn.Linear(3, 1), 1, optimizer, gradient_accumulation_steps=4)
    engine.save_checkpoint(tmp_path)
    steps = []
    for number in range(8):
        if number == 2:
            if how == "weights":
                engine.load_weights(tmp_path)
            else:
                engine.load_checkpoint(tmp_path, load_module_only=True)
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        steps.append(engine.global_steps)
    assert steps == [0, 0, 0, 0, 0, 1, 1, 1]


@on_ranks(2)
def test_passes_without_an_optimizer_are_not_kept_for_a_step() -> None:
    engine = engine_of(nn.Linear(3, 1), 0, None, steps_per_print=1)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 3)).sum())
    window = engine._step._window
    assert not window.losses and not window.shown and not window.passes
    engine._step.check_between_windows("here")
