"""Small models for tests, each with what makes some model hard to shard: ties, branches, odd shapes, frozen parts.

A `Case` bundles a model with its data and loss, so that an engine, a plain loop and an fp64 loop run the same thing.
Batches depend on (step, micro-batch, rank) only. Dimensions are odd on purpose: nothing divides evenly.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, Any]
Groups = Callable[[nn.Module], Iterable[Any]]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
        build: makes the model; called under a fixed seed.
        batch: makes the data of one micro-batch from a generator; `seed` tells micro-batches apart.
        loss: runs a model (or an engine) on a batch.
        groups: what the optimizer is given.
        precisions: settings that plain torch can run the model in.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    groups: Groups = trainable
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")

    def make(self, seed: int = 7) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def data(self, step: int, micro: int, rank: int, dtype: torch.dtype) -> Batch:
        seed = 1 + rank + 64 * (micro + 64 * step)
        batch = self.batch(torch.Generator().manual_seed(seed), seed)
        return {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()
        }


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error, reduced in fp32 or wider."""
    wide = torch.promote_types(output.dtype, torch.float32)
    return (output.to(wide) - target.to(wide)).square().mean()


def regression(inputs: int, outputs: int, rows: int = 4) -> Callable[[torch.Generator, int], Batch]:
    def batch(generator: torch.Generator, seed: int) -> Batch:
        return {
            "x": torch.randn(rows, inputs, generator=generator),
            "y": torch.randn(rows, outputs, generator=generator),
        }

    return batch


def regression_loss(model: Any, batch: Batch) -> torch.Tensor:
    return squared(model(batch["x"]), batch["y"])


# -- odd sizes ---------------------------------------------------------------------------------------------------------


class OddMLP(nn.Module):
    """Scalar, empty, unused and twice-used parameters, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.shared = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.twice = nn.Parameter(torch.randn(7, 7) / 3)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(self.shared(h))
        h = h + torch.tanh(self.shared(h @ self.twice) @ self.twice.t())
        return self.last(h * self.gain) + self.empty.sum()


# -- transformer -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, dim = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (dim // self.heads) ** -0.5
        mask = torch.full((length, length), float("-inf"), dtype=scores.dtype, device=x.device).triu(1)
        weights = F.dropout((scores + mask).softmax(-1), self.dropout, self.training)
        return self.proj((weights @ v).transpose(1, 2).reshape(rows, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, widening: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.up, self.down = nn.Linear(dim, widening * dim), nn.Linear(widening * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Decoder with learned positions. `head`: tied (module), functional (F.linear with the embedding) or own.

    `run` calls a block; tests replace it to checkpoint activations.
    """

    def __init__(
        self,
        layers: int = 3,
        dim: int = 12,
        vocabulary: int = 31,
        head: str = "tied",
        dropout: float = 0.0,
        widening: int = 2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(Block(dim, 2, dropout, widening) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = None if head == "functional" else nn.Linear(dim, vocabulary, bias=False)
        if head == "tied":
            assert self.head is not None
            self.head.weight = self.tokens.weight
        self.run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = self.run(block, x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def language(generator: torch.Generator, seed: int) -> Batch:
    return {"tokens": torch.randint(31, (2, 9), generator=generator)}


def language_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide).flatten(0, 1), batch["tokens"][:, 1:].flatten())


def frozen_half() -> nn.Module:
    """The first blocks and the embeddings do not train."""
    model = GPT(layers=3, head="own")
    for part in (model.tokens, model.places, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    return model


def frozen_middle() -> nn.Module:
    """A frozen block between trained ones: gradients pass through it."""
    model = GPT(layers=3, head="tied")
    model.blocks[1].requires_grad_(False)
    return model


class LoRALinear(nn.Module):
    """A frozen weight and two trained low-rank factors in one module."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class LoRANet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(9, 9) for _ in range(3))
        self.out = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that cut through every block: matrices decay, vectors do not and learn faster."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-2},
    ]


# -- dtypes and buffers ------------------------------------------------------------------------------------------------


class MixedTypes(nn.Module):
    """fp32 with bf16 parts, and an integer parameter that looks positions up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.middle = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)).to(torch.bfloat16)
        self.order = nn.Parameter(torch.randperm(10), requires_grad=False)
        self.last = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))[:, self.order]
        inner = next(self.middle.parameters()).dtype
        h = h + self.middle(h.to(inner)).to(h.dtype)
        return self.last(h)


