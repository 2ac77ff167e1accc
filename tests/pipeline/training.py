"""A small language model as layers of a pipeline, and its training in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import run_ranks
from tests.harness.training import each

WORDS, WIDTH, ROWS, LENGTH = 11, 8, 2, 5
MICRO_BATCHES = 4
CLIP = 0.5


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def head(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tied head."""
    return F.linear(x, embedding.weight)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def layers(blocks: int = 6) -> list[Any]:
    """Return the layers: a tied embedding, blocks, a norm, the head."""
    return [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(Block, WIDTH) for _ in range(blocks)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=head),
    ]


class Logits(nn.Linear):
    """A head of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS, bias=False)


def untied() -> list[Any]:
    """Return the layers with a head of its own."""
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *layers()[1:-1], LayerSpec(Logits)]


def model_of(
    stages: int | None, made: Callable[[], list[Any]] = layers, loss: Any = loss_of, **options: Any
) -> PipelineModule:
    """Return the model with equal weights on any number of stages."""
    torch.manual_seed(0)
    return PipelineModule(made(), num_stages=stages, loss_fn=loss, **options)


def batch(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of a micro-batch of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + place)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return ids, ids


@dataclass(frozen=True)
class Setting:
    """A training run.

    Attributes:
        config: further sections.
        made: makes the layers.
        batches: makes inputs and labels of a step, micro-batch and place.
        options: arguments of the PipelineModule.
        given: makes the arguments of `initialize` of a setting; None: a PipelineModule of the layers.
        whole: makes the model of one process of a setting; None: all layers.
    """

    stages: int = 2
    schedule: str = "1f1b"
    zero: int = 0
    micro_batches: int = MICRO_BATCHES
    steps: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[], list[Any]] = layers
    loss: Any = loss_of
    batches: Callable[[int, int, int], Any] = batch
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[Setting], dict[str, Any]] | None = None
    whole: Callable[[Setting], nn.Module] | None = None


@dataclass
class Run:
    """Losses and gradient norms by step, parameters by name, and how many optimizer steps were skipped."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    skipped: int = 0


def whole_of(setting: Setting) -> nn.Module:
    """Return the model of one process."""
    if setting.whole is not None:
        return setting.whole(setting)
    options = {key: value for key, value in setting.options.items() if key != "partition_method"}
    model = model_of(1, setting.made, setting.loss, **options)
    if dist.is_initialized():
        model.build([0], 1)
    return model


def alone(setting: Setting, places: int) -> Run:
    """Train in one process with plain PyTorch, on the data of all places."""
    model = whole_of(setting)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses, norms = [], []
    for step in range(setting.steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(setting.micro_batches):
            for place in range(places):
                inputs, labels = setting.batches(step, number, place)
                loss = setting.loss(model(inputs), labels) / (setting.micro_batches * places)
                loss.backward()
                total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(total)
    return Run(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def engine_of(setting: Setting) -> Any:
    """Return the engine of a setting."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": setting.zero, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": setting.schedule, **setting.config.get("pipeline", {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        **{key: value for key, value in setting.config.items() if key != "pipeline"},
    }
    if setting.given is not None:
        return shardwise.initialize(config=config, **setting.given(setting))[0]
    model = model_of(setting.stages, setting.made, setting.loss, **setting.options)
    return shardwise.initialize(model=model, config=config)[0]


def data(setting: Setting, step: int) -> Iterator[Any]:
    """Return the micro-batches of a step on this rank."""
    place = dist.get_rank() % (dist.get_world_size() // setting.stages)
    return iter([setting.batches(step, number, place) for number in range(setting.micro_batches)])


def train(setting: Setting, first: int = 0, load: str | None = None, save: str | None = None) -> Run:
    """Train on this rank; the parameters are those of this rank's stages."""
    engine = engine_of(setting)
    if load is not None:
        engine.load_checkpoint(load)
    losses, norms = [], []
    for step in range(first, first + setting.steps):
        losses.append(float(engine.train_batch(data(setting, step))))
        norms.append(float(engine.last_step.grad_norm))
    if save is not None:
        engine.save_checkpoint(save)
    engine.destroy()  # parameters are whole then
    values = {n: p.detach().clone().float() for n, p in engine.module.named_parameters()}
    return Run(losses, norms, values, engine.skipped_steps)


def check(runs: Sequence[Run], expected: Run) -> None:
    """Compare ranks with one process: losses and norms on all ranks, and the parameters that each has."""
    for run in runs:
        assert run.losses == runs[0].losses and run.norms == runs[0].norms
        torch.testing.assert_close(run.losses, expected.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=1e-6)
        for name, values in run.parameters.items():
            torch.testing.assert_close(values, expected.parameters[name], rtol=0, atol=1e-6, msg=name)
    assert {name for run in runs for name in run.parameters} == set(expected.parameters)


def compare_training(settings: list[Setting], ranks: int) -> list[list[Run]]:
    """Compare settings with one process, and return the runs by setting and rank."""
    expected = alone(settings[0], ranks // settings[0].stages)
    by_setting = [list(runs) for runs in zip(*run_ranks(each, ranks, train, [(one,) for one in settings]), strict=True)]
    for runs in by_setting:
        check(runs, expected)
    return by_setting
