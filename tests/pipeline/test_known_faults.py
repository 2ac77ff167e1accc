"""Faults that users of other pipelines have reported in public: each behaviour is right here."""

from __future__ import annotations

import re
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
from tests.pipeline.gradients import PLAIN, Gradients, compare, gradients_alone, gradients_of_all
from tests.pipeline.training import (
    WIDTH,
    WORDS,
    Block,
    Logits,
    Setting,
    alone,
    batch,
    data,
    engine_of,
    model_of,
    train,
    untied,
)


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
    ("schedule", "zero"),
    [("zb-h1", 1), thorough("1f1b", 3), thorough("zbv", 2)],
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


def few_valid(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels of which another number is valid in each micro-batch: none in the third one."""
    ids, labels = batch(step, micro_batch, place)
    valid = torch.arange(labels.numel()).view_as(labels) < [10, 3, 0, 6][micro_batch] - place
    return ids, torch.where(valid, labels, -100)


def mean_and_count(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = (labels != -100).sum()
    total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total / count.clamp(min=1), count


def of_all_tokens(setting: Setting, places: int) -> Gradients:
    """Return the gradients of one process with all tokens as one batch."""
    model = model_of(1, setting.made, None)
    pairs = [setting.batches(0, n, place) for n in range(setting.micro_batches) for place in range(places)]
    ids, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    mean_and_count(model(ids), labels)[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("stages", "ranks"), [(2, 4), thorough(3, 3), thorough(2, 2), thorough(1, 2)])
def test_losses_are_divided_by_all_valid_tokens_on_every_stage(stages: int, ranks: int) -> None:
    """pytorch/torchtitan#4194: gradients were too large by the number of tokens."""
    setting = Setting(stages, made=untied, loss=mean_and_count, batches=few_valid)
    expected = of_all_tokens(setting, ranks // stages)
    settings = [replace(setting, schedule=name, zero=zero) for name, zero in [("1f1b", 0), ("zb-h1", 1), ("zbv", 3)]]
    for run in run_ranks(gradients_of_all, ranks, settings):
        for found in run:
            for name, values in found.items():
                torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("stages", [thorough(1), thorough(2), 3])
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


@pytest.mark.parametrize(("schedule", "whole"), [("zb-h1", False), ("zb-h1", True), thorough("zbv", True)])
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


def setters() -> dict[str, Any]:
    """Call each setter on this rank; return counts of calls and steps, and losses."""
    calls: list[str] = []

    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return super().forward(x)

    def made() -> list[Any]:
        return [
            LayerSpec(nn.Embedding, WORDS, WIDTH),
            *(LayerSpec(Counted, WIDTH) for _ in range(4)),
            LayerSpec(Logits),
        ]

    setting = Setting(2, made=made)
    engine = engine_of(setting)

    def ran() -> int:
        calls.clear()
        engine.train_batch()
        return len(calls)

    found: dict[str, Any] = {}
    engine.set_dataiterator(data(setting, 0))
    found["plain"] = ran()
    engine.set_dataloader(list(data(setting, 1)))
    engine.module.set_checkpoint_interval(1)
    found["interval 1"] = ran()
    engine.module.set_checkpoint_interval(0)
    found["interval 0"] = ran()
    engine.set_train_batch_size(2 * engine.train_batch_size())
    found["twice the batch"] = ran()
    engine.set_train_batch_size(engine.train_batch_size() // 8)
    engine.set_batch_fn(lambda pair: (calls.append("batch_fn"), pair)[1])
    ran()
    found["batch_fn"] = calls.count("batch_fn")
    engine.destroy()
    return found


def test_each_setter_has_an_effect() -> None:
    """deepspeedai/DeepSpeed#8178: a setter of the recomputation interval wrote an attribute that had no reader."""
    for found in run_ranks(setters, 2):
        assert found == {"plain": 8, "interval 1": 16, "interval 0": 8, "twice the batch": 16, "batch_fn": 1}


class Half(Block):
    """A block that only even ranks use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if dist.is_initialized() and dist.get_rank() % 2 == 0 else x * 1


def of_branches() -> list[Any]:
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(Half, WIDTH), LayerSpec(Block, WIDTH), LayerSpec(Logits)]


def test_a_branch_without_data_on_one_rank_does_not_hang() -> None:
    """deepspeedai/DeepSpeed#5792: bf16 with ZeRO 1 waited for gradients of an encoder without data."""
    bf16 = {"bf16": {"enabled": True}}
    for schedule, zero, config, bound in (("1f1b", 1, bf16, 1e-3), ("zb-h1", 2, {}, 1e-6), ("1f1b", 3, {}, 1e-6)):
        one = run_ranks(train, 2, Setting(1, zero=zero, made=of_branches, config=config))
        for run in run_ranks(train, 4, Setting(2, schedule, zero, made=of_branches, config=config)):
            torch.testing.assert_close(run.losses, one[0].losses, rtol=bound, atol=bound)


def five() -> list[Any]:
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *(LayerSpec(Block, WIDTH) for _ in range(3)), LayerSpec(Logits)]


@pytest.mark.parametrize(("stages", "method"), [(3, "uniform"), thorough(2, "parameters"), thorough(3, "type:block")])
def test_layers_need_not_be_divisible_by_stages(stages: int, method: str) -> None:
    """NVIDIA/Megatron-LM#3399: an uneven division of layers gave wrong results."""
    options = {"partition_method": method}
    compare([Setting(stages, schedule, 1, made=five, options=options) for schedule in ("1f1b", "zb-h1")], stages)


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


def routed_one() -> list[Any]:
    return routed(1)


def routed_two() -> list[Any]:
    return routed(2)


def with_auxiliary(output: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[0].flatten(0, 1), ids.flatten()) + 0.3 * output[1]


def of_whole(name: str, place: int) -> str:
    """Return the name of a parameter in the whole model: ranks number their two experts from 0."""
    return re.sub(r"(?<=experts\.)\d", lambda found: str(int(found[0]) + 2 * place), name)


@pytest.mark.parametrize(("made", "ranks"), [thorough(routed_one, 2), (routed_two, 4), thorough(routed_one, 4)])
def test_auxiliary_losses_and_experts_on_the_ranks_of_a_stage(made: Any, ranks: int) -> None:
    """NVIDIA/Megatron-LM#7452 (3, 4, 7): auxiliary losses of local tokens; a default group in place of the given one.

    The ranks of the second stage are not the first ones of the job.
    """
    settings = [Setting(2, schedule, 0, made=made, loss=with_auxiliary) for schedule in ("1f1b", "zb-h1")]
    expected = gradients_alone(replace(settings[0], made=routed_one), ranks // 2)
    for runs in zip(*run_ranks(gradients_of_all, ranks, settings), strict=True):
        named = [
            {of_whole(n, rank % 2 * (made is routed_two)): v for n, v in run.items()} for rank, run in enumerate(runs)
        ]
        assert {name for run in named for name in run} == set(expected)
        for run in named:
            for name, values in run.items():
                torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def uneven() -> str:
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": None}
    try:
        engine_of(Setting(2, config=config)).destroy()
    except ShardwiseError as error:
        return str(error)
    return ""


def test_a_batch_that_micro_batches_do_not_divide_is_refused_with_numbers_that_would_do() -> None:
    """pytorch/torchtitan#3856: a batch of 8 in 3 micro-batches."""
    for text in run_ranks(uneven, 2):
        assert (
            "8 is not a multiple of 3 x 1 = 3" in text and "Fix: train_batch_size = 6; or train_batch_size = 9" in text
        )


def packed(step: int, micro_batch: int, place: int) -> Any:
    """Return a row of several sequences, and their lengths, of which the number changes."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + place)
    lengths = [[3, 4, 2], [9], [1, 2, 3, 2, 1], [5, 4]][micro_batch]
    ids = torch.randint(0, WORDS, (1, sum(lengths)), generator=generator)
    return {"ids": ids, "lengths": torch.tensor(lengths), "longest": max(lengths)}, ids


class Packed(nn.Module):
    """Averages over each of the packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x = value["x"] if "x" in value else self.words(value["ids"])
        parts = self.linear(x).split(value["lengths"].tolist(), 1)
        x = torch.cat([part.cumsum(1) / value["longest"] for part in parts], 1)
        return {"x": x, "lengths": value["lengths"], "longest": value["longest"]}


class Unpacked(Logits):
    """Logits of packed sequences."""

    def forward(self, value: Any) -> torch.Tensor:
        return super().forward(value["x"])


def of_packed() -> list[Any]:
    return [*(LayerSpec(Packed) for _ in range(4)), LayerSpec(Unpacked)]


def test_packed_sequences_keep_their_lengths() -> None:
    """pytorch/pytorch#126600, pytorch/torchtitan#4071: facts of a micro-batch could not be divided."""
    compare([Setting(2, schedule, made=of_packed, batches=packed) for schedule in ("1f1b", "zb-h1", "zbv")], 2)


@pytest.mark.parametrize(
    ("stages", "ranks", "zero"), [(3, 3, 1), thorough(2, 2, 0), thorough(2, 4, 3), thorough(4, 4, 1)]
)
def test_the_gradient_norm_counts_a_tied_embedding_once(stages: int, ranks: int, zero: int) -> None:
    """NVIDIA/Megatron-LM#7228, pytorch/torchtitan#596: the norm was of a stage, or had the embedding twice."""
    setting = Setting(stages, zero=zero, steps=5)
    expected = alone(setting, ranks // stages)
    runs = run_ranks(train, ranks, setting)
    for run in runs:
        torch.testing.assert_close(run.norms, expected.norms, rtol=1e-6, atol=0)
    copies = [run.parameters["layers.0.weight"] for run in runs if "layers.0.weight" in run.parameters]
    assert len(copies) == 2 * ranks // stages and all(torch.equal(copy, copies[0]) for copy in copies)


def test_gradient_norms_of_layouts_differ_in_the_last_bits_only() -> None:
    """pytorch/torchtitan#4312: squares of stages are added in another order; schedules of one layout are equal."""
    settings = [Setting(2, schedule, made=untied) for schedule in ("1f1b", "gpipe", "zb-h1", "zbv", "interleaved")]
    one_f, gpipe, zb_h1, *others = next(iter(run_ranks(norms, 2, settings)))
    assert one_f == gpipe == zb_h1
    single = run_ranks(norms, 1, [replace(settings[0], stages=1)])[0][0]
    for found in [*others, single]:
        torch.testing.assert_close(found, one_f, rtol=2**-50, atol=0)


def norms(settings: list[Setting]) -> list[list[float]]:
    return [train(replace(setting, steps=1)).norms for setting in settings]


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "dualpipe-v", "1f1b"])
def test_a_schedule_that_needs_another_placement_names_the_right_one(name: str) -> None:
    """pytorch/torchtitan#774: users of ZBV met an assertion."""
    wrong, right = ("v", "loop") if name == "1f1b" else ("loop", "v")
    with pytest.raises(ShardwiseError, match=f"'{name}': placement is '{wrong}', expected '{right}'"):
        make_schedule(name, 2, 4, 2, wrong)
