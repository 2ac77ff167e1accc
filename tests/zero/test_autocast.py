"""torch_autocast: the same as torch.autocast around a plain model, what travels in 16 bits, and loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError, NotBuiltError
from tests.harness import run_ranks, thorough
from tests.harness.training import Tensors, assert_close, gradients, masters
from tests.models import GPT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model() -> nn.Module:
    torch.manual_seed(3)
    return GPT(layers=2, dim=12, vocabulary=31)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(module: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = module(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def configured(stage: int, accumulation: int = 1, **autocast: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700},
        "torch_autocast": {"enabled": True, **autocast},
    }


def train(settings: list[dict[str, Any]]) -> list[Any]:
    results = []
    for config in settings:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        engine, *_ = shardwise.initialize(model=module, optimizer=optimizer, config=config)
        steps = engine.gradient_accumulation_steps()
        seen: list[Tensors] = []
        for step in range(2):
            for micro in range(steps):
                ids = batch(step, micro, dist.get_rank())
                assert engine(ids).dtype == engine._autocast_dtype
                engine.backward(loss_of(engine, ids))
                if micro == steps - 1:
                    seen.append(gradients(module))
                engine.step()
            assert engine.was_step_applied()
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        sent = sum(record.sent for record in engine.ledger.records() if record.kind == "reduce")
        wires = {
            engine.sharded.registry[slot.index].name: (section.layout.wire_dtype, section.layout.numel)
            for unit in engine.sharded.units
            for section in unit.trainable
            for slot in section.layout.slots
        }
        numels = [(s.layout.wire_dtype, s.layout.numel) for u in engine.sharded.units for s in u.trainable]
        results.append((seen, masters(module), sent, wires, numels, engine.loss_scaler is not None))
        engine.destroy()
    return results


def alone(dtype: torch.dtype, world: int, accumulation: int) -> tuple[list[Tensors], Tensors]:
    """A plain model under torch.autocast on the global batch."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(world):
                ids = batch(step, micro, rank)
                with torch.autocast("cpu", dtype=dtype):
                    logits = module(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
                (loss / world / accumulation).backward()
        seen.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    return seen, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("name", "accumulation"), [thorough("bf16", 1), thorough("bf16", 2), ("fp16", 1)])
def test_equals_plain_autocast_at_every_stage(name: str, accumulation: int) -> None:
    # Nothing is rounded for the wire where it is told to be fp32.
    exact = [{**configured(s, accumulation, dtype=name), "communication_data_type": "fp32"} for s in range(4)]
    rounded = [configured(stage, accumulation, dtype=name) for stage in range(4)]
    results = run_ranks(train, 2, exact + rounded)[0]
    expected, final = alone(DTYPES[name], 2, accumulation)
    for number, (seen, found, sent, wires, numels, scales) in enumerate(results):
        what = f"{name} stage {number % 4} {'rounded' if number > 3 else ''}"
        assert scales is (name == "fp16")
        # A loss scale moves what fp16 rounds; a bf16 wire rounds each rank's gradient to 8 bits.
        bound = 2.0**-8 if number > 3 or name == "fp16" else 2e-6
        assert_close(seen[0], expected[0], bound, what)
        assert_close(found, final, bound, what)
        # Linear layers send 16 bits; the embedding that is the head as well, places and norms send 32.
        for parameter, (wire, _) in wires.items():
            linear = "blocks" in parameter and "norm" not in parameter
            assert wire is (DTYPES[name] if linear else None), parameter
        reductions = 2 * (accumulation if number % 4 > 1 else 1)
        size = sum(numel * (2 if wire is not None and number > 3 else 4) for wire, numel in numels)
        assert sent == size * reductions // 2, what
    for first, second in ((0, 1), (2, 3), (4, 5), (6, 7)):
        for name, value in results[first][1].items():
            assert torch.equal(value, results[second][1][name])


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(3, 4, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.convolution(x).mean(-1))


def contexts() -> dict[str, Any]:
    """Own contexts inside and around the model, calls of the module itself, and the modules that are chosen."""
    config = configured(2, dtype="bf16", lower_precision_safe_modules=["torch.nn.modules.conv.Conv1d"])
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = shardwise.initialize(model=Convolving(), config=config)
    x = torch.ones(2, 3, 5)
    found: dict[str, Any] = {"engine": engine(x).dtype, "module": engine.module(x).dtype}
    with torch.autocast("cpu", dtype=torch.float16):
        found["around"] = engine(x).dtype
    inner = engine.module.linear.forward
    engine.module.linear.forward = lambda v: torch.autocast("cpu", enabled=False)(inner)(v.float())
    found["inside"] = engine(x).dtype
    found["wires"] = [s.layout.wire_dtype for u in engine.sharded.units for s in u.trainable]
    launched = engine.ledger.sequence
    report = engine.memory_report({"x": x})
    # The copy calls the engine's own layer, which gets no gradients from that.
    assert engine.ledger.sequence == launched
    found["planned"] = report.total.planned
    found["words"] = engine.precision_in_words()
    engine.destroy()
    return found


def test_contexts_and_chosen_modules() -> None:
    for found in run_ranks(contexts, 2):
        assert found["engine"] is torch.bfloat16 and found["module"] is torch.float32
        assert found["around"] is torch.float16 and found["inside"] is torch.float32
        assert sorted(map(str, found["wires"])) == ["None", "torch.bfloat16"]
        assert found["planned"] > 0
        assert found["words"] == (
            "compute bf16 by autocast on fp32 parameters; gradients sent in bf16, fp32, added up in fp32; "
            "optimizer steps fp32 weights"
        )


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"bf16": {"enabled": True}}, ConflictError, "`bf16.enabled` are both true"),
        ({"fp16": {"enabled": True}}, ConflictError, "`fp16.enabled` are both true"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ConflictError, "autocast does not cast to"),
        ({"torch_autocast": {"enabled": False}, "amp": {"enabled": True}}, NotBuiltError, "torch_autocast"),
        ({"amp": {"enabled": True}}, ConfigError, "keep `torch_autocast`"),
    ],
)
def test_what_excludes_autocast(more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve({"train_batch_size": 2, "torch_autocast": {"enabled": True}, **more})


@pytest.mark.parametrize("name", ["Linear", "torch.nn.Linaer", "no.such.module.Layer", "torch.nn.functional.linear"])
def test_classes_that_do_not_exist(name: str) -> None:
    config = {"train_batch_size": 2, "torch_autocast": {"enabled": True, "lower_precision_safe_modules": [name]}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=rf"lower_precision_safe_modules: expected .*'{name}'"):
        shardwise.initialize(model=nn.Linear(2, 2), config=config)