class Running(nn.Module):
    """BatchNorm, and a buffer of its own that follows the data."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(torch.tanh(self.norm(self.first(x))))
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean += 0.1 * (out.mean(0).to(self.mean.dtype) - self.mean)
        return out


# -- parameters in unusual places --------------------------------------------------------------------------------------


class Borrower(nn.Module):
    """Uses another module's weight, before, between and after that module's own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(F.linear(x, self.owner.weight))
        h = h + torch.tanh(self.owner(h))
        h = h + torch.tanh(F.linear(self.other(h), self.owner.weight))
        h = h + torch.tanh(self.owner(h) + F.linear(h, self.owner.weight, self.other.bias))
        return self.last(torch.tanh(F.linear(h, self.owner.weight.t())))


class Detached(nn.Module):
    """A weight that is used detached in one place and trained in another, and one that is only ever used detached."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.target = nn.Linear(8, 8)
        self.fixed = nn.Parameter(torch.randn(8, 8) / 3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(F.linear(h, self.target.weight.detach()) @ self.fixed.detach())
        h = h + torch.tanh(self.target(h))
        return self.last(h)


# -- branches chosen by data -------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Router(nn.Module):
    """Calls the experts that the batch names, in that order: another order, an expert twice, or not at all."""

    def __init__(self, experts: int = 5, dim: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, dim)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))
        self.last = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for index in route:
            h = self.experts[index](h)
        return self.last(h)


class MixtureBlock(nn.Module):
    """A block whose experts are chosen inside it."""

    def __init__(self, dim: int = 6, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        h = self.norm(x)
        for index in chosen:
            x = x + self.experts[index](h)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for place, block in enumerate(self.blocks):
            x = block(x, [(index + place) % 4 for index in route])
        return self.last(x)


def routed(generator: torch.Generator, seed: int) -> Batch:
    """Route lengths 0 to 4 with repetitions; every micro-batch of every rank has its own."""
    length = int(torch.randint(5, (1,), generator=generator))
    route = torch.randint(4, (length,), generator=generator).tolist()
    return {
        "x": torch.randn(4, 4, generator=generator),
        "y": torch.randn(4, 3, generator=generator),
        "route": [index + (1 if seed % 3 == 0 else 0) for index in route],
    }


def routed_loss(model: Any, batch: Batch) -> torch.Tensor:
    return squared(model(batch["x"], batch["route"]), batch["y"])


class TwoTowers(nn.Module):
    """A vision branch that only some batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(5, 8)
        self.vision = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh())
        self.joint = nn.ModuleList(Expert(8) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.text(x))
        if image is not None:
            h = h + self.vision(image)
        for layer in self.joint:
            h = layer(h)
        return self.last(h)


def sometimes_images(generator: torch.Generator, seed: int) -> Batch:
    batch = regression(5, 3)(generator, seed)
    if seed % 64 == 1:  # rank 0 only
        batch["image"] = torch.randn(4, 7, generator=generator)
    return batch


# -- outputs and inputs of many forms ----------------------------------------------------------------------------------


@dataclass
class Plain:
    """A dataclass that no library knows."""

    hidden: torch.Tensor
    note: str = "note"


class Slotted:
    """An object with slots."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Attributed:
    """An ordinary object that holds a tensor in a list."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.parts = [hidden]

    @property
    def hidden(self) -> torch.Tensor:
        return self.parts[0]


class OwnDict(dict[str, torch.Tensor]):
    """A dictionary class of the user's own."""

    @property
    def hidden(self) -> torch.Tensor:
        return self["hidden"]


Pair = namedtuple("Pair", "other hidden")


def _hugging_face(hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda h: {"a": {"hidden": h}, "n": 3}, lambda o: o["a"]["hidden"]),
    "tuple": (lambda h: (None, (h,)), lambda o: o[1][0]),
    "namedtuple": (lambda h: Pair(1, h), lambda o: o.hidden),
    "dataclass": (Plain, lambda o: o.hidden),
    "object": (Attributed, lambda o: o.hidden),
    "slots": (Slotted, lambda o: o.hidden),
    "own_dict": (lambda h: OwnDict(hidden=h), lambda o: o.hidden),
    "hugging_face": (_hugging_face, lambda o: o.last_hidden_state),
}
"""Ways in which a module returns (and takes) its hidden state: how to wrap it, how to get it back."""


