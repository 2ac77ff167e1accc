"""Sequence parallelism inside pipeline stages: gradients are those of one process, and attention that is not shared is
refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.errors import PeerLostError, UsageError
from shardwise.parallel import DistributedAttention, share_attention
from shardwise.pipe import LayerSpec
from shardwise.runfiles import steps_file
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.pipeline.families import called_with_inputs, model_of
from tests.pipeline.gradients import close, gradients, gradients_alone
from tests.pipeline.training import Setting, data, engine_of

WIDTH, HEADS, WORDS, TOKENS, SIZE = 16, 4, 32, 8, 2


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


def layers(*shared: bool) -> list[Any]:
    """Return layers whose attention is shared on ranks, and plain in one process."""
    blocks = [LayerSpec(Block, each and dist.is_initialized()) for each in shared]
    return [LayerSpec(Words), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS)]


def batches(step: int, number: int, place: int) -> Any:
    """Return ids and labels of the next tokens: of whole sequences in one process, on ranks of a rank's tokens."""
    place, part = divmod(place, SIZE) if dist.is_initialized() else (place, 0)
    ids = torch.randint(2, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(10 * number + place))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    length = TOKENS // SIZE if dist.is_initialized() else TOKENS
    own = slice(part * length, (part + 1) * length)
    return {"input_ids": ids[:, own], "position_ids": torch.arange(TOKENS).expand(2, -1)[:, own]}, labels[:, own]


def loss_of(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over a rank's tokens that have a label, and their number."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    count = (labels != -100).sum()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count, count


SHARED = {"sequence_parallel_size": SIZE, "pipeline": {"stages": 2}, "train_micro_batch_size_per_gpu": 2}
SETTING = Setting(2, micro_batches=2, loss=loss_of, batches=batches, config=SHARED)


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
    made, options = partial(layers, *[True] * 4), {"partition_method": boundaries or "uniform"}
    setting = replace(SETTING, schedule=schedule, zero=zero, made=made, options=options)
    check(setting, ranks)


def check(setting: Setting, ranks: int) -> None:
    expected = gradients_alone(setting, ranks // 2 // SIZE)
    found = run_ranks(gradients, ranks, setting)
    assert {name for own in found for name in own} == set(expected)
    for own in found:
        close(own, expected, bound=1e-5)


def tokens_of(setting: Setting, path: Path) -> list[str]:
    """Train for two steps with a run log; return the lines about throughput."""
    log = {"enabled": True, "path": str(path), "plan": False}
    engine = engine_of(replace(setting, config={**setting.config, "run_log": log, "steps_per_print": 2}))
    with logged() as kept:
        for step in range(2):
            engine.train_batch(data(setting, step))
    engine.destroy()
    return [line for line in kept.lines if "throughput" in line]


def test_tokens_of_stages_and_parts_of_sequences_are_counted_once(tmp_path: Path) -> None:
    (line,), *others = run_ranks(tokens_of, 4, replace(SETTING, made=partial(layers, True, True)), tmp_path)
    assert others == [[]] * 3
    rows = [json.loads(row) for row in (tmp_path / steps_file(0)).read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [SETTING.micro_batches * 2 * TOKENS] * 2
    samples, tokens = (float(re.findall(rf"([\d.e+]+) {what}", line)[0]) for what in ("samples/s", "tokens/s"))
    assert tokens == pytest.approx(samples * TOKENS, rel=1e-2)


@on_ranks(4)
def test_ranks_that_share_a_sequence_are_one_data_parallel_rank() -> None:
    engine = engine_of(replace(SETTING, made=partial(layers, True, True)))
    grid = engine.grid
    assert grid.data_parallel_size == engine.data.world == 1
    assert grid.get_data_parallel_id() == engine.get_data_parallel_rank() == 0
    assert grid.topology().get_dim("sequence") == SIZE
    part = dist.get_rank() % SIZE
    assert dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == [part, part + SIZE]
    engine.destroy()


def refusal(setting: Setting) -> str:
    try:
        gradients(setting)
    except (UsageError, PeerLostError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("shared", "stage", "layer"),
    [
        ((True, False, True, True), 0, "layers.2.o"),
        thorough((True, True, False, True), 1, "layers.3.o"),
        thorough((False,) * 4, 0, "layers.1.o"),
    ],
)
def test_attention_of_a_ranks_own_tokens_is_refused_on_every_stage(shared: Any, stage: int, layer: str) -> None:
    setting = replace(SETTING, made=partial(layers, *shared), options={"partition_method": [0, 3, 6]})
    for text in run_ranks(refusal, 4, setting)[2 * stage : 2 * stage + 2]:
        assert f"pipeline stage {stage} computes something else than in one process" in text and layer in text


def of_family(setting: Setting, family: str) -> dict[str, Any]:
    return {"model": share_attention(model_of(family)), "loss_fn": loss_of}


def whole(setting: Setting, family: str) -> Any:
    return called_with_inputs(model_of(family))


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
    given, alone = partial(of_family, family=family), partial(whole, family=family)
    check(replace(SETTING, schedule=schedule, zero=zero, given=given, whole=alone), 4)
