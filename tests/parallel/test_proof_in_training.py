"""Code that runs in training only is compared with one process, too; both passes leave the model unchanged."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention
from shardwise.parallel.recording import Passes
from tests.harness import run_ranks
from tests.parallel.models import GPT, data, first_step, llama, sharing

Change = Callable[[torch.Tensor], torch.Tensor]


class InTraining(nn.Module):
    """Changes its input in training."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x) if self.training else x


class Counting(nn.Module):
    """Counts its calls in an integer, a list and a buffer, and adds their number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.shapes = 0, []
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(list(x.shape))
        self.number += 1
        return x + self.calls + self.number


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = DistributedAttention(scaled_dot_product_attention, scatter_idx=1, gather_idx=2)

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.shared(*args, dropout_p=0.3 if self.training else 0.0, **kwargs)


def drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.8).div_(0.8)


def invisible(x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(numpy.random.rand(*x.shape)).to(x.dtype)


def long(x: torch.Tensor) -> torch.Tensor:
    if len(x) < 2:
        raise ValueError("one row only")
    return x


class MixedBackward(torch.autograd.Function):
    """Identity, whose gradient is centred over the tokens that a rank has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(1, keepdim=True)


def hooked(hook: Change) -> Change:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if y.requires_grad:
            y.register_hook(hook)
        return y

    return change


CHANGES: dict[str, Change] = {
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "shift": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "norm of tokens": lambda x: F.normalize(x, dim=1),
    "dropout": lambda x: F.dropout(F.dropout1d(x, 0.2), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2),
    "drop path": drop_path,
    "noise": lambda x: x + torch.randn_like(x),
    "by chance": lambda x: x * 2 if random.random() < 0.5 else x,
    "one by chance": lambda x: x - x[:, int(torch.randint(x.shape[1], ()))][:, None],
    "invisible": invisible,
    "long": long,
    "backward": MixedBackward.apply,
    "tensor hook": hooked(lambda gradient: gradient - gradient.mean(1, keepdim=True)),
    "hook of tokens": hooked(lambda gradient: 2 * gradient),
}
REFUSED = ("mean", "shift", "norm of tokens")
MIXED = ("backward", "tensor hook")
WARNED = {
    "one by chance": r"blocks\.0\.norm2 returns other numbers \(.*; on rank \d the model draws random numbers",
    "invisible": r"; on rank \d blocks\.0\.norm2 returns other numbers in each pass",
    "long": r"on rank 0 ValueError behind \S+ when it runs on a rank's own tokens \(one row only\)",
    "hook of a module": r"the backward hook model\.<locals>\.<lambda> of blocks\.0 gets gradients of a rank's own",
}


def model(kind: str) -> Any:
    torch.manual_seed(7)
    if kind.startswith("llama"):
        made: Any = llama(shared=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames it
            made.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": kind == "llama: reentrant"}
            )
        return made
    made = GPT(shared=True)
    if kind == "attention":
        made.blocks[0].attend = Attention()
    elif kind == "hook of a module":
        made.blocks[0].register_full_backward_hook(lambda module, given, made: None)
    elif kind == "counting":
        made.blocks[0].norm2 = Counting()
    elif kind == "experts":
        few = {"capacity_factor": 0.5, "eval_capacity_factor": 4.0, "min_capacity": 0}
        made.blocks[0].norm2 = First(MoE(12, nn.Linear(12, 12), num_experts=4, **few))
    else:
        made.blocks[0].norm2 = InTraining(CHANGES[kind])
    return made


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


def begun(kinds: list[str], stage: int) -> dict[str, tuple[str, list[str]]]:
    """Return for each model how a training step ends, and warnings."""
    found = {}
    for kind in kinds:
        made = model(kind)
        engine = sharing(made, stage)
        random.seed(3)
        data(0, 1, length=30)  # as the step does
        before = states()
        found[kind] = first_step(engine)
        if kind == "counting":
            counting = made.blocks[0].norm2
            assert (counting.calls, len(counting.shapes), int(counting.number)) == (1, 1, 1)
            assert states() == before
    return found


OTHERS = ("counting", "hook of a module", "attention", "experts", "llama", "llama: reentrant")


def test_code_that_runs_in_training_only_is_compared() -> None:
    for rank, found in enumerate(run_ranks(begun, 2, [*CHANGES, *OTHERS], 3)):
        for kind, (end, told) in found.items():
            if kind in REFUSED:
                words = (
                    r"than in one process; on rank \d blocks\.0\.norm2 returns other numbers .*, in training mode\. "
                )
                assert re.search(words, end), (kind, end)
                continue
            if kind in MIXED:
                words = r"on rank \d blocks\.0 \(Block\) has another gradient of its input with random weights"
                assert re.search(words, end), (kind, end)
                continue
            assert end == "trains", (kind, end)
            if kind in WARNED and rank == 0:
                assert len(told) == 1 and re.search(WARNED[kind], told[0]), (kind, told)
            else:
                assert told == [], (kind, told)


def passes(kinds: list[str]) -> list[int]:
    found = []
    for kind in kinds:
        with mock.patch.object(Passes, "_record", autospec=True, side_effect=Passes._record) as record:
            begun([kind], 0)
        found.append(record.call_count)
    return found


def test_a_model_that_returns_the_same_in_training_runs_three_times() -> None:
    kinds = ["counting", "llama", "attention", "dropout", "drop path", "noise", "mean"]
    for found in run_ranks(passes, 2, kinds):
        assert dict(zip(kinds, found, strict=True)) == {
            **dict.fromkeys(kinds, 3),
            "attention": 4,
            "noise": 4,
            "mean": 5,
        }
