"""Unusual models: gradients of every parameter and buffers equal those of one process, in every kind of schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import PeerLostError, UsageError
from shardwise.pipe import LayerSpec
from tests.harness import run_ranks, thorough
from tests.pipeline.gradients import compare
from tests.pipeline.training import WIDTH, WORDS, Block, Logits, Setting, data, engine_of

KINDS = ("1f1b", "zb-h1", "zbv")
"""A schedule of whole backward passes, of split ones, and of two stages of a rank next to each other."""


class Same(nn.Module):
    """Returns its input."""

    def forward(self, x: Any) -> Any:
        return x


class Mlp(nn.Module):
    """Linear layers with an activation function that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class InPlace(nn.Linear):
    """Changes the activations that it receives."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0).add_(1.0)
        return super().forward(F.relu_(x))


class Views(nn.Linear):
    """Returns views: transposed, expanded, and a part of a tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, torch.Tensor) else value[0].transpose(0, 1) + value[1][0] + value[2]
        y = super().forward(x)
        return y.transpose(0, 1), y[:1].expand(3, *y.shape[1:]), y[..., ::2].repeat(1, 1, 2)


class Sum(nn.Module):
    """Adds up what `Views` returns."""

    def forward(self, value: Any) -> torch.Tensor:
        return value[0].transpose(0, 1) + value[1][0] + value[2]


class Twice(nn.Linear):
    """Returns one tensor under two names, and integers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, torch.Tensor) else value["a"] * 0.5 + value["b"][0]
        y = super().forward(x)
        return {"a": y, "b": [y, y.argmax(-1)]}


class Pick(nn.Module):
    """Uses a part of what `Twice` returns: one of the tensors gets no gradient."""

    def forward(self, value: Any) -> torch.Tensor:
        return value["b"][0] * F.one_hot(value["b"][1], WIDTH)


class Skip(nn.Linear):
    """Keeps the first output for all later layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, kept = value if isinstance(value, tuple) else (value, [])
        y = super().forward(x + sum(kept))
        return y, [*kept, y][:2]


class Last(nn.Module):
    """Joins what `Skip` has kept."""

    def forward(self, value: Any) -> torch.Tensor:
        return value[0] + sum(value[1])


class Normed(nn.Module):
    """A convolution with BatchNorm over the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Switching(nn.Linear):
    """Gives a gradient back for some micro-batches only: those of which the first word is even."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, even = value
        return (super().forward(x if even else x.detach()), even)


class Begin(nn.Embedding):
    """Returns words, and if the first one is even."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor) -> Any:
        even = bool(ids.flatten()[0] % 2 == 0)
        x = super().forward(ids)
        return (x if even else x.detach()), even


class First(nn.Module):
    """Returns the first item."""

    def forward(self, value: Any) -> torch.Tensor:
        return value[0]


class Alone(nn.Module):
    """Depends on its own parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight


