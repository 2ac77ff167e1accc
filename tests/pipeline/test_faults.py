"""Bad input of pipelines: errors that name stage, layer and fix, on every rank, and no rank that waits."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ConfigError, DesyncError, PeerLostError, PipelineError, UsageError
from shardwise.pipe import LayerSpec
from tests.harness import RankFailure, on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.pipeline.training import WIDTH, Block, Setting, batch, data, engine_of, layers, loss_of, model_of


def another(engine: Any, batches: list[Any]) -> None:
    if engine.is_last_stage():
        engine.eval_batch(iter(batches), num_micro_batches=2)
    else:
        engine.train_batch(iter(batches))


CALLS: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "another": (
        another,
        "rank 0 is in train_batch() of 4 micro-batches, and rank 1 in eval_batch() of 2 micro-batches",
    ),
    "short": (
        lambda engine, batches: engine.train_batch(iter(batches[: 4 - engine.is_last_stage()])),
        "train_batch(): 4 micro-batches are needed, and rank 1 has 3",
    ),
    "none": (lambda engine, _: engine.train_batch(), "4 micro-batches are needed, and rank 0 has 0, rank 1 has 0."),
    "no pairs": (
        lambda engine, batches: engine.train_batch(iter([inputs for inputs, _ in batches])),
        "expected a pair (inputs, labels)",
    ),
    "forward": (lambda engine, _: engine(torch.zeros(1)), "Call engine.train_batch() or engine.eval_batch()"),
    "backward": (lambda engine, _: engine.backward(torch.zeros(1)), "Call engine.train_batch()"),
    "step": (lambda engine, _: engine.step(), "Call engine.train_batch()"),
    "refresh": (lambda engine, _: engine.refresh(), "change the model, and call initialize() and load_checkpoint()"),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_calls_that_do_not_fit_are_refused_on_every_rank(name: str) -> None:
    engine, setting = engine_of(Setting(2)), Setting(2)
    engine.train_batch(data(setting, 0))
    call, text = CALLS[name]
    with pytest.raises(PipelineError) as error:
        call(engine, list(data(setting, 1)))
    assert text in str(error.value) and isinstance(error.value, UsageError)


@on_ranks(2)
def test_a_refused_batch_leaves_the_forms_of_messages() -> None:
    """Messages of training would be taken for those of evaluation."""
    engine, setting = engine_of(Setting(2)), Setting(2)
    engine.train_batch(data(setting, 0))
    engine.eval_batch(data(setting, 0))
    with pytest.raises(PipelineError, match="4 micro-batches are needed"):
        engine.train_batch(iter(list(data(setting, 1))[:1]))
    assert math.isfinite(engine.train_batch(data(setting, 1)))
    engine.destroy()


@on_ranks(3)
def test_a_data_loader_repeats_and_need_not_be_on_middle_ranks() -> None:
    """deepspeedai/DeepSpeed#5593: middle stages waited when steps exceeded the length of the loader."""
    engine = engine_of(Setting(3, micro_batches=2))
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataloader(list(data(Setting(3, micro_batches=3), 0)))
    losses = [float(engine.train_batch()) for _ in range(10)]
    assert losses[9] < losses[0]


class Wrong(Block):
    """Returns an object, or raises at the sixth call."""

    calls = 0
    raises = False

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        if self.raises and self.calls == 6:
            raise ValueError("a bad sample")
        return super().forward(x) if self.raises else object()


class Raising(Wrong):
    raises = True


def broken(kind: type[nn.Module]) -> tuple[str, str]:
    def made() -> list[Any]:
        return [*layers()[:2], LayerSpec(kind, WIDTH), *layers()[2:]]

    setting = Setting(2, made=made, options={"partition_method": [0, 3, 10]})
    engine = engine_of(setting)
    with pytest.raises((ValueError, UsageError, PeerLostError)) as error:
        for number in range(3):
            engine.train_batch(data(setting, number))
    return error.type.__name__, str(error.value)


def test_values_that_cannot_be_sent_and_stages_that_raise_end_the_batch_on_all_ranks() -> None:
    (name, text), other = run_ranks(broken, 2, Wrong)
    assert name == "UsageError" and "stage 0 of 2 (layers 0 to 2) has returned a value of type object" in text
    assert other[0] == "PeerLostError" and "rank 0" in other[1]
    (name, text), other = run_ranks(broken, 2, Raising)
    assert (name, text) == ("ValueError", "a bad sample")
    assert other[0] == "PeerLostError"


