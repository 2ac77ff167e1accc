"""Before training a model over shared sequences is compared with itself over whole ones: what differs is named."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwise.errors import UsageError
from shardwise.parallel import share_attention, split
from tests.harness import run_ranks, thorough
from tests.parallel.models import GPT, VOCABULARY, data, first_step, llama, loss_of, sharing, warned

SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


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


class FirstToken(GPT):
    """Returns logits of the first token that a rank has."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids)[:, 0]


class PooledLoss(GPT):
    """Returns a loss of the mean of the tokens that a rank has."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids).mean(1).square().sum()


class LogSum(GPT):
    """Returns the logarithm of a sum over the tokens that a rank has."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids).logsumexp((0, 1, 2))


class MeanLoss(GPT):
    """Returns a mean over the tokens that a rank has."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids).square().mean()


def mixtral() -> nn.Module:
    """Its loss takes what hooks collect."""
    torch.manual_seed(7)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, use_cache=False)
    return share_attention(transformers.MixtralForCausalLM(config), "sdpa")


MODELS = {
    "right": lambda: GPT(shared=True),
    "llama": lambda: llama(shared=True),
    "mixtral": mixtral,
    "own tokens": one_layer_alone,
    "own places": lambda: OwnPlaces(shared=True),
    "mean": mean_over_tokens,
}
NAMED = {
    "own tokens": r"blocks\.1\.attend returns",
    "own places": r"places is given",
    "mean": r"blocks\.0\.norm2 returns",
}


def begun(kinds: list[str], more: dict[str, Any]) -> dict[str, str]:
    found = {}
    for kind in kinds:
        torch.manual_seed(7)
        found[kind], _ = first_step(sharing(MODELS[kind](), **more))
    return found


POOLED: dict[str, tuple[Any, str]] = {
    "first token": (FirstToken, r"the model returns other numbers for a sequence \(output 0 of shape \[1, \d+\]"),
    "log of a sum": (LogSum, r"the model returns a loss that is neither a mean nor a sum of the ranks' losses"),
    "pooled loss": (PooledLoss, r"^trains: .* the loss that PooledLoss returns is no mean of the ranks' losses"),
    "mean loss": (MeanLoss, r"^trains: $"),
}


def pooled() -> dict[str, str]:
    found = {}
    for name, (kind, _) in POOLED.items():
        torch.manual_seed(7)
        engine = sharing(kind(shared=True), 0)
        batch = split(data(0, 1, length=30))
        try:
            with warned() as texts:
                engine.backward(engine(batch["input_ids"], batch["position_ids"]).mean())
            found[name] = "trains: " + " ".join(texts)
        except UsageError as error:
            found[name] = str(error)
        engine.destroy()
    return found


def test_outputs_of_whole_sequences_that_a_rank_takes_from_its_tokens_are_named() -> None:
    for rank, found in enumerate(run_ranks(pooled, 2)):
        for name, (_, words) in POOLED.items():
            if rank and name == "pooled loss":  # rank 0 warns
                continue
            assert re.search(words, found[name]), (name, found[name])


@pytest.mark.parametrize("more", [{}, thorough({"bf16": {"enabled": True}})], ids=["fp32", "bf16"])
def test_what_differs_from_one_process_is_named(more: dict[str, Any]) -> None:
    for found in run_ranks(begun, 2, list(MODELS), more):
        assert {kind for kind, text in found.items() if text == "trains"} == {"right", "llama", "mixtral"}, found
        for kind, name in NAMED.items():
            with pytest.raises(
                UsageError, match=rf"computes something else than in one process; on rank \d {name} other numbers"
            ):
                raise UsageError(found[kind])


class Normalized(GPT):
    """Normalizes by the tokens that a rank has, in training."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.batch_norm = nn.BatchNorm1d(VOCABULARY)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(super().forward(input_ids, position_ids).transpose(1, 2))


def normalized() -> list[str]:
    with mock.patch("shardwise.engine.advice.warn_once") as warns:
        sharing(Normalized(), 0).destroy()
    return [call.args[0] for call in warns.call_args_list]


def test_batch_normalization_of_a_ranks_tokens_is_warned_of() -> None:
    first, second = run_ranks(normalized, 2)
    assert second == []
    assert any("'batch_norm' (BatchNorm1d): each of 2 ranks normalizes with its own" in text for text in first), first


def collected() -> list[int]:
    torch.manual_seed(7)
    model, lengths = GPT(shared=True), []
    model.blocks[0].register_forward_hook(lambda _, __, made: lengths.append(len(made)))
    engine = sharing(model)
    for step in range(2):
        loss, tokens = loss_of(engine, split(data(step, 1, length=30)))
        engine.backward(loss, weight=tokens)
        engine.step()
    engine.destroy()
    return lengths


def test_hooks_of_a_script_see_nothing_of_the_comparison() -> None:
    for lengths in run_ranks(collected, 2):
        assert len(lengths) == 2
