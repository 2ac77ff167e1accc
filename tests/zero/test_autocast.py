"""torch_autocast: the same as torch.autocast around a plain model, what travels in 16 bits, and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError, NotBuiltError
from tests.harness import on_ranks, thorough
from tests.harness.training import (
    DTYPES,
    SGD,
    Setting,
    assert_close,
    engine_of,
    gradients,
    masters,
    parameters_digest,
    plain,
    start,
    take_steps,
)
from tests.models import CASES, Batch, language_loss

GPT = CASES["gpt"]


def setting_of(stage: int, accumulation: int, name: str, **more: Any) -> Setting:
    extra = {"torch_autocast": {"enabled": True, "dtype": name}, **more}
    return Setting(stage, 700, accumulation=accumulation, lr=0.5, extra=tuple(extra.items()))


@pytest.mark.parametrize(
    ("name", "accumulation", "stages"),
    [("bf16", 2, (1, 3)), ("fp16", 1, (0, 3)), thorough("bf16", 2, range(4)), thorough("fp16", 1, range(4))],
)
@on_ranks(2)
def test_equals_plain_autocast_at_every_stage(name: str, accumulation: int, stages: Sequence[int]) -> None:
    def loss(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=DTYPES[name]):
            return language_loss(model, batch)

    expected = plain(replace(GPT, loss=loss), setting_of(0, accumulation, name), 2, 2)
    # Nothing is rounded for the wire where it is told to be fp32.
    for told in ({"communication_data_type": "fp32"}, {}):
        digests = []
        for stage in stages:
            engine, what = start(GPT, setting_of(stage, accumulation, name, **told)), f"{name} stage {stage} {told}"
            assert (engine.loss_scaler is not None) is (name == "fp16")
            # A loss scale moves what fp16 rounds; a bf16 wire rounds each rank's gradient to 8 bits.
            bound = 2.0**-8 if not told or name == "fp16" else 2e-6
            for micro in range(accumulation):
                engine.backward(GPT.loss(engine, GPT.data(0, micro, dist.get_rank(), torch.float32)))
                if micro == accumulation - 1:
                    assert_close(gradients(engine.module), expected.gradients[0], bound, what)
                engine.step()
            take_steps(engine, GPT, [1])
            if told:  # later gradients are those of parameters that differ already
                assert_close(masters(engine.module), expected.masters, bound, what)
            layouts = [section.layout for unit in engine.sharded.units for section in unit.trainable]
            # Linear layers send 16 bits; the embedding that is the head as well, places and norms send 32.
            for one in layouts:
                for parameter in (engine.sharded.registry[slot.index].name for slot in one.slots):
                    narrow = "blocks" in parameter and "norm" not in parameter
                    assert one.wire_dtype is (DTYPES[name] if narrow else None), parameter
            size = sum(one.numel * (4 if told or one.wire_dtype is None else 2) for one in layouts)
            sent = sum(record.sent for record in engine.ledger.records() if record.kind == "reduce")
            assert sent == size * (accumulation if stage > 1 else 1), what  # half of it, in two steps
            digests.append(parameters_digest(engine.module))
            engine.destroy()
        # With accumulation sums are formed in another order.
        assert len(set(digests)) == (1 if accumulation == 1 else 2)


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(3, 4, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.convolution(x).mean(-1))


@on_ranks(2)
def test_contexts_and_chosen_modules() -> None:
    """Own contexts inside and around the model, calls of the module itself, and the modules that are chosen."""
    autocast = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.modules.conv.Conv1d"]}
    engine = engine_of(Convolving(), 2, SGD, torch_autocast=autocast)
    x = torch.ones(2, 3, 5)
    assert engine(x).dtype is torch.bfloat16 and engine.module(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert engine(x).dtype is torch.float16
    inner = engine.module.linear.forward
    engine.module.linear.forward = lambda v: torch.autocast("cpu", enabled=False)(inner)(v.float())
    assert engine(x).dtype is torch.float32
    wires = [s.layout.wire_dtype for u in engine.sharded.units for s in u.trainable]
    assert sorted(map(str, wires)) == ["None", "torch.bfloat16"]
    launched = engine.ledger.sequence
    assert engine.memory_report({"x": x}).total.planned > 0
    # The copy calls the engine's own layer, which gets no gradients from that.
    assert engine.ledger.sequence == launched
    assert engine.precision_in_words().startswith("compute bf16 by autocast on fp32 parameters")


@pytest.mark.parametrize(
    ("more", "error", "key"),
    [
        ({"bf16": {"enabled": True}}, ConflictError, "bf16.enabled"),
        ({"fp16": {"enabled": True}}, ConflictError, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ConflictError, "torch_autocast"),
        ({"torch_autocast": {"enabled": False}, "amp": {"enabled": True}}, NotBuiltError, "torch_autocast"),
        ({"amp": {"enabled": True}}, ConfigError, "torch_autocast"),
    ],
)
def test_what_excludes_autocast(more: dict[str, Any], error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        resolve({"train_batch_size": 2, "torch_autocast": {"enabled": True}, **more})


@pytest.mark.parametrize("name", ["Linear", "torch.nn.Linaer", "no.such.module.Layer", "torch.nn.functional.linear"])
def test_classes_that_do_not_exist(name: str) -> None:
    config = {"train_batch_size": 2, "torch_autocast": {"enabled": True, "lower_precision_safe_modules": [name]}}
    with pytest.raises(ConfigError, match=rf"lower_precision_safe_modules.*'{name}'"):
        shardwise.initialize(model=nn.Linear(2, 2), config={**config, "optimizer": SGD})
