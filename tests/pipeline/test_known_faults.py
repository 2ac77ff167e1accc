"""Faults that users of other pipelines have reported in public: each behaviour is right here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import PipelineError
from shardwise.moe import MoE
from shardwise.pipe import LayerSpec
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import each
from tests.pipeline.gradients import (
    PLAIN,
    Gradients,
    close,
    compare,
    gradients,
    gradients_alone,
    momenta,
)
from tests.pipeline.training import (
    WIDTH,
    WORDS,
    Block,
    Logits,
    Setting,
    batch,
    data,
    engine_of,
    train,
    untied,
)


def by_calls(setting: Setting, calls: Iterable[int]) -> tuple[list[Any], Gradients]:
    engine = engine_of(replace(setting, config={**PLAIN, **setting.config}))
    found = data(setting, 0)
    losses = []
    for count in calls:
        losses.append(engine.train_batch(found, num_micro_batches=count))
        assert engine.global_steps == (losses[-1] is not None)
        engine.eval_batch(data(setting, 5))
    gradients = momenta(engine)
    engine.train_batch(data(setting, 0), num_micro_batches=3)
    with pytest.raises(PipelineError, match="1 more of 4 micro-batches"):
        engine.train_batch(data(setting, 0), num_micro_batches=2)
    return [None if loss is None else float(loss) for loss in losses], gradients


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("zb-h1", 1), thorough("1f1b", 3), thorough("zbv", 2)],
)
def test_gradients_accumulate_over_several_calls(schedule: str, zero: int) -> None:
    """pytorch/torchtitan#1732: each call scaled what earlier calls had accumulated."""
    setting = Setting(2, schedule, zero, 4, made=untied)
    expected = gradients_alone(setting, 2)
    for losses, found in run_ranks(by_calls, 4, setting, [2, 2]):
        assert losses[0] is None and losses[1] > 0
        close(found, expected)
    once = run_ranks(by_calls, 4, setting, [4])
    for (_, found), (_, whole) in zip(run_ranks(by_calls, 4, setting, [1, 3]), once, strict=True):
        assert all(torch.equal(values, whole[name]) for name, values in found.items())


