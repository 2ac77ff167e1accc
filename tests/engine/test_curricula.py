"""Sequences that begin short, and layers that drop tokens: the same training as a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.data.fetch import mixed_seed
from shardwise.data.token_drop import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.schedules.difficulty import CurriculumScheduler
from tests.harness import on_ranks, thorough, training
from tests.harness.training import Tensors, assert_close, goes_on, masters, parameters_digest

WIDTH, WORDS, LENGTH, STEPS, LAYERS = 8, 11, 12, 5, 3
GROWTH = {"total_curriculum_step": 4, "difficulty_step": 2}
SHORT = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": GROWTH,
}
LENGTHS = [6, 8, 10, 12, 12]
LTD = {
    "enabled": True,
    "total_layer_num": LAYERS,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [0, 2],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 5, "seq_per_step": 2},
    },
}
TOKENS = [4, 6, 8, 10, 12]


def routing(**changes: Any) -> dict[str, Any]:
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {**LTD, **changes}}}


class Block(nn.Module):
    """Attention with a mask, and an MLP; `hidden` has the batch first, or the sequence."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm, self.first = nn.LayerNorm(WIDTH), first
        self.kind = "block"

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
        x = hidden.transpose(0, 1) if self.first else hidden
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        scores = scores.masked_fill(~mask, -1e9) if mask is not None else scores
        x = x + scores.softmax(-1) @ v
        x = x + self.down(torch.tanh(self.up(x)))
        return x.transpose(0, 1) if self.first else x


class Net(nn.Module):
    """A causal model that returns its loss."""

    def __init__(self, first: bool = False, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(first) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.first, self.by_name = first, by_name
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, chosen: dict[int, torch.Tensor] | None = None) -> Any:
        self.seen.append(ids.shape[1])
        x = self.words(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None]
        for number, block in enumerate(self.blocks):
            assert block.kind == "block"
            if chosen is None:
                x = x.transpose(0, 1) if self.first else x
                x = block(hidden=x, mask=mask) if self.by_name else block(x, mask)
                x = x.transpose(0, 1) if self.first else x
            elif number not in chosen:
                x = block(x, mask)
            else:  # row by row
                rows = []
                for row, index in zip(x, chosen[number], strict=True):
                    out = row.clone()
                    part = mask[:, index][:, :, index]
                    rows.append(out.index_copy(0, index, block(row[index][None], part)[0]))
                x = torch.stack(rows)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def engine_of(model: nn.Module, stage: int = 0, **config: Any) -> Any:
    return training.engine_of(model, stage, {"type": "SGD", "params": {"lr": 0.2}}, **config)


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        ids = batch(step, dist.get_rank())
        engine.backward(engine(ids, labels=ids))
        engine.step()


def chosen(step: int, rank: int, count: int) -> dict[int, torch.Tensor]:
    """Return the ascending indices of the tokens that each dropping layer computes, by row."""
    if count == LENGTH:
        return {}
    found = {}
    for layer in (0, 2):
        generator = torch.Generator().manual_seed(mixed_seed(1234, 1, rank, step, 0, 1, layer))
        found[layer] = torch.rand(2, LENGTH, generator=generator).argsort(1, descending=True)[:, :count].sort(1).values
    return found


def plain(ranks: int, lengths: list[int], tokens: list[int]) -> Tensors:
    """Train in one process on the micro-batches of all ranks, truncated, with layers that compute some tokens."""
    model = Net()

    def losses(step: int) -> list[torch.Tensor]:
        parts = [batch(step, rank)[:, : lengths[step]] for rank in range(ranks)]
        return [model(ids, ids, chosen(step, rank, tokens[step])) for rank, ids in enumerate(parts)]

    return training.loop(model, torch.optim.SGD(model.parameters(), lr=0.2), losses, STEPS)


# -- sequences that begin short ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_training_is_that_of_truncated_batches(world: int) -> None:
    digests = set()
    wanted = plain(world, LENGTHS, [LENGTH] * STEPS)
    for stage in range(4):
        engine = engine_of(Net(), stage, curriculum_learning=SHORT)
        assert engine.curriculum_scheduler_legacy.get_current_difficulty() == LENGTHS[0]
        train(engine, 0, STEPS)
        assert engine.module.seen == LENGTHS
        assert_close(masters(engine.module), wanted, 1e-5)
        digests.add(parameters_digest(engine.module))
        engine.eval()
        engine(batch(0, 0), batch(0, 0))
        assert engine.module.seen[-1] == LENGTH
        engine.destroy()
    assert len(digests) == 1


