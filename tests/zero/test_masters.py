"""Training without fp32 master weights: the same bits in every layout, the bytes, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import optim
from shardwise.errors import ConfigError
from shardwise.memory import Category
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import engine_of, goes_on, parameters_digest, take_steps
from tests.models import CASES

LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
NONE: dict[str, Any] = {"enabled": True, "master_weights": "none"}
PEERS: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}
KINDS: dict[str, dict[str, Any]] = {
    "stochastic": {"bf16": NONE, "optimizer": ADAMW},
    "kahan": {"bf16": {**NONE, "rounding": "kahan"}, "optimizer": ADAMW},
    "narrow": {
        "bf16": {**PEERS, "bf16_optimizer_states": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": LION,
    },
    "both": {"bf16": {**NONE, "rounding": "kahan", "bf16_optimizer_states": True}, "optimizer": ADAMW},
}


def start(stage: int, more: dict[str, Any], name: str = "odd_mlp", optimizer: Any = None) -> Any:
    more = dict(more)
    return engine_of(CASES[name].make(), stage, more.pop("optimizer", optimizer), **more)


def steps(engine: Any, first: int, count: int, name: str = "odd_mlp") -> None:
    """Train on the same data on every rank."""
    take_steps(engine, CASES[name], range(first, first + count), rank=0)


def whole_state(engine: Any) -> dict[str, torch.Tensor | None]:
    keys = ("exp_avg", "exp_avg_sq", "compensation")
    return {
        f"{name} {key}": safe_get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        for key in keys
    }


def layouts(stages: list[int]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for kind, more in KINDS.items():
        for stage in stages:
            engine = start(stage, more)
            steps(engine, 0, 3)
            found.setdefault(kind, []).append((parameters_digest(engine.module), whole_state(engine)))
            engine.destroy()
    return found


@pytest.mark.thorough
def test_the_same_bits_at_every_stage_and_on_any_number_of_ranks() -> None:
    outcomes = [run_ranks(layouts, world, [0] if world == 1 else [0, 1, 2, 3])[0] for world in (1, 2, 3)]
    for kind in KINDS:
        digest, state = outcomes[0][kind][0]
        known = [name for name, value in state.items() if value is not None]
        assert known
        for world, outcome in enumerate(outcomes, 1):
            for stage, (other, others) in enumerate(outcome[kind]):
                assert other == digest, (kind, world, stage)
                for name in known:
                    assert torch.equal(state[name], others[name]), (kind, world, stage, name)  # type: ignore[arg-type]


NARROW = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({"bf16": {"enabled": True}, "optimizer": ADAMW}, (8, 4, 4)),
        ({"bf16": {"enabled": True}, "optimizer": NARROW}, (4, 4, 4)),
        ({"bf16": NONE, "optimizer": ADAMW}, (8, 0, 4)),
        (KINDS["kahan"], (10, 0, 4)),
        (KINDS["both"], (6, 0, 4)),
        ({"bf16": PEERS, "optimizer": ADAMW}, (8, 0, 2)),
        (KINDS["narrow"], (2, 0, 4)),
        ({"bf16": NONE, "optimizer": LION}, (4, 0, 4)),
    ],
)
@on_ranks(2)
def test_bytes_of_each_way(more: dict[str, Any], sizes: tuple[int, int, int], stage: int) -> None:
    """Bytes per parameter of this rank's share: optimizer, masters, gradients; planned and held.

    Gradients in bf16 are scaled in fp32, unit by unit.
    """
    engine = start(stage, more, "gpt")
    plan = {category: engine.memory_report().row(category).planned for category in Category}
    steps(engine, 0, 2, name="gpt")
    now, peak = engine.accountant.live, engine.accountant.peak
    shares = [sum(s.master_stop - s.master_start for s in unit.trainable) for unit in engine.sharded.units]
    counts = sum(state["step"].nbytes for state in engine.optimizer.state.values())
    optimizer, master, gradients = (size * sum(shares) for size in sizes)
    gradients += 4 * max(shares) if sizes[2] == 2 else 0
    assert plan[Category.OPTIMIZER] - counts == now[Category.OPTIMIZER] - counts == optimizer
    assert plan[Category.MASTER] == now[Category.MASTER] == master
    assert plan[Category.GRADIENTS] == peak[Category.GRADIENTS] == gradients


@pytest.mark.parametrize("kind", ["narrow", "both", *map(thorough, ("stochastic", "kahan"))])
@on_ranks(2)
def test_resuming_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    states = []

    def train(engine: Any, first: int, last: int) -> None:
        steps(engine, first, last - first)
        states.append({name: value for name, value in whole_state(engine).items() if value is not None})

    goes_on(lambda again: start(3 if again else 2, KINDS[kind]), train, str(tmp_path), 2, 4)
    assert states[1].keys() == states[2].keys()
    assert all(torch.equal(value, states[2][name]) for name, value in states[1].items())


@on_ranks(2)
def test_classes_of_torch_round_to_nearest_and_an_instance_keeps_its_own_rounding() -> None:
    model = CASES["odd_mlp"].make()
    own = optim.AdamW(model.parameters(), lr=1e-2, rounding="kahan")
    engine = engine_of(model, 2, own, bf16=NONE)
    steps(engine, 0, 1)
    assert own.rounding == "kahan"
    engine.destroy()
    for cls in (torch.optim.AdamW, torch.optim.Adafactor):
        engine = start(
            3, {"bf16": {**PEERS, "bf16_optimizer_states": True}}, "gpt", lambda ps, cls=cls: cls(ps, lr=1e-2)
        )
        before = parameters_digest(engine.module)
        steps(engine, 0, 2, name="gpt")
        assert parameters_digest(engine.module) != before
        assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} <= {torch.bfloat16}
        engine.destroy()


@on_ranks(2)
def test_gradients_in_fp16_with_state_in_fp32() -> None:
    fp16 = {"enabled": True, "loss_scale": 256, "fp16_master_weights_and_grads": True}
    engine = start(2, {"fp16": fp16, "optimizer": ADAMW})
    before = parameters_digest(engine.module)
    steps(engine, 0, 2)
    assert parameters_digest(engine.module) != before
    assert {s.gradient.dtype for unit in engine.sharded.units for s in unit.trainable} == {torch.float16}
    assert next(iter(engine.optimizer.state.values()))["exp_avg"].dtype is torch.float32
    assert safe_get_full_fp32_param(next(engine.module.parameters())).dtype is torch.float32


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bf16": {**PEERS, "master_weights": "fp32"}}, r"bf16\.master_weights.*remove one of them"),
        ({"bf16": {"enabled": True, "rounding": "kahan"}}, r"bf16\.rounding.*fp32 master weights are not rounded"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, r"bf16_optimizer_states.*needs"),
        (
            {
                "bf16": {**NONE, "bf16_optimizer_states": True},
                "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": True}},
            },
            "remove one of them",
        ),
        ({"bf16": NONE, "optimizer": {"type": "SGD"}}, r"bf16\.rounding: SGD .*rounding` \"nearest\""),
        ({"bf16": {**NONE, "rounding": "kahan"}, "optimizer": {"type": "Adafactor"}}, r"bf16\.rounding: Adafactor"),
        ({"bf16": PEERS, "optimizer": {"type": "SGD"}}, r"bf16\.bf16_optimizer_states: SGD .*Set the key to true"),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "optimizer": {"type": "SGD"}},
            "fp16_master_weights_and_grads: SGD .* too little range",
        ),
        ({"bf16": {**NONE, "rounding": "up"}}, r"bf16\.rounding"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], words: str) -> None:
    optimizer = {"optimizer": ADAMW}
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        shardwise.initialize(model=nn.Linear(3, 2), config={"train_micro_batch_size_per_gpu": 2, **optimizer, **more})