def few_valid(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels of which another number is valid in each micro-batch: none in the third one."""
    ids, labels = batch(step, micro_batch, place)
    valid = torch.arange(labels.numel()).view_as(labels) < [10, 3, 0, 6][micro_batch] - place
    return ids, torch.where(valid, labels, -100)


def mean_and_count(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = (labels != -100).sum()
    total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total / count.clamp(min=1), count


@pytest.mark.parametrize(("stages", "ranks"), [(2, 4), thorough(3, 3), thorough(2, 2), thorough(1, 2)])
@pytest.mark.parametrize(("schedule", "zero"), [thorough("1f1b", 0), ("zb-h1", 1), ("zbv", 3)])
def test_losses_are_divided_by_all_valid_tokens_on_every_stage(
    schedule: str, zero: int, stages: int, ranks: int
) -> None:
    """pytorch/torchtitan#4194: gradients were too large by the number of tokens."""
    how: dict[str, Any] = {"made": untied, "loss": mean_and_count, "batches": few_valid}
    compare([Setting(stages, schedule, zero, **how)], ranks)


@pytest.mark.parametrize("schedule", ["zb-h1", thorough("zbv")])
@on_ranks(2)
def test_compiled_stages_have_the_gradients_of_plain_ones(schedule: str) -> None:
    """pytorch/pytorch#161904, pytorch/torchtitan#774: zero-bubble schedules failed with torch.compile."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    setting = Setting(2, schedule, made=untied)
    found = gradients(setting, lambda engine: engine.compile(backend=backend))
    torch._dynamo.reset()
    assert graphs
    close(found, gradients_alone(setting, 1))


@on_ranks(2)
def test_each_setter_has_an_effect() -> None:
    """deepspeedai/DeepSpeed#8178: a setter of the recomputation interval wrote an attribute that had no reader."""
    calls: list[str] = []

    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return super().forward(x)

    made = [LayerSpec(nn.Embedding, WORDS, WIDTH), *[LayerSpec(Counted, WIDTH)] * 4, LayerSpec(Logits)]
    setting = Setting(2, made=lambda: made)
    engine = engine_of(setting)

    def ran() -> int:
        calls.clear()
        engine.train_batch()
        return len(calls)

    engine.set_dataiterator(data(setting, 0))
    assert ran() == 8
    engine.set_dataloader(list(data(setting, 1)))
    engine.module.set_checkpoint_interval(1)
    assert ran() == 16
    engine.module.set_checkpoint_interval(0)
    assert ran() == 8
    engine.set_train_batch_size(2 * engine.train_batch_size())
    assert ran() == 16
    engine.set_train_batch_size(engine.train_batch_size() // 8)
    engine.set_batch_fn(lambda pair: (calls.append("batch_fn"), pair)[1])
    ran()
    assert calls.count("batch_fn") == 1


class Half(Block):
    """A block that only even ranks use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if dist.is_initialized() and dist.get_rank() % 2 == 0 else x * 1


def of_branches() -> list[Any]:
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(Half, WIDTH), LayerSpec(Block, WIDTH), LayerSpec(Logits)]


@pytest.mark.parametrize(
    ("schedule", "zero", "config", "bound"),
    [
        ("1f1b", 1, {"bf16": {"enabled": True}}, 1e-3),
        thorough("zb-h1", 2, {}, 1e-6),
        thorough("1f1b", 3, {}, 1e-6),
    ],
)
def test_a_branch_without_data_on_one_rank_does_not_hang(
    schedule: str, zero: int, config: dict[str, Any], bound: float
) -> None:
    """deepspeedai/DeepSpeed#5792: bf16 with ZeRO 1 waited for gradients of an encoder without data."""
    one = run_ranks(train, 2, Setting(1, zero=zero, made=of_branches, config=config))
    for run in run_ranks(train, 4, Setting(2, schedule, zero, made=of_branches, config=config)):
        torch.testing.assert_close(run.losses, one[0].losses, rtol=bound, atol=bound)


class Routed(nn.Module):
    """Experts; passes on the sum of all auxiliary losses."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.experts = MoE(WIDTH, expert, 4, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)

    def forward(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, auxiliary = value if isinstance(value, tuple) else (value, torch.zeros(()))
        y, own, _ = self.experts(x)
        return x + y, auxiliary + own


class Plain(Block):
    """A block that passes the auxiliary losses on."""

    def forward(self, value: Any) -> Any:
        return super().forward(value[0]), value[1]


class WithLoss(Logits):
    """Returns logits and the auxiliary losses."""

    def forward(self, value: Any) -> Any:
        return super().forward(value[0]), value[1]


def routed(ep_size: int) -> list[Any]:
    experts = [LayerSpec(Routed, ep_size), LayerSpec(Plain, WIDTH), LayerSpec(Routed, ep_size)]
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(Routed, ep_size), *experts, LayerSpec(WithLoss)]


def with_auxiliary(output: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[0].flatten(0, 1), ids.flatten()) + 0.3 * output[1]


def of_whole(name: str, place: int) -> str:
    """Return the name of a parameter in the whole model: ranks number their two experts from 0."""
    return re.sub(r"(?<=experts\.)\d", lambda found: str(int(found[0]) + 2 * place), name)


UNEVEN = {"partition_method": [0, 1, 6]}  # no experts on the first stage


@pytest.mark.parametrize(("size", "ranks"), [thorough(1, 2), (2, 4), thorough(1, 4)])
@pytest.mark.parametrize("ways", [(("zb-h1", {}), ("1f1b", UNEVEN)), thorough((("1f1b", {}),))], ids=["two", "1f1b"])
def test_auxiliary_losses_and_experts_on_the_ranks_of_a_stage(ways: Any, size: int, ranks: int) -> None:
    """NVIDIA/Megatron-LM#7452 (3, 4, 7): auxiliary losses of local tokens; a default group in place of the given one.

    The ranks of the second stage are not the first ones of the job.
    """
    settings = [
        Setting(2, schedule, 0, made=partial(routed, size), loss=with_auxiliary, options=options)
        for schedule, options in ways
    ]
    expected = gradients_alone(replace(settings[0], made=partial(routed, 1)), ranks // 2)
    for runs in zip(*run_ranks(each, ranks, gradients, [(one,) for one in settings]), strict=True):
        named = [{of_whole(n, rank % 2 * (size - 1)): v for n, v in run.items()} for rank, run in enumerate(runs)]
        assert {name for run in named for name in run} == set(expected)
        for run in named:
            close(run, expected, bound=1e-5)