@on_ranks(1)
def test_masks_are_truncated_with_their_tokens() -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
            self.shapes = [tuple(one.shape) for one in (*tensors, *named.values())]
            self.dense = all(one.is_contiguous() for one in (*tensors, *named.values()))
            return self.weight * 1

    engine = engine_of(Taking(), curriculum_learning=SHORT)
    ids = torch.ones(2, LENGTH, dtype=torch.long)
    float_mask = torch.ones(2, 1, LENGTH, LENGTH)
    engine(
        ids, ids.float(), torch.ones(2, LENGTH, 7), float_mask, ids[:, None].expand(2, LENGTH, LENGTH), torch.ones(2)
    )
    assert engine.module.shapes == [(2, 6), (2, 6), (2, 6, 7), (2, 1, 6, 6), (2, 6, 6), (2,)]
    assert engine.module.dense
    engine(ids, short=ids[:, :3])
    assert engine.module.shapes == [(2, 6), (2, 3)]
    with pytest.raises(UsageError, match="may be a mask or embeddings"):
        engine(ids, torch.ones(2, LENGTH, LENGTH))
    engine(float_mask.bool(), torch.ones(2, 5), ids)
    assert engine.module.shapes == [(2, 1, 6, 6), (2, 5), (2, 6)]
    engine(torch.ones(2, LENGTH, 7), torch.ones(2, 2 * LENGTH, dtype=torch.long))
    assert engine.module.shapes == [(2, 6, 7), (2, 2 * LENGTH)]
    with pytest.raises(UsageError, match=r"curriculum_learning: it truncates .*, found shapes \(2, 3, 9, 9\)"):
        engine(torch.ones(2, 3, 9, 9))


@on_ranks(1)
def test_a_model_that_takes_the_length_truncates_by_itself() -> None:
    class Own(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor, curriculum_seqlen: int = 0) -> Any:  # type: ignore[override]
            self.seen.append((ids.shape[1], curriculum_seqlen))  # type: ignore[arg-type]
            return super().forward(ids, labels)

    engine = engine_of(Own(), curriculum_learning=SHORT)
    train(engine, 0, 3)
    assert [one for one in engine.module.seen if isinstance(one, tuple)] == [(12, 6), (12, 8), (12, 10)]


@on_ranks(1)
def test_the_script_gives_a_schedule() -> None:
    custom = {**SHORT, "schedule_type": "custom", "schedule_config": {}}
    engine = engine_of(Net(), curriculum_learning=custom)
    with pytest.raises(UsageError, match='has schedule_type "custom" and no function yet'):
        train(engine, 0, 1)
    with pytest.raises(UsageError, match="no curriculum has the name 'rarity'; there are: seqlen"):
        engine.set_custom_curriculum_learning_schedule({"rarity": lambda step: 3})
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 2 + step})
    train(engine, 0, 3)
    assert engine.module.seen == [3, 4, 5]
    with pytest.raises(ConfigError, match='needs schedule_type "custom", which is "fixed_linear"'):
        engine_of(Net(), curriculum_learning=SHORT).set_custom_curriculum_learning_schedule({"seqlen": len})


@on_ranks(2)
def test_a_part_of_a_sequence_is_not_truncated() -> None:
    with pytest.raises(ConflictError, match="curriculum_learning: a rank has a part of each sequence"):
        engine_of(Net(), curriculum_learning=SHORT, sequence_parallel_size=2)


