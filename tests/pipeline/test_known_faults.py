"""Faults that users of other pipelines have reported in public: each behaviour is right here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import PipelineError, ShardwiseError
from shardwise.moe import MoE
from shardwise.pipe import LayerSpec, make_schedule
from shardwise.zero.access import safe_get_full_optimizer_state
from tests.harness import run_ranks, thorough
from tests.pipeline.gradients import PLAIN, Gradients, compare, gradients, gradients_alone, gradients_of_all
from tests.pipeline.training import WIDTH, WORDS, Block, Logits, Setting, alone, data, engine_of, layers, train, untied

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipe-v")


class Parts(nn.Module):
    """Uses operators with several outputs: chunk, split, unbind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        d, e = self.down(a * b.sigmoid()).split([2, WIDTH - 2], -1)
        rows = torch.cat([e, d], -1).unbind(0)
        return torch.stack([row * (i + 1) for i, row in enumerate(rows)]) + c


def of_parts() -> list[Any]:
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *(LayerSpec(Parts) for _ in range(4)), LayerSpec(Logits)]


def test_operators_with_several_outputs_get_all_their_gradients() -> None:
    """pytorch/pytorch#170277: the split backward pass gave all gradients to output 0."""
    compare([Setting(2, schedule, made=of_parts) for schedule in ("1f1b", "zb-h1", "zbv", "dualpipe-v")], 2)


def test_zero_bubble_reduces_gradients_over_data_parallel_ranks() -> None:
    """pytorch/pytorch#144530: a split backward pass bypassed the hooks that reduce."""
    compare([Setting(2, schedule, zero, made=untied) for schedule, zero in [("1f1b", 0), ("zb-h1", 0), ("zbv", 1)]], 4)


def by_two_calls(setting: Setting, calls: Iterable[int]) -> tuple[list[Any], Gradients]:
    engine = engine_of(replace(setting, config={**PLAIN, **setting.config}))
    found = data(setting, 0)
    losses = []
    for count in calls:
        losses.append(engine.train_batch(found, num_micro_batches=count))
        assert engine.global_steps == (losses[-1] is not None)
        engine.eval_batch(data(setting, 5))
    momentum = {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in engine.module.named_parameters()}
    engine.destroy()
    return [None if loss is None else float(loss) for loss in losses], momentum  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("schedule", "zero"), [("1f1b", 1), ("zb-h1", 0), thorough("zbv", 2), thorough("1f1b", 3), thorough("gpipe", 0)]
)
def test_gradients_accumulate_over_several_calls(schedule: str, zero: int) -> None:
    """pytorch/torchtitan#1732: each call scaled what earlier calls had accumulated."""
    setting = Setting(2, schedule, zero, 4, made=untied)
    expected = gradients_alone(setting, 2)
    for losses, found in run_ranks(by_two_calls, 4, setting, [2, 2]):
        assert losses[0] is None and losses[1] > 0
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    once = run_ranks(by_two_calls, 4, setting, [4])
    for (_, found), (_, whole) in zip(run_ranks(by_two_calls, 4, setting, [1, 3]), once, strict=True):
        assert all(torch.equal(values, whole[name]) for name, values in found.items())


def too_many(setting: Setting) -> str:
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0), num_micro_batches=3)
    with pytest.raises(PipelineError) as error:
        engine.train_batch(data(setting, 0), num_micro_batches=2)
    engine.train_batch(data(setting, 0))
    assert engine.global_steps == 1
    engine.destroy()
    return str(error.value)


def test_a_call_does_not_exceed_the_step() -> None:
    for text in run_ranks(too_many, 2, Setting(2)):
        assert "the step needs 1 more of 4 micro-batches (gradient_accumulation_steps). Pass 1 to 1" in text


@pytest.mark.parametrize("stages", [1, thorough(2), 3])
def test_gradients_do_not_depend_on_stages_and_accumulation(stages: int) -> None:
    """deepspeedai/DeepSpeed#7773, #8152: gradients were summed, or divided once for each stage."""
    for count in (1, 2, 8):
        compare([Setting(stages, schedule, 1, count) for schedule in ("1f1b", "zb-h1")], stages)


def compiled(setting: Setting, whole: bool) -> tuple[Gradients, int]:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    def made() -> list[Any]:
        found = untied()
        return found if whole else [*found[:2], LayerSpec(Compiled, backend), *found[3:]]

    engine = engine_of(replace(setting, made=made, config={**PLAIN, **setting.config}))
    if whole:
        engine.compile(backend=backend)
        assert engine.is_compiled
    engine.train_batch(data(setting, 0))
    engine.eval_batch(data(setting, 1))
    found = {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in engine.module.named_parameters()}
    engine.destroy()
    torch._dynamo.reset()
    return found, len(graphs)  # type: ignore[return-value]


class Compiled(nn.Module):
    """A block that is compiled."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.block = torch.compile(Block(WIDTH), backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(x)
        return result


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", *map(thorough, ("gpipe", "zbv", "v-min", "dualpipe-v"))])
def test_compiled_stages_have_the_gradients_of_plain_ones(schedule: str, whole: bool) -> None:
    """pytorch/pytorch#161904, pytorch/torchtitan#774: zero-bubble schedules failed with torch.compile."""
    setting = Setting(2, schedule, made=untied)
    expected = gradients_alone(setting, 1)
    found = run_ranks(compiled, 2, setting, whole)
    assert all(graphs for _, graphs in found) if whole else any(graphs for _, graphs in found)
    for own, _ in found:
        for name, values in own.items():
            values_name = name.replace("block._orig_mod.", "")
            torch.testing.assert_close(values, expected[values_name], rtol=1e-5, atol=1e-7, msg=name)
