"""Models of transformers with sparse attention against the same models with a mask of all pairs of tokens."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise
from shardwise.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    extend_positions,
    is_sparse,
    layout_of,
    sparsify,
)
from shardwise.config.schema.attention import SparseAttention
from shardwise.engine.plans import plan_model
from shardwise.engine.sparse import use_sparse_attention
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel import begin, end, share_attention
from shardwise.parallel.data import complete
from tests.families import WORDS, build
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import config_of, goes_on, masters

TOKENS = 30
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
SECTION = {"mode": "bigbird", "block": 4, "different_layout_per_head": True, "num_random_blocks": 1}

HEADS = {"bert": 8, "roberta": 8, "llama": 8, "llama untied": 8, "gpt2": 4, "qwen3": 8}
CAUSAL = ("llama", "llama untied", "gpt2", "qwen3")
FAMILIES = ["bert", "llama", thorough("roberta"), thorough("llama untied"), thorough("gpt2"), thorough("qwen3")]


def made(family: str, **more: Any) -> Any:
    return build(family, 7, max_position_embeddings=64, use_cache=False, **more)


def data(step: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(100 + step))
    return {"input_ids": ids, "labels": ids}


def masked(family: str, layout: SparsityConfig, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the layout and padding as a mask that transformers adds to scores."""
    place = torch.arange(TOKENS) // layout.block
    seen = layout.make_layout(TOKENS).bool()[:, place][:, :, place]
    if family in CAUSAL or layout.attention == "unidirectional":
        seen = seen.tril()
    seen = seen[None] & kept.bool()[:, None, None, :]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_model_is_the_model_with_a_mask(family: str) -> None:
    kept = torch.ones(2, TOKENS, dtype=torch.int64)
    kept[1, 21:] = 0
    for layout in (
        BigBirdSparsityConfig(HEADS[family], 4, True, 2),
        FixedSparsityConfig(HEADS[family], 4, attention="unidirectional"),
    ):
        model = made(family, attn_implementation="sdpa").double().train()
        sparse = sparsify(copy.deepcopy(model), layout)
        found = sparse(**data(0), attention_mask=kept)
        expected = model(**data(0), attention_mask=masked(family, layout, kept, torch.float64))
        real = kept.bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-10, atol=1e-10)
        (found.logits[real].square().sum()).backward()
        (expected.logits[real].square().sum()).backward()
        for (name, one), other in zip(sparse.named_parameters(), model.parameters(), strict=True):
            if one.grad is not None and other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["LayoutLM", "Splinter"])
def test_an_encoder_that_does_not_say_so_is_no_causal_model(kind: str) -> None:
    """Its attention has no `is_causal`. LayoutLM makes the mask of padding itself, Splinter by transformers."""
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **size)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    sparse = sparsify(copy.deepcopy(model), DenseSparsityConfig(2, 4))
    kept = torch.ones(2, TOKENS, dtype=torch.int64)
    kept[1, 21:] = 0
    ids = data(0)["input_ids"]
    expected = model(ids, attention_mask=kept).last_hidden_state
    found = sparse(ids, attention_mask=kept).last_hidden_state
    torch.testing.assert_close(found[kept.bool()], expected[kept.bool()])
    if kind == "Splinter":
        with pytest.raises(UsageError, match="SplinterSelfAttention does not have is_causal"):
            sparse.encoder(sparse.embeddings(ids))


