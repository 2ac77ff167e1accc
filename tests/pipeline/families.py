"""Models of transformers as pipelines, their data, and training with every gradient, in one process and on ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.zero.access import safe_get_full_optimizer_state
from tests.families import WORDS, build

LENGTH, BLOCKS = 6, 6
MORE: dict[str, dict[str, Any]] = {"t5": {"num_layers": 3, "num_decoder_layers": 3}}


def model_of(family: str) -> Any:
    """Return a model with equal weights in each call."""
    return build(family, **MORE.get(family, {"num_hidden_layers": BLOCKS}))


def batch(step: int, number: int, place: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch in which one row is padded."""
    generator = torch.Generator().manual_seed(10000 * step + 10 * number + place)
    ids = torch.randint(2, WORDS, (2, LENGTH), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 4:], labels[0, 4:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(case: Case, step: int, place: int) -> list[Any]:
    """Return the micro-batches of a step; the loss is that of the model."""
    return [(batch(step, number, place), None) for number in range(case.micro_batches)]


@dataclass(frozen=True)
class Case:
    """A run of a family; `tensor`: ranks of a tensor-parallel group."""

    family: str
    stages: int
    schedule: str = "1f1b"
    zero: int = 0
    micro_batches: int = 2
    steps: int = 5
    tensor: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """Losses and gradient norms by step; of each tensor the gradient of the first step, and the values after the last.

    Attributes:
        boxes: part of the whole tensor that this rank has, if not all; gradients are whole.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    boxes: dict[str, Any] = field(default_factory=dict)


def alone(family: str, micro_batches: int, places: int, steps: int = 5) -> Trained:
    """Train in one process with plain PyTorch."""
    model = model_of(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms, first = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(micro_batches):
            for place in range(places):
                loss = model(**batch(step, number, place)).loss / (micro_batches * places)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        first = first or {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        first = {name: grad.clone() for name, grad in first.items()} if step == 0 else first
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, norms, first, values, {name: b.clone() for name, b in model.named_buffers()})


def engine_of(case: Case) -> Any:
    """Return the engine of a case."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": {"stage": case.zero, "stage3_param_persistence_threshold": 0},
        "pipeline": {"stages": case.stages, "schedule": case.schedule},
        "tensor_parallel": {"autotp_size": case.tensor},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "gradient_clipping": 1e6,  # computes the norm
        **case.config,
    }
    return shardwise.initialize(model=model_of(case.family), config=config)[0]


def train(case: Case) -> Trained:
    """Train on this rank."""
    engine = engine_of(case)
    place = dist.get_rank() % (dist.get_world_size() // case.stages) // case.tensor
    losses, norms, first = [], [], {}
    tensors = list(zip(engine.sharded.registry, engine.sharded.registry.parameters, strict=True))
    for step in range(case.steps):
        losses.append(float(engine.train_batch(iter(batches(case, step, place)))))
        norms.append(float(engine.last_step.grad_norm))
        if step == 0:
            for tensor, parameter in tensors:
                momentum = safe_get_full_optimizer_state(parameter, "momentum_buffer")
                first[tensor.name] = torch.zeros(parameter.shape) if momentum is None else momentum.clone()
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    boxes = {tensor.name: tensor.box for tensor, _ in tensors if tensor.box is not None}
    engine.destroy()
    values = {tensor.name: parameter.detach().clone() for tensor, parameter in tensors}
    return Trained(losses, norms, first, values, buffers, boxes)


def part_of(values: torch.Tensor, box: Any) -> torch.Tensor:
    """Return a part of a tensor."""
    for dim, ranges in enumerate(box or ()):
        pairs = [ranges] if isinstance(ranges[0], int) else ranges
        index = torch.cat([torch.arange(first, end) for first, end in pairs])
        values = values.index_select(dim, index)
    return values


def check(found: Trained, expected: Trained, where: str, *, buffers: bool = True) -> None:
    """Compare a rank with one process: to 2e-6 of each tensor's norm, and 1e-7 of that of all.

    `buffers`: data-parallel ranks have running statistics of their own samples.
    """
    torch.testing.assert_close(found.losses, expected.losses[: len(found.losses)], rtol=1e-5, atol=1e-6, msg=where)
    torch.testing.assert_close(found.norms, expected.norms[: len(found.norms)], rtol=1e-5, atol=1e-6, msg=where)
    kinds = [("gradient", found.gradients, expected.gradients)]
    if len(found.losses) == len(expected.losses):
        kinds += [("value", found.values, expected.values)]
        kinds += [("buffer", found.buffers, expected.buffers)] if buffers else []
    for kind, mine, theirs in kinds:
        whole = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
        for name, values in mine.items():
            wanted = (part_of(theirs[name], found.boxes.get(name)) if kind == "value" else theirs[name]).double()
            error, size = float((values.double() - wanted).norm()), float(wanted.norm())
            assert error <= 2e-6 * size + 1e-7 * whole, f"{where}: {kind} of {name}: error {error:.1e} of {size:.1e}"
