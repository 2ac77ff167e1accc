"""Sequence parallelism inside pipeline stages: gradients are those of one process, and attention that is not shared is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import PeerLostError, UsageError
from shardwise.parallel import DistributedAttention, share_attention
from shardwise.pipe import LayerSpec, PipelineModule
from shardwise.zero.access import safe_get_full_optimizer_state
from tests.harness import run_ranks, thorough
from tests.pipeline.families import model_of

WIDTH, HEADS, WORDS, TOKENS, SIZE, MICRO_BATCHES = 16, 4, 32, 8, 2, 2


class Words(nn.Module):
    """Words and positions of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, value: Any) -> torch.Tensor:
        found: torch.Tensor = self.words(value["input_ids"]) + self.places(value["position_ids"])
        return found


class Block(nn.Module):
    """Attention over the whole sequence, or over a rank's own tokens."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        core = F.scaled_dot_product_attention
        self.attend: Any = DistributedAttention(core, scatter_idx=1, gather_idx=2) if shared else core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2).contiguous()
            for layer in (self.q, self.k, self.v)
        )
        found: torch.Tensor = x + self.o(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return found


def layers(shared: tuple[bool, ...]) -> list[Any]:
    return [LayerSpec(Words), *(LayerSpec(Block, each) for each in shared), LayerSpec(nn.Linear, WIDTH, WORDS)]


def pairs(place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels of the next tokens of whole sequences."""
    found = []
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * number + place)
        ids = torch.randint(2, WORDS, (2, TOKENS), generator=generator)
        found.append((ids, torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)))
    return found


def loss_of(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over a rank's tokens that have a label, and their number."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    count = (labels != -100).sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count, count


def alone(model: nn.Module, places: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one process."""
    for place in range(places):
        for ids, labels in pairs(place):
            positions = torch.arange(TOKENS).expand(2, TOKENS)
            inputs: Any = {"input_ids": ids, "position_ids": positions}
            output = model(inputs) if isinstance(model, PipelineModule) else model(**inputs)
            (loss_of(output, labels)[0] / (MICRO_BATCHES * places)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module, schedule: str, zero: int, **arguments: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "sequence_parallel_size": SIZE,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "pipeline": {"stages": 2, "schedule": schedule},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }
    engine = shardwise.initialize(model=model, config=config, **arguments)[0]
    place, part = divmod(dist.get_rank() % (dist.get_world_size() // 2), SIZE)
    own = slice(part * TOKENS // SIZE, (part + 1) * TOKENS // SIZE)
    positions = torch.arange(TOKENS).expand(2, TOKENS)[:, own]
    batches = [({"input_ids": ids[:, own], "position_ids": positions}, labels[:, own]) for ids, labels in pairs(place)]
    try:
        engine.train_batch(iter(batches))
        return {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in engine.module.named_parameters()}
    finally:
        engine.destroy()


def of_layers(shared: tuple[bool, ...], boundaries: list[int], schedule: str, zero: int) -> Any:
    torch.manual_seed(0)
    method: Any = boundaries or "uniform"
    model = PipelineModule(layers(shared), num_stages=2, loss_fn=loss_of, partition_method=method)
    try:
        return gradients(model, schedule, zero)
    except (UsageError, PeerLostError) as error:
        return str(error)


def check(found: list[Any], expected: dict[str, torch.Tensor]) -> None:
    assert {name for own in found for name in own} == set(expected)
    for own in found:
        for name, values in own.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("ranks", "schedule", "zero", "boundaries"),
    [
        (4, "zb-h1", 1, [0, 1, 6]),  # a stage without attention
        thorough(4, "1f1b", 0, [0, 5, 6]),
        thorough(8, "1f1b", 3, [0, 3, 6]),
        thorough(4, "zbv", 2, []),
    ],
)
def test_stages_share_sequences(ranks: int, schedule: str, zero: int, boundaries: list[int]) -> None:
    torch.manual_seed(0)
    expected = alone(PipelineModule(layers((False,) * 4)), ranks // 4)
    check(run_ranks(of_layers, ranks, (True,) * 4, boundaries, schedule, zero), expected)


@pytest.mark.parametrize(
    ("shared", "stage", "layer"),
    [
        ((True, False, True, True), 0, "layers.2.o"),
        thorough((True, True, False, True), 1, "layers.3.o"),
        thorough((False,) * 4, 0, "layers.1.o"),
    ],
)
def test_attention_of_a_ranks_own_tokens_is_refused_on_every_stage(shared: Any, stage: int, layer: str) -> None:
    texts = run_ranks(of_layers, 4, shared, [0, 3, 6], "1f1b", 0)
    for text in texts[2 * stage : 2 * stage + 2]:
        assert f"pipeline stage {stage} computes something else than in one process" in text and layer in text


def of_transformers(family: str, schedule: str, zero: int, share: bool) -> Any:
    model = model_of(family)
    if share:
        share_attention(model)
    try:
        return gradients(model, schedule, zero, loss_fn=loss_of)
    except (UsageError, PeerLostError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("family", "schedule", "zero"),
    [
        ("llama", "1f1b", 1),
        thorough("gpt2", "zb-h1", 0),
        thorough("bloom", "1f1b", 0),
        thorough("llama", "zbv", 3),
    ],
)
def test_models_of_transformers_share_sequences_in_stages(family: str, schedule: str, zero: int) -> None:
    expected = alone(model_of(family), 1)
    found = run_ranks(of_transformers, 4, family, schedule, zero, True)
    check(found, expected)


@pytest.mark.thorough
def test_models_of_transformers_without_shared_attention_are_refused() -> None:
    texts = run_ranks(of_transformers, 4, "llama", "1f1b", 0, False)
    assert any("pipeline stage 0 computes something else than in one process" in text for text in texts[:2])