class Choose(nn.Module):
    """Returns a parameter that it receives, for each row."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[:10].view(2, 5, WIDTH)


def between(*parts: Any) -> list[Any]:
    """Return layers between words and logits."""
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *parts, LayerSpec(Logits)]


def same() -> list[Any]:
    return between(LayerSpec(Same), LayerSpec(Same), LayerSpec(Block, WIDTH), LayerSpec(Same))


def mlp() -> list[Any]:
    return between(*(LayerSpec(Mlp) for _ in range(4)))


def in_place() -> list[Any]:
    return between(*(LayerSpec(InPlace) for _ in range(4)))


def in_place_first() -> list[Any]:
    acts = [part for _ in range(3) for part in (LayerSpec(nn.ReLU, inplace=True), LayerSpec(nn.Linear, WIDTH, WIDTH))]
    return between(*acts)


def views() -> list[Any]:
    return between(*(LayerSpec(Views) for _ in range(4)), LayerSpec(Sum))


def twice() -> list[Any]:
    return between(*(LayerSpec(Twice) for _ in range(4)), LayerSpec(Pick))


def skip() -> list[Any]:
    return between(*(LayerSpec(Skip) for _ in range(5)), LayerSpec(Last))


def normed() -> list[Any]:
    return between(*(LayerSpec(Normed) for _ in range(4)))


def switching() -> list[Any]:
    return [LayerSpec(Begin), *(LayerSpec(Switching) for _ in range(4)), LayerSpec(First), LayerSpec(Logits)]


def parameter_as_output() -> list[Any]:
    return [LayerSpec(Alone), *(LayerSpec(Same) for _ in range(2)), LayerSpec(Choose), LayerSpec(Logits)]


@pytest.mark.parametrize("checkpointing", [0, thorough(1)])
@pytest.mark.parametrize(
    "made",
    [mlp, twice, skip, switching, *map(thorough, (same, in_place, in_place_first, views, normed, parameter_as_output))],
)
def test_gradients_equal_those_of_one_process(made: Any, checkpointing: int) -> None:
    if made is in_place and checkpointing:
        pytest.skip("torch refuses to recompute from activations that have been changed in place")
    options = {"partition_method": "uniform", "activation_checkpoint_interval": checkpointing}
    compare([Setting(2, schedule, 0, made=made, options=options) for schedule in KINDS], 2)


def test_running_statistics_do_not_depend_on_recomputation_and_schedules() -> None:
    settings = [
        Setting(2, schedule, 1, made=normed, options={"partition_method": "uniform", **recompute})
        for recompute in ({}, {"activation_checkpoint_interval": 1})
        for schedule in KINDS
    ]
    compare(settings, 2)


def hidden() -> list[Any]:
    words = nn.Embedding(WORDS, WIDTH)
    return [words, *(LayerSpec(Block, WIDTH) for _ in range(3)), lambda x: F.linear(x, words.weight)]


def shared_statistics() -> list[Any]:
    norm = Normed()
    return [nn.Embedding(WORDS, WIDTH), norm, Block(WIDTH), norm, Logits()]


def failure(setting: Setting) -> str:
    engine = engine_of(setting)
    try:
        engine.train_batch(data(setting, 0))
    except (UsageError, PeerLostError) as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(("schedule", "checkpointing"), [thorough("1f1b", 0), ("zb-h1", 1)])
def test_functions_that_use_another_stage_s_weights_are_refused(schedule: str, checkpointing: int) -> None:
    """The weights would be a copy on each rank, and only one of them would be trained."""
    options = {"partition_method": "uniform", "activation_checkpoint_interval": checkpointing}
    found = run_ranks(failure, 2, Setting(2, schedule, made=hidden, options=options))
    assert "stage 1 of 2 (layers 2 to 4): the output depends on a trained tensor of shape (11, 8)" in found[1]
    assert "write both layers as TiedLayerSpec" in found[1] and "rank 1" in found[0]
    compare([Setting(1, schedule, made=hidden, options=options)], 1)


def test_running_statistics_of_a_layer_on_two_stages_are_refused() -> None:
    found = run_ranks(failure, 2, Setting(2, made=shared_statistics, options={"partition_method": "uniform"}))
    assert "layers.1 (Normed) is a layer of the stages 0, 1, and its forward pass changes the buffer norm." in found[0]
    compare([Setting(1, made=shared_statistics)], 1)


class Forces(nn.Linear):
    """Uses the gradient of its energy by its input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(own).square().sum(), own)
        found: torch.Tensor = super().forward(x) + force
        return found


def forces() -> list[Any]:
    return between(*(LayerSpec(Forces) for _ in range(4)))


def test_backward_passes_inside_of_a_forward_pass() -> None:
    """A schedule that computes gradients of weights later would take them for its own."""
    options = {"partition_method": "uniform"}
    compare([Setting(2, schedule, made=forces, options=options) for schedule in ("1f1b", "gpipe")], 2)
    found = run_ranks(failure, 2, Setting(2, "zb-h1", made=forces, options=options))
    assert any("a layer runs a backward pass inside of its forward pass" in text for text in found)


def several_steps(dynamic: bool) -> str:
    config = {"pipeline": {"dynamic_shape": dynamic}}
    setting = Setting(2, made=switching, options={"partition_method": "uniform"}, config=config)
    engine = engine_of(setting)
    try:
        for step in range(4):
            engine.train_batch(data(setting, step))
    except (UsageError, PeerLostError) as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_outputs_that_need_gradients_in_some_micro_batches_only_need_the_key_dynamic_shape() -> None:
    assert run_ranks(several_steps, 2, True) == ["", ""]
    text = run_ranks(several_steps, 2, False)[0]
    assert "float32[2, 5, 8] with gradient" in text and "Set `pipeline.dynamic_shape`" in text
