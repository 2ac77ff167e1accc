"""What scripts do behind the engine's back is taken over, or refused with the way out."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError, UsageError
from tests.harness import on_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import Tensors, WholeSGD, engine_of, masters


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def made(seed: int) -> Backbone:
    torch.manual_seed(seed)
    return Backbone()


def begin(model: nn.Module, optimizer: torch.optim.Optimizer | None, stage: int, precision: str = "fp32") -> Any:
    return engine_of(model, stage, optimizer, bf16={"enabled": precision == "bf16"})


def step(engine: Any, number: int) -> None:
    x = torch.arange(6.0).view(2, 3) + number + dist.get_rank()
    engine.backward(engine(x.to(engine.backbone.weight.dtype)).mean())
    engine.step()


def changed_between_steps(stage: int, precision: str, kind: type, how: str) -> Tensors:
    """Train a step, put values in by `how`, train another one; or put them in before there is an engine."""
    wanted = {name: value.bfloat16().float() for name, value in made(1).state_dict().items()}
    wanted["head.bias"].fill_(1.0)
    model = made(0)
    with torch.no_grad():
        model.head.bias.fill_(1.001)  # what is put in differs from it by less than 16 bits can show
    if how == "before":
        model.load_state_dict(wanted)
    engine = begin(model, kind(model.parameters(), lr=1e-4), stage, precision)
    if how != "before":
        step(engine, 0)
    if how == "load":
        model.load_state_dict(wanted)
    elif how == "submodules":
        for name, child in model.named_children():
            part = {k.removeprefix(f"{name}."): v for k, v in wanted.items() if k.startswith(f"{name}.")}
            child.load_state_dict(part)
    elif how == "in place":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.zero_().add_(wanted[name])
    seen = masters(model)
    if how == "in place" and precision == "bf16":
        assert 1 < float(seen["head.bias"]) < 1.002  # kept
        del seen["head.bias"], wanted["head.bias"]
    assert how == "before" or all(torch.equal(value, wanted[name]) for name, value in seen.items())
    step(engine, 1)
    result = masters(model)
    engine.destroy()
    return {name: result[name] for name in wanted}


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [thorough(0, "fp32", torch.optim.SGD), (1, "bf16", WholeSGD), thorough(2, "bf16", torch.optim.SGD)],
)
@on_ranks(2)
def test_changes_between_steps_reach_the_master_weights(stage: int, precision: str, kind: type) -> None:
    expected = changed_between_steps(stage, precision, kind, "before")
    for how in ("load", "submodules", "in place"):
        for name, value in changed_between_steps(stage, precision, kind, how).items():
            assert torch.equal(value, expected[name]), (how, name)


@on_ranks(2)
def test_changes_that_cannot_be_taken_over_are_refused() -> None:
    model, wanted = made(0), made(1).state_dict()
    engine = begin(model, torch.optim.SGD(model.parameters()), 3)
    with pytest.raises((ReleasedParameterError, RuntimeError), match="GatheredParameters"):
        model.load_state_dict(wanted)
    engine.destroy()
    engine = begin(model, torch.optim.SGD(model.parameters()), 2)
    before = {id(p) for p in model.parameters()}
    with pytest.raises(UsageError, match="assign=True"):
        model.load_state_dict(wanted, assign=True)
    assert {id(p) for p in model.parameters()} == before
    engine.destroy()
    model.load_state_dict(wanted, assign=True)


def copied_by_state(model: nn.Module) -> nn.Module:
    other = Backbone()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_copies_of_a_model_are_plain(stage: int) -> None:
    """Copies are plain models that the engine knows nothing of; where values are missing, errors say what to do."""
    model = made(0)
    engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    step(engine, 0)  # at stages 1 and 2 new values are on their way

    def saved(value: Any) -> Any:
        torch.save(value, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    ways: list[Any] = [lambda: copy.deepcopy(model), lambda: saved(model), lambda: copied_by_state(model)]
    messages = []
    if stage == 3:
        for way in ways:
            with pytest.raises(ReleasedParameterError) as caught:
                way()
            messages.append(str(caught.value))
        assert len(model.state_dict(keep_vars=True)) == 4  # names, no values
    inside = engine.gathered() if stage == 3 else contextlib.nullcontext()
    with inside:
        copies = [way() for way in ways]
        values = {name: value.clone() for name, value in model.state_dict().items()}
    for other in copies:
        passes = engine.sharded.model_pass.usage.passes
        other(torch.ones(2, 3)).mean().backward()
        assert all(type(p) is nn.Parameter and p.grad is not None for p in other.parameters())
        assert all(torch.equal(value, values[name]) for name, value in other.state_dict().items())
        assert engine.sharded.model_pass.usage.passes == passes
    for way in (copy.deepcopy, saved):
        with pytest.raises(UsageError, match="save_checkpoint"):
            way(engine)
    step(engine, 1)
    assert len(messages) == (3 if stage == 3 else 0)
    assert all("engine.module_state_dict()" in message for message in messages)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


EXCHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "replace": (
        lambda model: setattr(model, "backbone", nn.Linear(3, 5)),
        "did not have when the engine was built: backbone.weight and 1 more",
    ),
    "wrap": (lambda model: setattr(model, "head", Wrapped(model.head)), ""),
    "resize": (
        lambda model: setattr(model.head.weight, "data", torch.ones(2, 5)),
        "'head.weight' was (1, 5) when the engine was built and is (2, 5)",
    ),
    "convert": (lambda model: model.double(), "is torch.float64 now"),
    "assign": (lambda model: setattr(model.head.weight, "data", torch.ones(1, 5)), "'head.weight' have been moved"),
}
"""Ways in which a script exchanges parameters, and what is said of them; only the first two at stage 3."""


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_parameters_that_have_been_exchanged_are_named(stage: int) -> None:
    for exchange, words in list(EXCHANGES.values())[: 2 if stage == 3 else 5]:
        for when in ("before forward", "before step"):
            model = made(0)
            engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
            step(engine, 0)
            with pytest.raises(UsageError, match=re.escape(words)) if words else contextlib.nullcontext():
                if when == "before forward":
                    exchange(model)
                engine.backward(engine(torch.ones(2, 3)).mean())
                if when == "before step":
                    exchange(model)
                engine.step()
            engine.destroy()


class Extensible(nn.Module):
    """Uses what has been attached to modules that had no parameters or no children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(3, 3), nn.Linear(3, 1), nn.Tanh()
        self.adapters, self.more, self.prompts = nn.ModuleDict(), nn.ModuleList(), nn.ParameterDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.first(x))
        if hasattr(self.first, "side"):
            y = y + self.first.side(x)
        for layer in [*self.adapters.values(), *self.more]:
            y = y + layer(y)
        for prompt in [*self.prompts.values(), *self.act.parameters()]:
            y = y * prompt
        return self.last(y)


