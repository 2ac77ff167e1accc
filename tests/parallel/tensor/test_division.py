"""What divided blocks compute: blocks that use something for each head or feature, and real families."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel import begin_tensors, end_tensors
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.layers import ShardSpec, divide, runs_of
from shardwise.parallel.tensor.loss import words_cross_entropy
from shardwise.utils import safe_get_full_grad
from tests.families import FAMILIES, ROWS, batch, build
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import SGD, config_of

Refused = str
WORDS, TOKENS, HEADS, HEAD, WIDTH = 24, 8, 4, 4, 16
Found = tuple[float, dict[str, torch.Tensor]]


def config(**more: Any) -> dict[str, Any]:
    return config_of(0, SGD, rows=ROWS, tensor_parallel={"autotp_size": 2, **more})


def gradients(model: nn.Module, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return the loss and gradients of a divided model, or the error that refuses it."""
    engine = None
    try:
        engine, *_ = shardwise.initialize(model=model, config=settings)
        made = engine(*args, **kwargs)
        loss = made if isinstance(made, torch.Tensor) else made.loss
        engine.backward(loss)
        return loss.item(), {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.destroy()


def alone(model: nn.Module, *args: Any, **kwargs: Any) -> Found:
    """Return the loss and gradients of one process."""
    made = model(*args, **kwargs)
    loss = made if isinstance(made, torch.Tensor) else made.loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(loss: float, grads: dict[str, torch.Tensor], expected: Found, bound: float = 1e-5) -> list[str]:
    """Return what differs from one process: the loss, and gradients by name."""
    found = [] if abs(loss - expected[0]) <= bound * abs(expected[0]) else [f"loss {loss}, expected {expected[0]}"]
    most = max(float(grad.norm()) for grad in expected[1].values())
    for name, wanted in expected[1].items():
        off = float((grads[name].double() - wanted.double()).norm())
        if off > bound * float(wanted.norm()) + 1e-3 * bound * most:
            found.append(f"gradient of {name}: {off / max(float(wanted.norm()), 1e-30):.1e}")
    return found


# -- what blocks use for their heads and features ----------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm with a gain of some shape under some name."""

    def __init__(self, *shape: int, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * getattr(self, self.name)


class Attention(nn.Module):
    """Causal attention, with what a kind of model has besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, HEAD
        keys = 1 if kind == "heads that ranks share" else HEADS
        self.num_heads, self.num_key_value_heads = HEADS, keys
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, keys * HEAD), nn.Linear(WIDTH, keys * HEAD)
        if kind in ("a norm for each head", "heads that ranks share"):
            each = kind == "a norm for each head"
            shapes = ((HEADS, 1, HEAD), (keys, 1, HEAD)) if each else ((HEAD,), (HEAD,))
            self.q_norm, self.k_norm = (Norm(*shape) for shape in shapes)
        elif kind == "norms of other names":
            self.ln_q, self.ln_k = Norm(HEAD, name="gamma"), Norm(HEAD, name="gamma")
        elif kind == "one norm for queries and keys":
            self.qk_norm = Norm(HEAD, name="gamma")
        elif kind == "a norm of values":
            self.v_norm = nn.LayerNorm(HEAD)
        elif kind in ("a gain for each head", "a sink for each head", "one temperature"):
            shape = {"a gain for each head": (HEADS, 1, 1), "a sink for each head": (HEADS,)}.get(kind, (1,))
            self.per_head = nn.Parameter(torch.ones(shape))
        elif kind == "a buffer for each head":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())
            self.register_buffer("scales", torch.linspace(0.5, 1.5, HEADS).view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers)
        names = ("ln_q", "ln_k") if hasattr(self, "ln_q") else ("q_norm", "k_norm")
        q, k = (
            getattr(self, name, getattr(self, "qk_norm", nn.Identity()))(t)
            for name, t in zip(names, (q, k), strict=True)
        )
        v = self.v_norm(v) if hasattr(self, "v_norm") else v
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mask = torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)
        if hasattr(self, "slopes"):
            places = torch.arange(x.shape[1])
            mask = mask - (places - places[:, None]).abs() * self.slopes.view(-1, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.kind == "a sink for each head":
            y = y * torch.sigmoid(q.sum(-1, keepdim=True) - self.per_head.view(-1, 1, 1))
        elif hasattr(self, "per_head"):
            y = y * self.per_head.view(-1, 1, 1)
        y = y * self.scales if hasattr(self, "scales") else y
        y = y.transpose(1, 2).flatten(2)
        return self.o_proj(F.layer_norm(y, y.shape[-1:]) if self.kind == "a norm that is a function" else y)


class MLP(nn.Module):
    """An MLP, with what a kind of model has between its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.kind = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), kind
        if "slope" in kind:
            self.alpha = nn.Parameter(torch.full((1 if "one" in kind else 2 * WIDTH,), 0.3))
        if kind == "an activation with slopes":
            self.gain = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (
            functools.partial(F.linear, weight=layer.weight, bias=layer.bias)
            if self.kind == f"{name} by hand"
            else layer
            for name, layer in (("a column", self.up_proj), ("a row", self.down_proj))
        )
        y = up(x)
        y = torch.where(y > 0, y, y * self.alpha) * getattr(self, "gain", 1) if hasattr(self, "alpha") else F.silu(y)
        if self.kind == "softmax over features":
            y = y.softmax(-1)
        elif self.kind == "a mean of features":
            y = y - y.mean(-1, keepdim=True)
        return down(y)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(kind), MLP(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A language model of two blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.lm_head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decoder(kind: str) -> Decoder:
    """Build a decoder; no gain, norm or bias is at its usual first value, so that each of them counts."""
    torch.manual_seed(11)
    model = Decoder(kind).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(50))


def chosen(kinds: list[str], **section: Any) -> list[Any]:
    return [gradients(decoder(kind), config(**section), ids()) for kind in kinds]


RIGHT = [
    "a norm for each head",
    "a sink for each head",
    "a buffer for each head",
    "an activation with slopes",
    "heads that ranks share",
    "one norm for queries and keys",
    "a norm of values",
    "norms of other names",
    "a gain for each head",
    "one temperature",
    "an activation with one slope",
]
WRONG = {
    "softmax over features": "blocks.0.mlp",
    "a mean of features": "blocks.0.mlp",
    "a norm that is a function": "blocks.0.attention",
    "a column by hand": "blocks.0",
    "a row by hand": "blocks.0.mlp",
}


@pytest.mark.parametrize("kinds", [RIGHT[1:5], thorough([*RIGHT[:1], *RIGHT[5:]])], ids=["some", "others"])
def test_what_each_rank_uses_for_its_heads_and_features_has_the_gradient_of_one_process(kinds: list[str]) -> None:
    for found in run_ranks(chosen, 2, kinds):
        for kind, made in zip(kinds, found, strict=True):
            assert not isinstance(made, Refused), (kind, made)
            assert differing(*made, alone(decoder(kind), ids())) == [], kind


def test_what_cannot_be_divided_is_refused_by_name_and_a_rule_that_is_a_remedy() -> None:
    for found in run_ranks(chosen, 2, list(WRONG)):
        for (kind, where), made in zip(WRONG.items(), found, strict=True):
            assert isinstance(made, Refused) and made.startswith("ConfigError: tensor parallelism: blocks.0 "), kind
            assert where in made and '"partition_type": "skip"' in made, (kind, made)
    kind = "softmax over features"
    pattern = found[0].partition('"patterns": ["')[2].partition('"]')[0]
    rules = {"layer_specs": [{"patterns": [pattern], "partition_type": "skip"}]}
    for (made,) in run_ranks(chosen, 2, [kind], partition_config=rules):
        assert differing(*made, alone(decoder(kind), ids())) == []


@pytest.mark.parametrize(
    ("pattern", "where"), [(r"mlp\.up_proj\.weight$", "blocks.0.mlp"), (r"^lm_head\.weight$", "Decoder")]
)
def test_layers_that_are_divided_without_their_partner_are_named(pattern: str, where: str) -> None:
    rules = {"layer_specs": [{"patterns": [pattern], "partition_type": "column"}], "use_default_specs": False}
    for (made,) in run_ranks(chosen, 2, [""], partition_config=rules):
        assert isinstance(made, Refused) and made.startswith("ConfigError: tensor parallelism"), made
        assert where in made, made


class Late(nn.Module):
    """A gain that is used between divided layers, where nothing says so, outside of a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.gain = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gain).square().mean()


@on_ranks(2)
def test_without_the_comparison_a_gradient_that_differs_is_named() -> None:
    torch.manual_seed(0)
    made = gradients(Late(), config(check_division=False), torch.ones(2, 4))
    assert isinstance(made, Refused)
    assert "the gradient of gain, which all 2 ranks of a copy of the model have whole, differs" in made


class Collecting(nn.Module):
    """Blocks whose outputs a hook collects, and whose inputs a wrapped forward pass does, which an object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Late() for _ in range(2))
        self.outputs: list[torch.Tensor] = []
        self.inputs = inputs = []  # type: ignore[var-annotated]
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, made: self.outputs.append(made))

            def forward(x: torch.Tensor, holder: Any = types.SimpleNamespace(whole=block.forward)) -> Any:  # noqa: B008
                inputs.append(x)
                return holder.whole(x)

            block.forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.clear()
        for block in self.blocks:
            block(x)
        return torch.stack(self.outputs).sum()


