"""What divided blocks compute: decoders drawn at random, and models whose blocks cannot be divided by their names."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.utils import safe_get_full_grad
from tests.families import batch, build
from tests.harness import run_ranks, thorough
from tests.parallel.random_decoders import ROWS, Traits, alone, decoder, differing, ids_of

Refused = str


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "tensor_parallel": {"autotp_size": 2, **more},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


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


def drawn(seeds: list[int]) -> list[Any]:
    """Return of each decoder what is wrong: gradients that differ, or an error that does not name a module of it."""
    found: list[Any] = []
    for seed in seeds:
        traits = Traits.drawn(seed)
        made = gradients(decoder(traits), config(), ids_of(0))
        if isinstance(made, Refused):
            found.append(made if "blocks." not in made else "refused")
        else:
            found.append(differing(*made, alone(traits)))
    return found


@pytest.mark.limit(600)
@pytest.mark.parametrize(
    "seeds", [[1, 4, 6, 12], *(thorough(list(range(first, first + 25))) for first in range(0, 100, 25))], ids=str
)
def test_decoders_drawn_at_random_are_right_or_refused(seeds: list[int]) -> None:
    ranks = run_ranks(drawn, 2, seeds, timeout=60 + 4 * len(seeds))
    for seed, *told in zip(seeds, *ranks, strict=True):
        assert all(one in ([], "refused") for one in told), (str(Traits.drawn(seed)), told)
        assert told[0] == told[1], str(Traits.drawn(seed))
    assert 2 * sum(one == [] for one in ranks[0]) >= len(seeds)


RIGHT: dict[str, dict[str, Any]] = {
    "a norm for each head": {"heads_norm": "by head"},
    "one norm for queries and keys": {"heads_norm": "shared", "norms": "gamma"},
    "a norm of values": {"values_norm": True, "norms": "layer"},
    "norms of other names": {"heads_norm": "width", "heads_norm_name": ("ln_q", "ln_k"), "norms": "gamma"},
    "a gain for each head": {"head_gain": "broadcast"},
    "a sink for each head": {"head_gain": "sinks"},
    "a buffer for each head": {"places": "alibi", "head_gain": "buffer"},
    "one temperature": {"head_gain": "temperature"},
    "an activation with one slope": {"activation": "slope"},
    "an activation with slopes": {"activation": "slopes", "inner": "gain"},
    "heads that ranks share": {"heads_norm": "width", "heads": 4, "keys": 1},
}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "softmax over features": ({"inner": "softmax"}, "blocks.0.mlp"),
    "a mean of features": ({"inner": "mean"}, "blocks.0.mlp"),
    "a norm that is a function": ({"mixed": "function"}, "blocks.0.attention"),
    "a column by hand": ({"by_hand": "up"}, "blocks.0"),
    "a row by hand": ({"by_hand": "down"}, "blocks.0.mlp"),
}


def chosen(all_traits: list[Traits]) -> list[Any]:
    return [gradients(decoder(traits), config(), ids_of(0)) for traits in all_traits]


@pytest.mark.parametrize("names", [list(RIGHT)[::2], thorough(list(RIGHT)[1::2])], ids=["some", "others"])
def test_what_each_rank_uses_for_its_heads_and_features_has_the_gradient_of_one_process(names: list[str]) -> None:
    all_traits = [Traits(11, **RIGHT[name]) for name in names]
    for found in run_ranks(chosen, 2, all_traits):
        for name, traits, made in zip(names, all_traits, found, strict=True):
            assert not isinstance(made, Refused), (name, made)
            assert differing(*made, alone(traits)) == [], name


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    all_traits = [Traits(11, **traits) for traits, _ in WRONG.values()]
    for found in run_ranks(chosen, 2, all_traits):
        for (name, (_, where)), made in zip(WRONG.items(), found, strict=True):
            assert isinstance(made, Refused) and made.startswith("ConfigError: tensor parallelism: blocks.0 "), name
            assert where in made and '"partition_type": "skip"' in made, (name, made)


def remedied(traits: Traits, pattern: str) -> Any:
    rules = {"layer_specs": [{"patterns": [pattern], "partition_type": "skip"}]}
    return gradients(decoder(traits), config(partition_config=rules), ids_of(0))


def test_the_rule_that_an_error_names_is_a_remedy() -> None:
    traits = Traits(3, inner="softmax")
    (refused, *_) = run_ranks(chosen, 2, [traits])[0]
    pattern = refused.partition('"patterns": ["')[2].partition('"]')[0]
    for made in run_ranks(remedied, 2, traits, pattern):
        assert differing(*made, alone(traits)) == []


def half_divided(pattern: str) -> Any:
    rules = {"layer_specs": [{"patterns": [pattern], "partition_type": "column"}], "use_default_specs": False}
    return gradients(decoder(Traits(3)), config(partition_config=rules), ids_of(0))


@pytest.mark.parametrize(
    ("pattern", "where"), [(r"mlp\.up_proj\.weight$", "blocks.0.mlp"), (r"^lm_head\.weight$", "Decoder")]
)
def test_layers_that_are_divided_without_their_partner_are_named(pattern: str, where: str) -> None:
    for made in run_ranks(half_divided, 2, pattern):
        assert isinstance(made, Refused) and made.startswith("ConfigError: tensor parallelism"), made
        assert where in made, made


class Late(nn.Module):
    """A gain that is used between divided layers, where nothing says so, outside of a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.gain = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gain).square().mean()


