"""What scripts do behind the engine's back is taken over, or refused with the way out."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError, UsageError
from tests.harness import on_ranks, run_ranks
from tests.harness.logs import logged
from tests.harness.training import each, engine_of, masters


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class WholeSGD(torch.optim.SGD):
    """Does not say how it may be split: gets whole tensors."""


def made(seed: int) -> Backbone:
    torch.manual_seed(seed)
    return Backbone()


def begin(model: nn.Module, optimizer: torch.optim.Optimizer | None, stage: int, precision: str = "fp32") -> Any:
    return engine_of(model, stage, optimizer, bf16={"enabled": precision == "bf16"})


def step(engine: Any, number: int) -> None:
    x = torch.arange(6.0).view(2, 3) + number + dist.get_rank()
    engine.backward(engine(x.to(engine.backbone.weight.dtype)).mean())
    engine.step()


def changed_between_steps(stage: int, precision: str, kind: type, how: str) -> list[Any]:
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
    exact = all(torch.equal(value, wanted[name]) for name, value in seen.items())
    step(engine, 1)
    result = masters(model)
    engine.destroy()
    return [exact, {name: result[name] for name in wanted}]


@pytest.mark.parametrize(
    ("stage", "precision", "kind"), [(0, "fp32", torch.optim.SGD), (1, "bf16", WholeSGD), (2, "bf16", torch.optim.SGD)]
)
def test_changes_between_steps_reach_the_master_weights(stage: int, precision: str, kind: type) -> None:
    ways = [(stage, precision, kind, how) for how in ("before", "load", "submodules", "in place")]
    for (_, expected), *others in run_ranks(each, 2, changed_between_steps, ways):
        for exact, found in others:
            assert exact
            for name, value in found.items():
                assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_changes_that_cannot_be_taken_over_are_refused() -> None:
    model, wanted = made(0), made(1).state_dict()
    messages = []
    engine = begin(model, torch.optim.SGD(model.parameters()), 3)
    with pytest.raises((ReleasedParameterError, RuntimeError)) as caught:
        model.load_state_dict(wanted)
    messages.append(str(caught.value))
    engine.destroy()
    engine = begin(model, torch.optim.SGD(model.parameters()), 2)
    before = {id(p) for p in model.parameters()}
    with pytest.raises(UsageError) as assigned:
        model.load_state_dict(wanted, assign=True)
    assert {id(p) for p in model.parameters()} == before
    messages.append(str(assigned.value))
    engine.destroy()
    model.load_state_dict(wanted, assign=True)
    released, assigned = messages
    assert "GatheredParameters" in released
    assert "engine.load_module_state_dict" in released
    assert "assign=True" in assigned
    assert "engine.load_module_state_dict" in assigned


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
    engine.destroy()
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


def exchanged(stage: int) -> list[tuple[str, str]]:
    messages = []
    for name in list(EXCHANGES)[: 2 if stage == 3 else 5]:
        for when in ("before forward", "before step"):
            model = made(0)
            engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
            step(engine, 0)
            said = ""
            if when == "before forward":
                EXCHANGES[name][0](model)
            try:
                engine.backward(engine(torch.ones(2, 3)).mean())
                if when == "before step":
                    EXCHANGES[name][0](model)
                engine.step()
            except UsageError as error:
                said = str(error)
            messages.append((name, said))
            engine.destroy()
    return messages


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_have_been_exchanged_are_named(stage: int) -> None:
    for messages in run_ranks(exchanged, 2, stage):
        for name, said in messages:
            assert EXCHANGES[name][1] in said and bool(EXCHANGES[name][1]) == bool(said), (name, said)


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


def attached(stage: int) -> None:
    for name in (*ATTACHMENTS, "unfrozen"):
        torch.manual_seed(0)
        model = Extensible()
        engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
        if name == "unfrozen":
            model.prompts["new"] = nn.Parameter(torch.ones(3), requires_grad=False)
            engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()
            model.prompts["new"].requires_grad_(True)
            name = "prompts.new"
        else:
            ATTACHMENTS[name](model)
        with pytest.raises(UsageError, match=f"did not have when the engine was built: {name}") as in_forward:
            engine(torch.ones(2, 3))
        with pytest.raises(UsageError) as in_step:
            model(torch.ones(2, 3)).mean().backward()  # past the engine
            engine.step()
        assert str(in_forward.value) == str(in_step.value)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_attached_to_something_empty_are_named(stage: int) -> None:
    run_ranks(attached, 2, stage)


# -- parameters that the optimizer does not have -----------------------------------------------------------------------


def head_only(stage: int, optimizer: bool) -> list[Any]:
    with logged(logging.WARNING) as heard:
        model = Backbone()
        engine = begin(model, torch.optim.SGD(model.head.parameters(), lr=0.1) if optimizer else None, stage)
        quiet, kept = not heard.lines, []
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).mean())
            kept += [name for name, p in model.named_parameters() if p.grad is not None]
            if optimizer:
                engine.step()
    engine.destroy()
    return [quiet, kept, heard.lines]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_no_optimizer_will_use_are_dropped_with_one_warning(stage: int) -> None:
    for quiet, kept, warnings in run_ranks(head_only, 2, stage, True):
        assert quiet and not kept
        assert len(warnings) == 1
        assert "2 parameters" in warnings[0] and "backbone.weight, backbone.bias" in warnings[0]
    if stage == 0:
        return  # without an optimizer gradients are left where they are
    for quiet, kept, warnings in run_ranks(head_only, 2, stage, False):
        assert quiet and not kept
        assert len(warnings) == 1
        assert "4 parameters" in warnings[0]


def unfrozen(stage: int) -> str:
    model = Backbone()
    model.backbone.requires_grad_(False)
    engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    model.backbone.requires_grad_(True)
    engine.backward(engine(torch.ones(2, 3)).mean())
    with pytest.raises(UsageError) as caught:
        engine.step()
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_unfrozen_parameters_are_named_when_stepping(stage: int) -> None:
    for message in run_ranks(unfrozen, 2, stage):
        assert message.startswith("2 parameters were frozen")
        assert "backbone.weight, backbone.bias" in message


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_parameters_frozen_between_steps_are_named_before_anything_is_stepped(stage: int) -> None:
    model = made(0)
    engine = begin(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), stage)
    step(engine, 0)
    before = masters(model)
    model.backbone.requires_grad_(False)
    with pytest.raises(UsageError) as caught:
        step(engine, 1)
    kept = all(torch.equal(value, before[name]) for name, value in masters(model).items())
    model.backbone.requires_grad_(True)
    engine.step()
    moved = not torch.equal(masters(model)["backbone.weight"], before["backbone.weight"])
    engine.destroy()
    message = str(caught.value)
    assert message.startswith("2 parameters were trained") and "backbone.weight, backbone.bias" in message
    assert kept and moved


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_changes_of_the_optimizers_groups_are_refused_before_anything_is_stepped(stage: int) -> None:
    model = made(0)
    model.backbone.requires_grad_(False)
    outside = nn.Parameter(torch.ones(4))
    messages = []
    for change in ("outside", "unfrozen", "emptied"):
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        engine = begin(model, optimizer, stage)
        if change == "emptied":
            optimizer.param_groups[0]["params"] = []
        else:
            optimizer.add_param_group({"params": [outside if change == "outside" else model.backbone.bias]})
        loss = engine(torch.ones(2, 3)).mean() + (outside.sum() if change == "outside" else 0)
        engine.backward(loss)
        with pytest.raises(UsageError) as caught:
            engine.step()
        messages.append(str(caught.value))
        engine.destroy()
    assert outside.tolist() == [1.0] * 4
    outside, unfrozen, emptied = messages
    assert "added to SGD" in outside and "a tensor of shape (4,) that the model does not have" in outside
    assert "added to SGD" in unfrozen and "backbone.bias" in unfrozen
    assert "parameter groups of SGD have been changed" in emptied


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
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    engine.step()  # the gradients are still there
    assert engine.get_global_grad_norm() > 0
    engine.destroy()
    optimizer.step()
    message = str(caught.value)
    assert message.startswith("SGD.step()")
    assert "engine.step()" in message


def own_state(stage: int) -> list[str]:
    """Load the optimizer's own state: this rank's, rank 0's, and that of a plain optimizer."""
    model = made(0)
    engine = begin(model, torch.optim.Adam(model.parameters(), lr=0.1), stage)
    step(engine, 0)
    optimizer = engine.optimizer
    own = copy.deepcopy(optimizer.state_dict())
    shared = [own]
    dist.broadcast_object_list(shared)
    messages = []
    plain = torch.optim.Adam(made(0).parameters(), lr=0.1)
    for state in (own, shared[0], plain.state_dict()):
        try:
            optimizer.load_state_dict(state)
            messages.append("")
        except UsageError as error:
            messages.append(str(error))
    step(engine, 1)
    engine.destroy()
    optimizer.load_state_dict(plain.state_dict())
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizers_own_state_is_loaded_where_it_was_saved_only(stage: int) -> None:
    first, second = run_ranks(own_state, 2, stage)
    for own, shared, plain in (first, second):
        assert not own and "initialize()" in plain and "engine.load_checkpoint()" in plain
        assert ("of another rank" in shared) == (stage == 3 and shared is second[1])