@on_ranks(2)
def test_hooks_and_gradients_of_a_script_have_nothing_of_the_comparison() -> None:
    torch.manual_seed(0)
    loss, grads = alone(Collecting(), torch.ones(2, 4))
    torch.manual_seed(0)
    model = Collecting()
    for block in model.blocks:
        block.gain.requires_grad_(False)  # type: ignore[union-attr]
    made = gradients(model, config(), torch.ones(2, 4))
    assert (len(model.outputs), len(model.inputs)) == (2, 2)
    assert differing(*made, (loss, {name: grad for name, grad in grads.items() if "gain" not in name})) == []


# -- words -------------------------------------------------------------------------------------------------------------


def words_of(place: int, **how: Any) -> tuple[TensorGroup, nn.Embedding]:
    """Return an unconnected group of two ranks, and the words of one of them."""
    group, layer = TensorGroup(None, [[0], [1]], place), nn.Embedding(6, 4, **how)
    divide(layer, ShardSpec("words", runs_of(6, 2)), group, "words")
    return group, layer


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("wrong", [-1, 6, 9])
def test_words_of_no_rank_are_errors_on_every_rank(place: int, wrong: int) -> None:
    group, words = words_of(place)
    with pytest.raises(IndexError, match="out of range"):
        words(torch.tensor([0, wrong]))
    with pytest.raises(RuntimeError, match=f"index {wrong - 3 * place} is out of bounds"):
        words_cross_entropy(torch.zeros(3, 3), torch.tensor([0, -100, wrong]), group, [3, 3])