def plain_steps(family: str, steps: int, copies: int) -> dict[str, torch.Tensor]:
    """Train in one process in fp64, with a mask."""
    model = made(family, attn_implementation="sdpa").double()
    layout = layout_of(SECTION, HEADS[family])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = data(step, 2 * copies)
        mask = masked(family, layout, torch.ones(2 * copies, TOKENS), torch.float64)
        optimizer.zero_grad()
        model(**batch, attention_mask=mask).loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def engine_for(family: str, stage: int, recompute: bool = False, **config: Any) -> Any:
    model = made(family)
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    config = config_of(stage, SGD, sparse_attention=SECTION, **config)
    return shardwise.initialize(model=model.train(), config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    rank, copies = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for number in range(first, last):
        batch = data(number, 2 * copies)
        engine.backward(engine(**{name: x[2 * rank : 2 * rank + 2] for name, x in batch.items()}).loss)
        engine.step()


@pytest.mark.parametrize(
    ("family", "stages"), [("llama", (0, 3)), ("bert", (2,)), thorough("bert", (0, 1, 3)), thorough("gpt2", (0, 3))]
)
@on_ranks(2)
def test_training_by_the_section(family: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    """And again from a checkpoint after the first step."""
    expected = plain_steps(family, 3, 2)
    for stage in stages:
        engine = goes_on(
            lambda _, stage=stage: engine_for(family, stage, stage == 3), train, tmp_path / f"{stage}", 1, 3
        )
        for name, tensor in masters(engine.module).items():
            error = float((tensor.double() - expected[name]).norm())
            assert error <= 1e-5 * float(1 + expected[name].norm()), name
        engine.destroy()


def shared_by_heads(family: str) -> dict[str, torch.Tensor]:
    """One step with two ranks that divide heads: by tokens (Ulysses) or by tensors."""
    found = {}
    model = sparsify(made(family), layout_of(SECTION, HEADS[family]))
    group = begin(2)
    share_attention(model)
    whole = complete(data(0))
    parts = {name: x.tensor_split(2, dim=-1)[group.rank] for name, x in whole.items() if name != "labels"}
    with torch.no_grad():
        logits = model(input_ids=parts["input_ids"], position_ids=parts["position_ids"]).logits
    found["sequence"] = logits
    end()
    model = sparsify(made(family), layout_of(SECTION, HEADS[family]))
    shardwise.tp_model_init(model, 2)
    ids = data(0)["input_ids"]
    found["tensor"] = model(input_ids=ids).logits
    found["tensor"].float().square().sum().backward()
    return {name: x.detach() for name, x in found.items()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and "norm" in name.lower()
    }


@pytest.mark.parametrize("family", ["llama", thorough("bert")])
def test_heads_of_a_rank_have_their_own_layouts(family: str) -> None:
    model = made(family, attn_implementation="sdpa")
    kept = torch.ones(2, TOKENS)
    mask = masked(family, layout_of(SECTION, HEADS[family]), kept, torch.float32)
    expected = model(input_ids=data(0)["input_ids"], attention_mask=mask).logits
    expected.square().sum().backward()
    ranks = run_ranks(shared_by_heads, 2, family)
    sequence = torch.cat([rank["sequence"] for rank in ranks], dim=1)
    torch.testing.assert_close(sequence, expected.detach(), rtol=1e-3, atol=1e-4)
    for rank in ranks:
        torch.testing.assert_close(rank["tensor"], expected.detach(), rtol=1e-3, atol=1e-4)
        for name, parameter in model.named_parameters():
            if name in rank:
                torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-3, atol=1e-3)


FIXED = {"mode": "fixed", "block": 4, "different_layout_per_head": True, "num_different_global_patterns": 4}


def fixed_over_sequences() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    group = begin(2)
    model = share_attention(sparsify(made("llama"), layout_of(FIXED, HEADS["llama"])))
    whole = complete(data(0))
    parts = {name: whole[name].tensor_split(2, dim=-1)[group.rank] for name in ("input_ids", "position_ids")}
    logits = model(**parts).logits
    logits.square().sum().backward()
    end()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_fixed_layouts_of_heads_over_sequences() -> None:
    layout = layout_of(FIXED, HEADS["llama"])
    blocks = layout.make_layout(TOKENS)
    assert len({head.numpy().tobytes() for head in blocks}) == 4
    model = made("llama", attn_implementation="sdpa")
    mask = masked("llama", layout, torch.ones(2, TOKENS), torch.float32)
    expected = model(input_ids=data(0)["input_ids"], attention_mask=mask).logits
    expected.square().sum().backward()
    ranks = run_ranks(fixed_over_sequences, 2)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], dim=1), expected.detach(), rtol=1e-3, atol=1e-4)
    for name, parameter in model.named_parameters():
        found = sum(rank[1][name] for rank in ranks)
        assert (found - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_plans_know_the_layout() -> None:
    """The plan of a model that has the layout already is that of a section; the model itself stays dense."""
    model = made("llama")
    config = config_of(1, SGD, rows=2, sparse_attention=SECTION)
    planned = plan_model(model, config, ranks=1, stages=[1], batch=data(0)).plans[0]
    assert not any(map(is_sparse, model.modules()))
    dense = plan_model(model, config_of(1, SGD, rows=2), ranks=1, stages=[1], batch=data(0)).plans[0]
    assert planned.note == "" and planned.peaks["activations"] != dense.peaks["activations"]
    again = plan_model(sparsify(model, SECTION), config, ranks=1, stages=[1], batch=data(0)).plans[0]
    assert planned.peaks == again.peaks


class Own(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self.attention = SparseSelfAttention(FixedSparsityConfig(1, 4), max_seq_length=16) if sparse else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x).sum()


@on_ranks(1)
def test_a_section_that_no_layer_reads() -> None:
    config = config_of(1, SGD, sparse_attention=SECTION)
    with pytest.raises(ConfigError, match=r"Own is no model of transformers.*layout_of"):
        shardwise.initialize(model=Own(False), config=config)
    engine, *_ = shardwise.initialize(model=Own(True), config=config)
    assert engine.config["sparse_attention"]["mode"] == "bigbird"


@on_ranks(1)
def test_a_failed_initialize_leaves_the_model_dense() -> None:
    def fails(parameters: Any) -> Any:
        raise RuntimeError("no optimizer")

    model = made("llama")
    before, expected = model.config._attn_implementation, model(**data(0)).logits
    with pytest.raises(RuntimeError, match="no optimizer"):
        shardwise.initialize(model=model, config=config_of(1, None, sparse_attention=SECTION), optimizer=fails)
    assert model.config._attn_implementation == before and not any(map(is_sparse, model.modules()))
    assert torch.equal(model(**data(0)).logits, expected)


def test_the_parts_of_a_model_get_back_their_own_attention() -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**size, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**size, vocab_size=WORDS)
    own = {"": "sdpa", "vision_config": "eager", "text_config": "sdpa"}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, attn_implementation=own)
    model = transformers.LlavaForConditionalGeneration(config)
    configs = [model.config, model.config.vision_config, model.config.text_config]
    with ExitStack() as undo:
        use_sparse_attention(model, SparseAttention(**SECTION), undo, of_deepspeed=False)
        assert model.config.text_config._attn_implementation == "block_sparse"
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager", "sdpa"]


