"""Before training a model over shared sequences is compared with itself over whole ones: what differs is named."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from shardwise.errors import UsageError
from shardwise.moe import MoE
from shardwise.parallel import DistributedAttention, share_attention, split
from tests.families import build
from tests.harness import on_ranks, thorough
from tests.parallel.models import GPT, data, first_step, llama, loss_of, sharing, warned

Change = Callable[[torch.Tensor], torch.Tensor]


class OwnPlaces(GPT):
    """Positions begin anew on each rank."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, torch.arange(input_ids.shape[1]).view(1, -1))


class Mean(nn.Module):
    """Takes the mean over the tokens that a rank has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class Plain(nn.Module):
    """Attention to the tokens that it is given."""

    def forward(self, *args: torch.Tensor, **kwargs: bool) -> torch.Tensor:
        return scaled_dot_product_attention(*args, **kwargs)


def one_layer_alone() -> nn.Module:
    model = GPT(shared=True)
    model.blocks[1].attend = Plain()
    return model


def mean_over_tokens() -> nn.Module:
    model = GPT(shared=True)
    model.blocks[0].norm2 = Mean()
    return model


class Pooled(GPT):
    """Returns what is made of the logits of all tokens that a rank has."""

    def __init__(self, pool: Change) -> None:
        super().__init__(shared=True)
        self.pool = pool

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.pool(super().forward(input_ids, position_ids))


MODELS = {
    "right": lambda: GPT(shared=True),
    "llama": lambda: llama(shared=True),
    # its loss takes what hooks collect
    "mixtral": lambda: share_attention(build("mixtral", use_cache=False, attn_implementation="sdpa"), "sdpa"),
    "own tokens": one_layer_alone,
    "own places": lambda: OwnPlaces(shared=True),
    "mean": mean_over_tokens,
}
NAMED = {
    "own tokens": r"blocks\.1\.attend returns",
    "own places": r"places is given",
    "mean": r"blocks\.0\.norm2 returns",
}


POOLED: dict[str, tuple[Change, str]] = {
    "first token": (lambda x: x[:, 0], r"other numbers for a sequence \(output 0 of shape \[1, \d+\]"),
    "log of a sum": (lambda x: x.logsumexp((0, 1, 2)), r"a loss that is neither a mean nor a sum of the ranks' losses"),
    "pooled loss": (
        lambda x: x.mean(1).square().sum(),
        r"^trains: .* the loss that Pooled returns is no mean of the ranks' losses",
    ),
    "mean loss": (lambda x: x.square().mean(), r"^trains: $"),
}


@on_ranks(2)
def test_outputs_of_whole_sequences_that_a_rank_takes_from_its_tokens_are_named() -> None:
    for name, (pool, words) in POOLED.items():
        torch.manual_seed(7)
        engine = sharing(Pooled(pool), 0)
        batch = split(data(0, 1, length=30))
        try:
            with warned() as texts:
                engine.backward(engine(batch["input_ids"], batch["position_ids"]).mean())
            found = "trains: " + " ".join(texts)
        except UsageError as error:
            found = str(error)
        if dist.get_rank() == 0 or name != "pooled loss":  # rank 0 warns
            assert re.search(words, found), (name, found)
        engine.destroy()


@pytest.mark.parametrize("more", [{}, thorough({"bf16": {"enabled": True}})], ids=["fp32", "bf16"])
@on_ranks(2)
def test_what_differs_from_one_process_is_named(more: dict[str, Any]) -> None:
    for kind, model in MODELS.items():
        torch.manual_seed(7)
        end, _ = first_step(sharing(model(), **more))
        name = NAMED.get(kind)
        words = rf"computes something else than in one process; on rank \d {name} other numbers" if name else "^trains$"
        assert re.search(words, end), (kind, end)


@on_ranks(2)
def test_hooks_of_a_script_see_nothing_of_the_comparison() -> None:
    torch.manual_seed(7)
    model, lengths = GPT(shared=True), []
    model.blocks[0].register_forward_hook(lambda _, __, made: lengths.append(len(made)))
    engine = sharing(model)
    for step in range(2):
        loss, tokens = loss_of(engine, split(data(step, 1, length=30)))
        engine.backward(loss, weight=tokens)
        engine.step()
    assert len(lengths) == 2


# -- code that runs in training only is compared, too; both passes leave the model unchanged ---------------------------


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
OTHER_NUMBERS = r"than in one process; on rank \d blocks\.0\.norm2 returns other numbers .*, in training mode\. "
OTHER_GRADIENT = r"on rank \d blocks\.0 \(Block\) has another gradient of its input with random weights"
REFUSED = {
    **dict.fromkeys(("mean", "shift", "norm of tokens"), OTHER_NUMBERS),
    **dict.fromkeys(("backward", "tensor hook"), OTHER_GRADIENT),
}
WARNED = {
    "one by chance": r"blocks\.0\.norm2 returns other numbers \(.*; on rank \d the model draws random numbers",
    "invisible": r"; on rank \d blocks\.0\.norm2 returns other numbers in each pass",
    "long": r"on rank 0 ValueError behind \S+ when it runs on a rank's own tokens \(one row only\)",
    "hook of a module": r"the backward hook changed\.<locals>\.<lambda> of blocks\.0 gets gradients of a rank's own",
}


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


def changed(kind: str) -> Any:
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


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


OTHERS = ("counting", "hook of a module", "attention", "experts", "llama", "llama: reentrant")


QUICK = ["mean", "drop path", "one by chance", "backward", "counting", "hook of a module", "llama"]


@pytest.mark.parametrize("kinds", [QUICK, thorough([*CHANGES, *OTHERS])], ids=["some", "all"])
@on_ranks(2)
def test_code_that_runs_in_training_only_is_compared(kinds: list[str]) -> None:
    for kind in kinds:
        made = changed(kind)
        engine = sharing(made, 3)
        random.seed(3)
        data(0, 1, length=30)  # as the step does
        before = states()
        end, told = first_step(engine)
        if kind == "counting":
            counting = made.blocks[0].norm2
            assert (counting.calls, len(counting.shapes), int(counting.number)) == (1, 1, 1)
            assert states() == before
        assert re.search(REFUSED.get(kind, "^trains$"), end), (kind, end)
        if kind in WARNED and dist.get_rank() == 0:
            assert len(told) == 1 and re.search(WARNED[kind], told[0]), (kind, told)
        else:
            assert told == [], (kind, told)