def unchecked() -> Any:
    torch.manual_seed(0)
    return gradients(Late(), config(check_division=False), torch.ones(2, 4))


def test_without_the_comparison_a_gradient_that_differs_is_named() -> None:
    for made in run_ranks(unchecked, 2):
        assert isinstance(made, Refused)
        assert "the gradient of gain, which all 2 ranks of a copy of the model have whole, differs" in made


class Collecting(nn.Module):
    """Blocks whose outputs a hook collects, and whose inputs a wrapped forward pass does; `held`: in an object."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Late() for _ in range(2))
        self.outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        self.inputs = inputs
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, made: self.outputs.append(made))
            whole = block.forward
            held_forward = types.SimpleNamespace(whole=whole)

            def forward(x: torch.Tensor, whole: Any = whole) -> Any:
                inputs.append(x)
                return whole(x)

            def forward_of(x: torch.Tensor, holder: Any = held_forward) -> Any:
                inputs.append(x)
                return holder.whole(x)

            block.forward = forward_of if held else forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.clear()
        for block in self.blocks:
            block(x)
        return torch.stack(self.outputs).sum()


def collected(held: bool) -> Any:
    torch.manual_seed(0)
    model = Collecting(held)
    for block in model.blocks:
        block.gain.requires_grad_(False)  # type: ignore[union-attr]
    return gradients(model, config(), torch.ones(2, 4)), len(model.outputs), len(model.inputs)


@pytest.mark.parametrize("held", [False, True])
def test_hooks_and_gradients_of_a_script_have_nothing_of_the_comparison(held: bool) -> None:
    torch.manual_seed(0)
    model = Collecting(held)
    loss = model(torch.ones(2, 4))
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "gain" not in name}
    for made, outputs, inputs in run_ranks(collected, 2, held):
        assert (outputs, inputs) == (2, 2)
        assert differing(*made, (loss.item(), wanted)) == []


RIGHT_FAMILIES = ["stablelm", "apertus", "cohere", "olmo2", "bitnet", "mixtral"]
REFUSED = {"doge": "model.layers.0", "mpnet": "mpnet.encoder.layer.0", "mobilebert": "cls.predictions"}


def families(names: list[str], sequence: bool = False) -> list[Any]:
    section = {"sequence_parallel": True} if sequence else {}
    return [gradients(build(name, noise=0.2), config(**section), **batch(name, 0, ROWS)) for name in names]


def test_norms_behind_layers_are_refused_where_ranks_share_tokens() -> None:
    for (made,) in run_ranks(families, 2, ["olmo2"], True):
        assert isinstance(made, Refused) and "ConfigError: tensor parallelism: model.layers.0" in made, made
        assert ". Switch tensor_parallel.sequence_parallel off" in made


@pytest.mark.parametrize("names", [RIGHT_FAMILIES[:2], thorough(RIGHT_FAMILIES[2:])], ids=str)
def test_families_with_norms_and_slopes_of_their_own(names: list[str]) -> None:
    for found in run_ranks(families, 2, names):
        for name, made in zip(names, found, strict=True):
            model = build(name, noise=0.2)
            loss = model(**batch(name, 0, ROWS)).loss
            loss.backward()
            grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            assert not isinstance(made, Refused), (name, made)
            assert differing(*made, (loss.item(), grads), 2e-4) == [], name


def test_families_that_cannot_be_divided_are_refused_by_name() -> None:
    for found in run_ranks(families, 2, list(REFUSED)):
        for (name, where), made in zip(REFUSED.items(), found, strict=True):
            assert isinstance(made, Refused), name
            assert f"ConfigError: tensor parallelism: {where}" in made, made