def test_long_positions() -> None:
    for family, first in (("bert", 0), ("roberta", 1)):
        model = made(family).eval()
        positions = next(p for name, p in model.named_parameters() if "position_embeddings" in name).detach().clone()
        extend_positions(model, 150)
        longer = next(p for name, p in model.named_parameters() if "position_embeddings" in name)
        assert len(longer) == 150 + first == model.config.max_position_embeddings
        old = len(positions) - first
        for place in range(150):
            assert torch.equal(longer[first + place], positions[first + place % old])
        sparsify(model, BSLongformerSparsityConfig(HEADS[family], 16))
        ids = torch.randint(3, WORDS, (2, 141), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(2, 144, dtype=torch.int64)
        mask[:, 141:] = 0
        with torch.no_grad():
            padded = model(input_ids=torch.nn.functional.pad(ids, (0, 3)), attention_mask=mask).logits
            torch.testing.assert_close(padded[:, :141], model(input_ids=ids).logits)
    with pytest.raises(UsageError, match="has 150 positions already"):
        extend_positions(model, 150)


def test_models_that_cannot_have_a_layout() -> None:
    layout = FixedSparsityConfig(4, 4)
    with pytest.raises(UsageError, match="no model of transformers"):
        sparsify(nn.Linear(1, 1), layout)
    with pytest.raises(UsageError, match="its decoder attends to another sequence"):
        sparsify(build("t5"), layout)
    with pytest.raises(UsageError, match="pass num_heads=8"):
        sparsify(made("llama"), layout)
    layout = FixedSparsityConfig(8, 4)
    model = sparsify(build("mistral"), layout)
    with pytest.raises(UsageError, match="sliding windows have no layout"):
        model(**data(0))
    model = sparsify(made("llama"), layout)
    with pytest.raises(UsageError, match="use_cache"):
        model.generate(data(0)["input_ids"], max_new_tokens=3, use_cache=True)
    positions = torch.arange(TOKENS).remainder(10)[None].expand(2, -1)
    with pytest.raises(UsageError, match="Packed samples"):
        model(**data(0), position_ids=positions)