@on_ranks(2)
def test_a_pipeline_truncates_its_batches() -> None:
    """Batches of evaluation keep their length; between stages values are (samples * length, features)."""
    seen = []

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.shape[1])
        return nn.functional.cross_entropy(logits, labels.flatten())

    class Words(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).flatten(0, 1)

    def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(batch(2 * step + micro, 0), batch(2 * step + micro, 0)) for micro in range(2)]

    layers = [Words(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)]
    torch.manual_seed(5)
    alone = copy.deepcopy(nn.Sequential(*layers))
    model = shardwise.pipe.PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine = engine_of(model, curriculum_learning=SHORT, gradient_accumulation_steps=2)
    for step, length in enumerate(LENGTHS):
        seen.clear()
        found = engine.train_batch(iter(batches(step))).item(), engine.eval_batch(iter(batches(step))).item()
        assert seen == ([] if dist.get_rank() == 0 else [length] * 2 + [LENGTH] * 2)

        def mean(most: int, step: int = step) -> torch.Tensor:
            parts = [ids[:, :most] for ids, _ in batches(step)]
            losses = [nn.functional.cross_entropy(alone(ids), ids.flatten()) for ids in parts]
            return torch.stack(losses).mean()

        value, parameters = mean(length), list(alone.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
            parameter.data -= 0.2 * gradient
        assert found == pytest.approx((value.item(), mean(LENGTH).item()), rel=1e-5)


def test_schedules() -> None:
    def series(kind: str, steps: dict[str, Any], last: int) -> list[float]:
        scheduler = CurriculumScheduler(
            {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": kind, "schedule_config": steps}
        )
        return [scheduler.get_difficulty(step) for step in range(1, last + 1)]

    root = {"total_curriculum_step": 8, "difficulty_step": 8, "root_degree": 2}
    assert series("fixed_root", root, 9) == [24, 32, 40, 40, 48, 56, 56, 64, 64]
    discrete = {"difficulty": [8, 16, 64], "max_step": [2, 3]}
    assert series("fixed_discrete", discrete, 5) == [8, 8, 16, 64, 64]
    with pytest.raises(ConfigError, match=r"schedule_config.max_step: has 2 steps for 2 difficulties"):
        series("fixed_discrete", {"difficulty": [8, 16], "max_step": [2, 3]}, 1)


# -- layers that drop tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "way"), [(2, "wrapped"), (1, "sequence first"), (2, "by name"), thorough(1, "wrapped")]
)
@on_ranks("world")
def test_training_is_that_of_layers_that_compute_some_tokens(world: int, way: str) -> None:
    digests = set()
    wanted = plain(world, [LENGTH] * STEPS, TOKENS)
    first = way == "sequence first"
    for stage in range(4) if way == "wrapped" else (3,):
        model = Net(first, way == "by name")
        if way == "wrapped":
            convert_to_random_ltd(model, Block)
        order = "seq_batch_dim" if first else "batch_seq_dim"
        engine = engine_of(model, stage, data_efficiency=routing(hidden_state_order=order))
        train(engine, 0, STEPS)
        assert engine.random_ltd_scheduler.get_current_seq() == TOKENS[-1]
        found = {name.replace("random_ltd_layer.", ""): value for name, value in masters(engine.module).items()}
        assert_close(found, wanted, 1e-5)
        digests.add(parameters_digest(engine.module))
        if way == "wrapped":
            assert list(save_without_random_ltd(engine)) == list(wanted) or dist.get_rank()
        engine.destroy()
    assert len(digests) == 1


@on_ranks(2)
def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = {"data_efficiency": routing(), "curriculum_learning": SHORT}
    goes_on(lambda again: engine_of(Net(), 1 if again else 3, **config), train, tmp_path, 2, STEPS)


@on_ranks(1)
def test_layers_of_transformers_drop_tokens() -> None:
    """A decoder with rotary positions computes for some tokens what it computes for a sequence of them in place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    layer = model.model.layers[1]
    engine = engine_of(
        model, data_efficiency=routing(total_layer_num=2, random_ltd_layer_num=1, random_ltd_layer_id=[1])
    )
    given: list[torch.Tensor] = []
    layer.self_attn.register_forward_pre_hook(lambda *args: given.append(args[2]), with_kwargs=True)
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    before: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _, args, out: before.append(out))
    ids = batch(0, 0)
    engine(ids, attention_mask=torch.ones_like(ids))
    generator = torch.Generator().manual_seed(mixed_seed(1234, 1, 0, 0, 0, 1, 1))
    index = torch.rand(2, LENGTH, generator=generator).argsort(1, descending=True)[:, : TOKENS[0]].sort(1).values
    positions = model.model.rotary_emb(before[0], index)
    part = torch.stack([row[one] for row, one in zip(before[0], index, strict=True)])
    engine.eval()
    mask = torch.ones(TOKENS[0], TOKENS[0], dtype=torch.bool).tril().expand(2, 1, -1, -1)
    wanted = layer(part, attention_mask=mask, position_embeddings=positions)
    expected = torch.stack([x.index_copy(0, i, w) for x, i, w in zip(before[0], index, wanted, strict=True)])
    torch.testing.assert_close(hidden[0], expected)
    assert given[0]["hidden_states"].shape[1] == TOKENS[0]


@on_ranks(1)
def test_what_cannot_drop_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"random_ltd.total_layer_num: is 4, and Net has 3 layers \(Block\)"):
        engine_of(Net(), data_efficiency=routing(total_layer_num=4))
    with pytest.raises(ConfigError, match=r"random_ltd_layer_id: is "):
        engine_of(Net(), data_efficiency=routing(random_ltd_layer_id=[0, 3]))
    with pytest.raises(ConfigError, match=r"layer_token_lr_schedule.enabled: is not supported"):
        engine_of(Net(), data_efficiency=routing(layer_token_lr_schedule={"enabled": True}))
    with pytest.raises(UsageError, match="the layer's argument 'mask' has the shape"):
        train(engine_of(Net(), data_efficiency=routing(model_mask_name=None)), 0, 1)
    flat = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    engine = engine_of(nn.Sequential(*flat), data_efficiency=routing())
    with pytest.raises(
        UsageError, match=r"hidden states of the shape \(2, \d+\); expected samples, tokens and features"
    ):
        engine(torch.ones(2, WIDTH))
    with pytest.raises(UsageError, match="has no Linear"):
        convert_to_random_ltd(nn.ReLU(), nn.Linear)


def test_wrappers_keep_attributes_and_names() -> None:
    model = convert_to_random_ltd(Net(), Block)
    assert isinstance(model.blocks[0], RandomLayerTokenDrop) and model.blocks[0].kind == "block"
    assert list(remove_random_ltd_state_dict(model.state_dict())) == list(Net().state_dict())
    scheduler = RandomLTDScheduler(LTD)
    assert [scheduler.update_seq(step) for step in range(1, 7)] == [4, 6, 8, 10, 12, 12]
    assert scheduler.get_total_layer_tokens(2) == 2 * (4 + 6) + 2 * 12
    again = RandomLTDScheduler(LTD)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_current_seq() == 12
