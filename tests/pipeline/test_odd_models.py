"""Unusual models: gradients of every parameter and buffers equal those of one process, in every kind of schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.errors import PeerLostError, PipelineError, UsageError
from shardwise.pipe import LayerSpec
from shardwise.pipeline.split_backward import DeferredWeights
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


class Mixed(nn.Module):
    """All functions that are split, shared weights, weights used by hand, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 16), nn.LayerNorm(16)
        self.second, self.twice = nn.Linear(16, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.conv, self.gpt = nn.Conv1d(5, 5, 3, padding=1), Conv1D(WIDTH, WIDTH)
        self.gain, self.frozen = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)))
        x = self.twice(self.twice(x) * self.gain + x)
        x = self.conv(self.frozen(x))
        return self.gpt(x) @ self.twice.weight + F.linear(x, weight=self.second.weight.T[:WIDTH, :WIDTH])


def chain(*kinds: Any) -> list[Any]:
    """Return layers of some classes; those that take a width are given it."""
    sized = (Block, nn.Linear)
    return [LayerSpec(kind, *[WIDTH] * (kind in sized), *[WIDTH] * (kind is nn.Linear)) for kind in kinds]


def words(*kinds: Any) -> list[Any]:
    """Return layers between words and logits."""
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *chain(*kinds), LayerSpec(Logits)]


MODELS: dict[str, Any] = {
    "twice": partial(words, *[Twice] * 4, Pick),
    "skip": partial(words, *[Skip] * 5, Last),
    "switching": partial(chain, Begin, *[Switching] * 4, First, Logits),
    "several outputs": partial(words, *[Parts] * 4),
    "packed": partial(chain, *[Packed] * 4, Unpacked),
    "mixed": partial(words, *[Mixed] * 3),
    "mlp": partial(words, *[Mlp] * 4),
    "same": partial(words, Same, Same, Block, Same),
    "in place": partial(words, *[InPlace] * 4),
    "views": partial(words, *[Views] * 4, Sum),
    "normed": partial(words, *[Normed] * 4),
    "parameter as output": partial(chain, Alone, Same, Same, Choose, Logits),
}
QUICK = list(MODELS)[:6]


@pytest.mark.parametrize("checkpointing", [0, thorough(1)])
@pytest.mark.parametrize(
    ("name", "kinds"),
    [*((name, [KINDS[number % 3]]) for number, name in enumerate(QUICK)), *(thorough(name, KINDS) for name in MODELS)],
)
def test_gradients_equal_those_of_one_process(name: str, kinds: Sequence[str], checkpointing: int) -> None:
    if name == "in place" and checkpointing:
        pytest.skip("torch refuses to recompute from activations that have been changed in place")
    how: dict[str, Any] = {"options": {"partition_method": "uniform", "activation_checkpoint_interval": checkpointing}}
    how |= {"batches": packed} if name == "packed" else {}
    compare(
        [Setting(2, schedule, 3 * (name == "mixed"), made=MODELS[name], **how) for schedule in kinds],
        2,
        equal=name != "mixed",
    )


@pytest.mark.parametrize(
    "ways", [((0, "zb-h1"), (1, "zbv")), thorough((*itertools.product((0, 1), KINDS),))], ids=["two", "all"]
)
def test_running_statistics_do_not_depend_on_recomputation_and_schedules(ways: tuple[tuple[int, str], ...]) -> None:
    options = {"partition_method": "uniform"}
    settings = [
        Setting(2, schedule, 1, made=MODELS["normed"], options={**options, "activation_checkpoint_interval": interval})
        for interval, schedule in ways
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
        for step in range(setting.steps):
            engine.train_batch(data(setting, step))
    except (UsageError, PeerLostError) as error:
        return str(error)
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


def test_backward_passes_inside_of_a_forward_pass() -> None:
    """A schedule that computes gradients of weights later would take them for its own."""
    options = {"partition_method": "uniform"}
    compare(
        [Setting(2, schedule, made=partial(words, *[Forces] * 4), options=options) for schedule in ("1f1b", "gpipe")], 2
    )
    found = run_ranks(failure, 2, Setting(2, "zb-h1", made=partial(words, *[Forces] * 4), options=options))
    assert any("a layer runs a backward pass inside of its forward pass" in text for text in found)


def test_gradients_of_gradients_are_refused() -> None:
    model, deferred = nn.Linear(4, 4), DeferredWeights()
    x = torch.randn(2, 4, requires_grad=True)
    with deferred.collecting():
        output = model(x)
    with pytest.raises(PipelineError, match='Use the schedule "1f1b"'):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def test_outputs_that_need_gradients_in_some_micro_batches_only_need_the_key_dynamic_shape() -> None:
    made, options = MODELS["switching"], {"partition_method": "uniform"}
    fixed, dynamic = (
        run_ranks(
            failure, 2, Setting(2, made=made, options=options, steps=4, config={"pipeline": {"dynamic_shape": on}})
        )
        for on in (False, True)
    )
    assert dynamic == ["", ""]
    text = fixed[0]
    assert "float32[2, 5, 8] with gradient" in text and "Set `pipeline.dynamic_shape`" in text