class FormLayer(nn.Module):
    def __init__(self, form: str, frozen: bool) -> None:
        super().__init__()
        self.form = form
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        if frozen:
            self.requires_grad_(False)

    def forward(self, state: Any) -> Any:
        wrap, unwrap = FORMS[self.form]
        h = unwrap(state)
        return wrap(h + self.outer(torch.tanh(self.inner(h))))


class FormNet(nn.Module):
    """Layers, one of them frozen, that hand their hidden state on in some form; so does the model."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(FormLayer(form, frozen=place == 1) for place in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        wrap, unwrap = FORMS[self.form]
        state = wrap(torch.tanh(self.first(x)))
        for layer in self.layers:
            state = layer(state)
        return wrap(self.last(unwrap(state)))


def form_case(form: str) -> Case:
    unwrap = FORMS[form][1]
    return Case(
        f"form_{form}",
        lambda: FormNet(form),
        regression(4, 3),
        lambda model, batch: squared(unwrap(model(batch["x"])), batch["y"]),
    )


# -- sparse gradients -------------------------------------------------------------------------------------------------

WORDS, WIDTH = 401, 7
"""Of sparse tables, whose rows do not begin where ranges of ranks do."""


class Bags(nn.Module):
    """Two tables of which few rows are used, one of them by two lookups, and a dense rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(97, WIDTH, mode="sum", sparse=True)
        self.inner = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.words(batch["words"]).sum(1)
        x = x + self.words(batch["words"][:, :1]).squeeze(1)
        if batch["bags"] is not None:
            x = x + self.bags(batch["bags"])
        return self.head(torch.tanh(self.inner(x)))


def few(generator: torch.Generator, seed: int) -> Batch:
    """Few rows, several of them twice; some ranks have no bags."""
    words = torch.randint(0, WORDS, (2, 3), generator=generator)
    words[1, 0] = words[0, 0]
    bags = torch.randint(0, 97, (2, 2), generator=generator) if seed % 3 else None
    return {"words": words, "bags": bags, "target": torch.randn(2, 3, generator=generator)}


def bags_loss(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch).float() - batch["target"].float()).square().mean()


class SparseTied(nn.Module):
    """A table that is also a head, without a module that says so: the gradient is dense on ranks that use the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(41, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.tanh(self.mix(self.words(batch["words"]).sum(1)))
        return F.linear(x, self.words.weight).sum(1, keepdim=True) if batch["head"] else x


def some_heads(generator: torch.Generator, seed: int) -> Batch:
    words = torch.randint(0, 41, (2, 2), generator=generator)
    return {"words": words, "head": seed % 4 == 1, "target": torch.randn(2, 1, generator=generator)}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("odd_mlp", OddMLP, regression(5, 3), regression_loss),
        Case("gpt", GPT, language, language_loss),
        Case("gpt_functional_head", lambda: GPT(head="functional"), language, language_loss),
        Case("gpt_groups", lambda: GPT(head="own"), language, language_loss, groups=decay_groups),
        Case("frozen_half", frozen_half, language, language_loss),
        Case("frozen_middle", frozen_middle, language, language_loss),
        Case("lora", LoRANet, regression(9, 4), regression_loss),
        Case("mixed_types", MixedTypes, regression(6, 3), regression_loss, precisions=("fp32",)),
        Case("running", Running, regression(6, 3), regression_loss, precisions=("fp32",)),
        Case("borrower", Borrower, regression(8, 3), regression_loss),
        Case("detached", Detached, regression(6, 3), regression_loss),
        Case("router", Router, routed, routed_loss),
        Case("mixture", Mixture, routed, lambda m, b: squared(m(b["x"], [i % 4 for i in b["route"]]), b["y"])),
        Case(
            "two_towers",
            TwoTowers,
            sometimes_images,
            lambda model, batch: squared(model(batch["x"], batch.get("image")), batch["y"]),
        ),
        Case(
            "matrices",
            lambda: nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)),
            regression(5, 3),
            regression_loss,
        ),
        Case("sparse", Bags, few, bags_loss, precisions=("fp32",)),
        Case("sparse_tied", SparseTied, some_heads, bags_loss, precisions=("fp32",)),
        *(form_case(form) for form in FORMS),
    )
}
"""All cases by name."""