ATTACHMENTS: dict[str, Callable[[Any], Any]] = {
    "first.side.weight and 1 more": lambda model: setattr(model.first, "side", nn.Linear(3, 3)),
    "adapters.new.weight": lambda model: model.adapters.update({"new": nn.Linear(3, 3)}),
    "more.0.weight": lambda model: model.more.append(nn.Linear(3, 3)),
    "prompts.new": lambda model: model.prompts.update({"new": nn.Parameter(torch.ones(3))}),
    "act.gain": lambda model: setattr(model.act, "gain", nn.Parameter(torch.ones(3))),
}


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_parameters_attached_to_something_empty_are_named(stage: int) -> None:
    for name, attach in ATTACHMENTS.items():
        torch.manual_seed(0)
        model = Extensible()
        engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
        attach(model)
        words = f"did not have when the engine was built: {name}"
        with pytest.raises(UsageError, match=words):
            engine(torch.ones(2, 3))
        with pytest.raises(UsageError, match=words):
            model(torch.ones(2, 3)).mean().backward()  # past the engine
            engine.step()
        engine.destroy()


# -- parameters that the optimizer does not have -----------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "optimizer"), [(0, True), (3, True), (2, False)])
@on_ranks(2)
def test_gradients_that_no_optimizer_will_use_are_dropped_with_one_warning(stage: int, optimizer: bool) -> None:
    with logged(logging.WARNING) as heard:
        model = Backbone()
        engine = begin(model, torch.optim.SGD(model.head.parameters(), lr=0.1) if optimizer else None, stage)
        assert not heard.lines
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).mean())
            assert all(p.grad is None for p in model.parameters())
            if optimizer:
                engine.step()
    engine.destroy()
    (warning,) = heard.lines
    assert ("2 parameters" in warning and "backbone.weight, backbone.bias" in warning) or not optimizer


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_unfrozen_parameters_are_named_when_stepping(stage: int) -> None:
    model = Backbone()
    model.backbone.requires_grad_(False)
    engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    model.backbone.requires_grad_(True)
    engine.backward(engine(torch.ones(2, 3)).mean())
    with pytest.raises(UsageError, match=r"2 parameters were frozen.*backbone\.weight, backbone\.bias"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_parameters_frozen_between_steps_are_named_before_anything_is_stepped(stage: int) -> None:
    model = made(0)
    engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), stage)
    step(engine, 0)
    before = masters(model)
    model.backbone.requires_grad_(False)
    with pytest.raises(UsageError, match=r"2 parameters were trained.*backbone\.weight, backbone\.bias"):
        step(engine, 1)
    assert all(torch.equal(value, before[name]) for name, value in masters(model).items())
    model.backbone.requires_grad_(True)
    engine.step()
    assert not torch.equal(masters(model)["backbone.weight"], before["backbone.weight"])


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_changes_of_the_optimizers_groups_are_refused_before_anything_is_stepped(stage: int) -> None:
    model = made(0)
    model.backbone.requires_grad_(False)
    outside = nn.Parameter(torch.ones(4))
    for added, words in (
        ([outside], r"added to SGD.*a tensor of shape \(4,\) that the model does not have"),
        ([model.backbone.bias], r"added to SGD.*backbone\.bias"),
        ([], "parameter groups of SGD have been changed"),
    ):
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        engine = begin(model, optimizer, stage)
        if added:
            optimizer.add_param_group({"params": added})
        else:
            optimizer.param_groups[0]["params"] = []
        engine.backward(engine(torch.ones(2, 3)).mean() + (outside.sum() if words.endswith("not have") else 0))
        with pytest.raises(UsageError, match=f"(?s){words}"):
            engine.step()
        engine.destroy()
    assert outside.tolist() == [1.0] * 4