class Failing:
    """Loss that raises in the second micro-batch."""

    calls = 0

    def __call__(self, output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("a bad label")
        return loss_of(output, ids)


def longer(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)


def going_on_after_an_error() -> list[str]:
    setting, found = Setting(2, loss=Failing()), []
    engine = engine_of(setting)
    for call, batches in ((engine.train_batch, batch), (engine.train_batch, longer), (engine.eval_batch, longer)):
        with pytest.raises((ValueError, PeerLostError, PipelineError)) as error:
            call(data(replace(setting, batches=batches), 0))
        found.append(f"{error.type.__name__}: {error.value}")
    return found


def test_batches_after_one_that_an_error_has_ended_are_refused_on_all_ranks() -> None:
    """Messages would be taken for those of the batch that has ended."""
    first, last = run_ranks(going_on_after_an_error, 2)
    assert "PeerLostError" in first[0] and last[0] == "ValueError: a bad label"
    for texts, error in ((first, "PeerLostError"), (last, "ValueError: a bad label")):
        for text, call in zip(texts[1:], ("train_batch()", "eval_batch()"), strict=True):
            assert text.startswith(f"PipelineError: {call}: an error has ended an earlier batch on this rank (stage ")
            assert error in text and text.endswith("End the job, and resume from a checkpoint")


@pytest.mark.parametrize(
    ("stages", "section", "text"),
    [
        (3, {}, "pipeline.stages: is 3, but the number of ranks is 2; choose a divisor of 2"),
        (2, {"stages": 1}, "is 1, but the PipelineModule (num_stages) or the mesh (pp) has 2; remove one"),
        (2, {"schedule": "zbw"}, "did you mean 'zbv'"),
        (2, {"schedule": "zbv", "chunks": 3}, "3 stages on each rank, expected 2"),
        (2, {"schedule": "interleaved", "chunks": 8}, "16"),
    ],
)
@on_ranks(2)
def test_pipelines_that_cannot_be_built_are_refused(stages: int, section: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, UsageError)) as error:
        engine_of(Setting(stages, config={"pipeline": section}))
    assert text in str(error.value)


@on_ranks(2)
def test_an_optimizer_of_other_parameters_is_refused_on_every_rank() -> None:
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    optimizer = alone if dist.get_rank() == 0 else partial(torch.optim.SGD, lr=0.1)
    setting = Setting(2, given=lambda s: {"model": model_of(s.stages, s.made, s.loss), "optimizer": optimizer})
    with pytest.raises(UsageError if dist.get_rank() == 0 else DesyncError, match=r"not in the model.*callable"):
        engine_of(setting)


LOSSES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "vector": (lambda output, ids: output.sum(-1), "the loss is a tensor of shape (2, 5)"),
    "nothing": (lambda output, ids: None, "the loss is a NoneType"),
    "number": (lambda output, ids: 1.0, "the loss is a float"),
    "detached": (lambda output, ids: output.detach().sum(), "a tensor that depends on no trained parameter"),
}


def with_loss(name: str, evaluates: bool) -> str:
    setting = Setting(2, loss=LOSSES[name][0])
    engine = engine_of(setting)
    try:
        (engine.eval_batch if evaluates else engine.train_batch)(data(setting, 0))
    except (UsageError, PeerLostError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "evaluates"),
    [
        ("number", True),
        thorough("vector", False),
        *(thorough(name, False) for name in ("nothing", "number", "detached")),
    ],
)
def test_a_loss_that_is_no_number_is_refused_with_stage_and_micro_batch(name: str, evaluates: bool) -> None:
    first, second = run_ranks(with_loss, 2, name, evaluates)
    assert ("eval_batch(), " if evaluates else "stage 1 of 2 (layers") in second
    assert "micro-batch 0: " in second and LOSSES[name][1] in second
    assert "Correct loss_fn" in second and "lost rank 1" in first


@on_ranks(2)
def test_ranks_with_other_layers_are_refused_with_the_layer() -> None:
    """Each rank would build its own half, and a layer would be missing or be there twice."""
    own = layers() if dist.get_rank() == 0 else [*layers()[:3], LayerSpec(nn.Linear, WIDTH, WIDTH), *layers()[3:]]
    with pytest.raises(DesyncError, match="layer 3: Block of 88 parameters on rank 0, Linear of 72 parameters on"):
        engine_of(Setting(2, made=lambda: own))


class Wide(nn.Linear):
    """Gives activations of a width that the next layer does not take."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH + 1)


def of_wrong_widths() -> tuple[str, list[str]]:
    def made() -> list[Any]:
        return [*layers()[:4], LayerSpec(Wide), *layers()[4:]]

    setting = Setting(2, made=made, options={"partition_method": [0, 5, 10]})
    engine = engine_of(setting)
    with logged() as kept, pytest.raises((RuntimeError, PeerLostError)) as error:
        engine.train_batch(data(setting, 0))
    return error.type.__name__, kept.lines


def test_shapes_that_the_next_stage_does_not_take_are_shown_with_its_layer() -> None:
    (first, _), (second, records) = run_ranks(of_wrong_widths, 2)
    assert (first, second) == ("PeerLostError", "RuntimeError")
    shown = "stage 1 of 2 (layers 5 to 9), micro-batch 0: layers.5 (Block) was called with tensors of shape (2, 5, 9)"
    assert any(shown in text for text in records)


def dying(setting: Setting) -> str:
    def made() -> list[Any]:
        return [*layers()[:-2], LayerSpec(Dying, WIDTH), *layers()[-2:]]

    try:
        broken_engine = engine_of(replace(setting, made=made))
        broken_engine.train_batch(data(setting, 0))
    except PeerLostError as error:
        return str(error)
    return ""


class Dying(Block):
    """Ends its process in the second micro-batch."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            os._exit(7)
        return super().forward(x)


def test_a_stage_that_dies_ends_the_others_soon() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as error:
        run_ranks(dying, 2, Setting(2), timeout=60)
    assert error.value.rank == 1 and time.monotonic() - began < 30


@on_ranks(2)
def test_copies_of_a_tied_parameter_have_one_optimizer_setting() -> None:
    """Copies on two stages would drift apart."""
    optimizer = partial(torch.optim.AdamW, weight_decay=0.01 * dist.get_rank())
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(DesyncError, match=r"layers\.0\.weight.*'weight_decay': 0\.0.*'weight_decay': 0\.01"):
        shardwise.initialize(model=model_of(2, layers, loss_of), optimizer=optimizer, config=config)
