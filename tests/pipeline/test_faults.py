"""Bad input of pipelines: errors that name stage, layer and fix, on every rank, and no rank that waits."""

from __future__ import annotations

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
from shardwise.errors import ConfigError, DesyncError, PeerLostError, PipelineError, ShardwiseError, UsageError
from shardwise.pipe import LayerSpec, PipelineModule
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.logs import logged
from tests.pipeline.training import WIDTH, Block, Setting, data, engine_of, layers, loss_of, model_of


def refused(setting: Setting, run: Callable[[Any, Setting], Any]) -> tuple[str, str]:
    """Return type and text of the error that a call raises on this rank."""
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    try:
        run(engine, setting)
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    finally:
        engine.destroy()
    return "", ""


def short(engine: Any, setting: Setting) -> None:
    engine.train_batch(iter(list(data(setting, 1))[: 4 - engine.is_last_stage()]))


def none(engine: Any, setting: Setting) -> None:
    engine.train_batch()


def not_pairs(engine: Any, setting: Setting) -> None:
    engine.train_batch(iter([inputs for inputs, _ in data(setting, 1)]))


def forward(engine: Any, setting: Setting) -> None:
    engine(torch.zeros(1))


def backward(engine: Any, setting: Setting) -> None:
    engine.backward(torch.zeros(1))


def step(engine: Any, setting: Setting) -> None:
    engine.step()


def refresh(engine: Any, setting: Setting) -> None:
    engine.refresh()


def another(engine: Any, setting: Setting) -> None:
    if engine.is_last_stage():
        engine.eval_batch(data(setting, 1), num_micro_batches=2)
    else:
        engine.train_batch(data(setting, 1))


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (another, "rank 0 is in train_batch() of 4 micro-batches, and rank 1 in eval_batch() of 2 micro-batches"),
        (short, "train_batch(): 4 micro-batches are needed, and rank 1 has 3"),
        (none, "4 micro-batches are needed, and rank 0 has 0, rank 1 has 0. Every rank with the first or the last"),
        (not_pairs, "expected a pair (inputs, labels)"),
        (forward, "Call engine.train_batch() or engine.eval_batch()"),
        (backward, "Call engine.train_batch()"),
        (step, "Call engine.train_batch()"),
        (refresh, "Save a checkpoint, change the model, and call initialize() and load_checkpoint()"),
    ],
)
def test_calls_that_do_not_fit_are_refused_on_every_rank(run: Any, text: str) -> None:
    for name, message in run_ranks(refused, 2, Setting(2), run):
        assert name == "PipelineError" and text in message


def test_a_data_loader_repeats_and_need_not_be_on_middle_ranks() -> None:
    """deepspeedai/DeepSpeed#5593: middle stages waited when steps exceeded the length of the loader."""
    for losses in run_ranks(of_loader, 3):
        assert len(losses) == 10 and losses[9] < losses[0]


def of_loader() -> list[float]:
    setting = Setting(3, micro_batches=2)
    engine = engine_of(setting)
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataloader(list(data(Setting(3, micro_batches=3), 0)))
    losses = [float(engine.train_batch()) for _ in range(10)]
    engine.destroy()
    return losses


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
    found = ("", "")
    try:
        for number in range(3):
            engine.train_batch(data(setting, number))
    except (ValueError, UsageError, PeerLostError) as error:
        found = type(error).__name__, str(error)
    engine.destroy()
    return found


def test_values_that_cannot_be_sent_and_stages_that_raise_end_the_batch_on_all_ranks() -> None:
    (name, text), other = run_ranks(broken, 2, Wrong)
    assert name == "UsageError" and "stage 0 of 2 (layers 0 to 2) has returned a value of type object" in text
    assert other[0] == "PeerLostError" and "rank 0" in other[1]
    (name, text), other = run_ranks(broken, 2, Raising)
    assert (name, text) == ("ValueError", "a bad sample")
    assert other[0] == "PeerLostError"