# -- the optimizer's own step ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_optimizers_own_step_says_that_the_engine_steps() -> None:
    model = Backbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, returned, *_ = shardwise.initialize(
        model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 2}
    )
    assert returned is optimizer
    engine.backward(engine(torch.ones(2, 3)).mean())
    with pytest.raises(UsageError, match=r"SGD\.step\(\).*engine\.step\(\)"):
        optimizer.step()
    engine.step()  # the gradients are still there
    assert engine.get_global_grad_norm() > 0
    engine.destroy()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_the_optimizers_own_state_is_loaded_where_it_was_saved_only(stage: int) -> None:
    model = made(0)
    engine = begin(model, torch.optim.Adam(model.parameters(), lr=0.1), stage)
    step(engine, 0)
    optimizer = engine.optimizer
    own = copy.deepcopy(optimizer.state_dict())
    shared = [own]
    dist.broadcast_object_list(shared)
    plain = torch.optim.Adam(made(0).parameters(), lr=0.1).state_dict()
    optimizer.load_state_dict(own)
    others = pytest.raises(UsageError, match="of another rank")
    with others if stage == 3 and dist.get_rank() else contextlib.nullcontext():
        optimizer.load_state_dict(shared[0])
    with pytest.raises(UsageError, match=r"engine\.load_checkpoint\(\).*initialize\(\)"):
        optimizer.load_state_dict(plain)
    step(engine, 1)
    engine.destroy()
    optimizer.load_state_dict(plain)