@on_ranks(2)
def test_a_rank_whose_words_are_all_masked() -> None:
    group, labels = begin_tensors(2), torch.tensor([1, 5])
    logits = torch.arange(12.0).view(2, 6)
    logits[0, 3:] = -torch.inf
    whole, part = (x.clone().requires_grad_() for x in (logits, logits[:, 3 * group.place :][:, :3]))
    found, expected = words_cross_entropy(part, labels, group, [3, 3]), F.cross_entropy(whole, labels)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(part.grad, whole.grad[:, 3 * group.place :][:, :3])
    end_tensors()


def test_embeddings_that_count_or_change_words_stay_undivided() -> None:
    with pytest.raises(UsageError, match="words has scale_grad_by_freq"):
        words_of(0, scale_grad_by_freq=True)
    with pytest.raises(UsageError, match="words has max_norm"):
        words_of(0, max_norm=1.0)


# -- real families -----------------------------------------------------------------------------------------------------

DIVIDED = ["stablelm", "apertus", "cohere", "olmo2", "bitnet", "mixtral"]
REFUSED = {"doge": "model.layers.0", "mpnet": "mpnet.encoder.layer.0", "mobilebert": "cls.predictions"}


def families(names: list[str], **section: Any) -> list[Any]:
    return [gradients(build(name, noise=0.2), config(**section), **batch(name, 0, ROWS)) for name in names]


@pytest.mark.parametrize(
    "names",
    [DIVIDED[:2], list(REFUSED), thorough(DIVIDED[2:]), thorough([name for name in FAMILIES if name not in DIVIDED])],
    ids=["right", "refused", "others", "all"],
)
def test_families_are_right_or_refused_by_name(names: list[str]) -> None:
    for found in run_ranks(families, 2, names, timeout=280):
        for name, made in zip(names, found, strict=True):
            if isinstance(made, Refused):
                assert name not in DIVIDED, (name, made)
                assert f"ConfigError: tensor parallelism: {REFUSED.get(name, '')}" in made, made
            else:
                assert name not in REFUSED, name
                assert differing(*made, alone(build(name, noise=0.2), **batch(name, 0, ROWS)), 2e-4) == [], name


def test_norms_behind_layers_are_refused_where_ranks_share_tokens() -> None:
    for (made,) in run_ranks(families, 2, ["olmo2"], sequence_parallel=True):
        assert isinstance(made, Refused) and "ConfigError: tensor parallelism: model.layers.0" in made, made
        assert ". Switch tensor_parallel.sequence_parallel off" in made