def built(stages: int | None, config: dict[str, Any], **options: Any) -> tuple[str, str]:
    try:
        model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, **options)
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **config}
        shardwise.initialize(model=model, config=settings)[0].destroy()
    except (ConfigError, UsageError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("stages", "config", "text"),
    [
        (3, {}, "pipeline.stages: is 3, but there are 2 ranks; choose a divisor of 2"),
        (
            2,
            {"pipeline": {"stages": 1}},
            "is 1, but the PipelineModule (num_stages) or the mesh (pp) has 2; remove one",
        ),
        (2, {"pipeline": {"schedule": "zbw"}}, "did you mean 'zbv'"),
        (2, {"pipeline": {"schedule": "zbv", "chunks": 3}}, "3 stages on each rank, expected 2"),
        (2, {"pipeline": {"schedule": "interleaved", "chunks": 8}}, "16"),
    ],
)
def test_pipelines_that_cannot_be_built_are_refused(stages: Any, config: dict[str, Any], text: str) -> None:
    for _, message in run_ranks(built, 2, stages, config):
        assert text in message


def test_two_batches_after_an_ordinary_backward_pass() -> None:
    """deepspeedai/DeepSpeed#7787: a nested backward pass made the pipeline wait."""
    assert run_ranks(after_another, 2) == [True, True]


def after_another() -> bool:
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    setting = Setting(2)
    engine = engine_of(setting)
    losses = []
    for number in range(2):
        losses.append(float(engine.train_batch(data(setting, number))))
        plain(torch.ones(1, 2)).sum().backward()
    engine.destroy()
    return all(map(torch.isfinite, map(torch.tensor, losses)))


def test_pipeline_errors_are_usage_errors() -> None:
    assert issubclass(PipelineError, UsageError)


def vector(output: torch.Tensor, ids: torch.Tensor) -> Any:
    return output.sum(-1)


def nothing(output: torch.Tensor, ids: torch.Tensor) -> Any:
    return None


def number(output: torch.Tensor, ids: torch.Tensor) -> Any:
    return 1.0


def detached(output: torch.Tensor, ids: torch.Tensor) -> Any:
    return output.detach().sum()


def with_loss(loss: Any, evaluates: bool) -> str:
    setting = Setting(2, loss=loss)
    engine = engine_of(setting)
    try:
        (engine.eval_batch if evaluates else engine.train_batch)(data(setting, 0))
    except (UsageError, PeerLostError) as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (vector, "the loss is a tensor of shape (2, 5)"),
        thorough(nothing, "the loss is a NoneType"),
        thorough(number, "the loss is a float"),
        thorough(detached, "the loss is a tensor that depends on no trained parameter"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_with_stage_and_micro_batch(loss: Any, text: str) -> None:
    first, second = run_ranks(with_loss, 2, loss, False)
    assert "stage 1 of 2 (layers" in second and f"micro-batch 0: {text}" in second and "Correct loss_fn" in second
    assert "lost rank 1" in first


def test_evaluation_refuses_a_loss_that_is_no_number() -> None:
    assert "eval_batch(), micro-batch 0: the loss is a float" in run_ranks(with_loss, 2, number, True)[1]


def of_other_layers() -> str:
    own = layers() if dist.get_rank() == 0 else [*layers()[:3], LayerSpec(nn.Linear, WIDTH, WIDTH), *layers()[3:]]
    try:
        engine_of(Setting(2, made=lambda: own)).destroy()
    except ShardwiseError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_ranks_with_other_layers_are_refused_with_the_layer() -> None:
    """Each rank would build its own half, and a layer would be missing or be there twice."""
    for text in run_ranks(of_other_layers, 2):
        assert "DesyncError" in text and "layer 3: Block of 88 parameters on rank 0, Linear of 72 parameters on" in text


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
    engine.destroy()
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


def other_groups() -> str:
    model = model_of(2, layers, loss_of)
    optimizer = partial(grouped, decay=0.01 * dist.get_rank())
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(DesyncError) as caught:
        shardwise.initialize(model=model, optimizer=optimizer, config=config)
    return str(caught.value)


def grouped(parameters: Any, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=decay)


def test_copies_of_a_tied_parameter_have_one_optimizer_setting() -> None:
    """Copies on two stages would drift apart."""
    for text in run_ranks(other_groups, 2):
        assert "optimizer group of the tied parameter layers.0.weight" in text
        assert "'weight_decay': 0.0" in text and "'weight_decay': 0.01" in text
