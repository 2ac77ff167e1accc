"""Sequence-parallel norms: models of transformers and flat ones against one process, memory, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.engine.plans import plan_model
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category, track_activations
from shardwise.parallel import tiled_loss
from shardwise.parallel.tensor import group as tensor_group
from shardwise.utils import safe_get_full_grad
from tests.families import build
from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, SGD, config_of, engine_of, least_peaks
from tests.parallel.tensor.models import MOMENTUM
from tests.parallel.tensor.test_together import part

WORDS, WIDTH = 32, 32


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    "gpt2": {"n_layer": 3, "n_inner": 48, "n_positions": 64},
    "mixtral": {"num_attention_heads": 4, "num_key_value_heads": 2, "output_router_logits": False},
}


def made(kind: str) -> nn.Module:
    more = {"experts_implementation": "eager"} if kind == "mixtral" else {"attn_implementation": "eager"}
    return build(kind, vocab_size=WORDS, max_position_embeddings=64, use_cache=False, **more, **SIZES[kind])


def ids(step: int, length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(step))


def config(stage: int, norms: bool = True, **more: Any) -> dict[str, Any]:
    section = {"autotp_size": 2, "sequence_parallel": norms}
    return config_of(
        stage, **{"gradient_accumulation_steps": 2, "optimizer": MOMENTUM, **more}, tensor_parallel=section
    )


@pytest.mark.parametrize(("stage", "norms"), [(3, True), thorough(1, False), thorough(2, True)])
@on_ranks(4)
def test_experts_that_are_divided_at_each_place(stage: int, norms: bool) -> None:
    """A step of Mixtral whose experts are divided among the ranks at one place of all copies of the model."""
    model = made("mixtral").double()
    torch.stack([model(input_ids=one, labels=one).loss for one in (ids(0, 9), ids(1, 9))]).mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    experts = {"enabled": True, "autoep_size": 2}
    given = config(stage, norms, expert_parallel=experts, gradient_accumulation_steps=1)
    engine, *_ = shardwise.initialize(model=made("mixtral"), config=given)
    boxes = {tensor.name: tensor.box for tensor in engine.sharded.registry}
    one = ids(engine.get_data_parallel_rank(), 9)
    engine.backward(engine(input_ids=one, labels=one).loss)
    grads = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
    engine.step()
    assert float(engine.last_step.grad_norm) == pytest.approx(float(whole), rel=1e-5)
    for name, value in grads.items():
        exact = part(wanted[name], boxes[name], value)
        assert (value - exact).norm() <= 1e-5 * exact.norm() + 1e-6 * whole, name


def held(kind: str, norms: bool, length: int) -> int:
    """Bytes of activations that a forward pass leaves behind for the backward pass."""
    engine, *_ = shardwise.initialize(model=made(kind), config=config(1, norms))
    with track_activations(engine.accountant):
        loss = engine(input_ids=ids(0, length), labels=ids(0, length)).loss
        found = engine.accountant.live[Category.ACTIVATIONS]
        engine.backward(loss)
    return found


@pytest.mark.parametrize("kind", [thorough("llama"), "gpt2"])
@on_ranks(2)
def test_activations_outside_of_divided_layers_are_halved(kind: str) -> None:
    """A norm holds its input, and a layer what it gets: of each block two inputs of norms are a rank's tokens only."""
    length, blocks = 32, 3
    without, beside = (held(kind, norms, length) for norms in (False, True))
    stream = 2 * length * WIDTH * 4
    assert without - beside >= 2 * blocks * stream / 2


@pytest.mark.parametrize("wrapped", ["LoraConfig", thorough("PromptTuningConfig")])
def test_patterns_mean_names_as_they_are_without_adapters(wrapped: str) -> None:
    peft = pytest.importorskip("peft")
    from shardwise.config.schema.parallel import TensorParallel
    from shardwise.parallel.tensor.plan import cuts_of
    from shardwise.parallel.tensor.sequence_parallel import tokens_of

    layer = r"^model\.layers\.\d+\."
    specs = [
        {"patterns": [layer + r"(self_attn\.[qkv]|mlp\.(gate|up))_proj\.weight$"], "partition_type": "column"},
        {"patterns": [layer + r"(self_attn\.o|mlp\.down)_proj\.weight$"], "partition_type": "row"},
        {"patterns": [layer + r"\w+_layernorm$", r"^model\.norm$"], "partition_type": "norm"},
    ]
    rules = {"layer_specs": specs, "use_default_specs": False, "strict_mode": False}
    section = TensorParallel.model_validate({"autotp_size": 2, "sequence_parallel": True, "partition_config": rules})

    def kinds(model: nn.Module) -> dict[str, str]:
        found = tokens_of(model, cuts_of(model, 2, section).layers, section).cuts
        return {path: cut.kind for path, cut in found.items()}

    expected = kinds(made("llama"))
    how = {"r": 2, "target_modules": ["q_proj"]} if wrapped == "LoraConfig" else {"num_virtual_tokens": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(made("llama"), getattr(peft, wrapped)(task_type="CAUSAL_LM", **how))
    found = kinds(model)
    prefix = "base_model.model." if wrapped == "LoraConfig" else "base_model."
    assert {path.removeprefix(prefix).replace(".base_layer", "") for path in found if "lora_" not in path} == (
        expected.keys()
    )
    assert sum(kind == "norm" for kind in found.values()) == 2 * 3 + 1
    # With the prefix they match as well.
    specs[0]["patterns"] = [r"^base_model\..*self_attn\.[qkv]_proj\.weight$"]
    section = TensorParallel.model_validate({"autotp_size": 2, "partition_config": {"layer_specs": specs[:1]}})
    assert any(".q_proj" in path for path in cuts_of(model, 2, section).layers)


LENGTH = 48


@pytest.mark.parametrize(
    ("kind", "stage", "norms", "world"),
    [("gpt2", 3, True, 2), thorough("llama", 1, False, 4), thorough("llama", 2, True, 2), thorough("gpt2", 0, True, 4)],
)
@on_ranks("world")
def test_the_dry_run_is_what_is_measured(kind: str, stage: int, norms: bool, world: int) -> None:
    """Most bytes in each category, as planned and as measured over two windows."""
    given = config(stage, norms, optimizer=ADAMW, gradient_accumulation_steps=1)
    engine, *_ = shardwise.initialize(model=made(kind), config=given)
    batch = {"input_ids": ids(0, LENGTH), "labels": ids(0, LENGTH)}

    def step() -> None:
        loss = engine(**batch).loss
        engine.backward(loss)
        del loss
        engine.step()
        engine.sharded.finish_gathers()

    measured = least_peaks(engine.accountant, step)
    report = engine.memory_report(batch)
    assert report.total.planned == pytest.approx(measured["total"], rel=0.03), (report, measured)
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.ACTIVATIONS):
        assert report.row(category).planned == pytest.approx(measured[category.value], rel=0.03), category


def test_plans_for_ranks_that_there_are_not() -> None:
    from shardwise.plan.architectures import Decoder, Shape

    with torch.device("meta"):
        model = Decoder(Shape(8, 2048, 16, 8000, inner=5504, llama=True))
    numel = sum(parameter.numel() for parameter in model.parameters())
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    given = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": adam}
    one, eight = (
        plan_model(model, {**given, "tensor_parallel": {"autotp_size": size}}, ranks=64, stages=[1]).plans[0].peaks
        for size in (1, 8)
    )
    whole = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 1 or name in ("tokens.weight", "head.weight")
    )
    assert eight["parameters"] <= 2 * (numel / 8 + whole) < one["parameters"] / 3
    assert eight["optimizer state"] == pytest.approx(one["optimizer state"], rel=0.02)  # divided over all ranks anyhow


class Head(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, words, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, tiles: int) -> torch.Tensor:
        return tiled_loss(self.head, hidden, labels, tiles=tiles)[0]


@pytest.mark.parametrize(("tokens", "words", "tiles"), [(512, 4096, 64), thorough(8192, 131072, 64)])
@on_ranks(2)
def test_a_loss_over_divided_words_in_tiles(tokens: int, words: int, tiles: int) -> None:
    """It peaks below a tenth of the bytes of all logits in fp32."""

    def given() -> tuple[Head, torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        return Head(words), torch.randn(1, tokens, 8, requires_grad=True), torch.randint(words, (1, tokens))

    model, expected, labels = given()
    loss = model(expected, labels, tiles)
    loss.backward()
    model, hidden, labels = given()
    rules = {"layer_specs": [{"patterns": ["head"], "partition_type": "column"}], "use_default_specs": False}
    engine = engine_of(model, 0, SGD, tensor_parallel={"autotp_size": 2, "partition_config": rules})
    with track_activations(Accountant()) as accountant:
        found = engine.module(hidden, labels, tiles)
        found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad, expected.grad, rtol=1e-4, atol=1e-8)
    assert accountant.peak[Category.ACTIVATIONS] < 0.1 * tokens * words * 4


class Exchanges:
    """A communicator of two ranks, this one with the first half, that counts exchanges."""

    def __init__(self) -> None:
        self.count = 0

    def exchange(self, own: int, label: str) -> list[int]:
        self.count += 1
        return [own, own - 1]


def test_backward_passes_exchange_no_numbers_if_each_rank_knows_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_group, "backward_pass", lambda: 1)
    comm: Any = Exchanges()
    group = tensor_group.TensorGroup(comm, [[0], [1]], 0)
    for tokens in (8, 12):
        group.begin_tokens(tokens)
    assert (group.tokens_of_all(4), group.tokens, comm.count) == ([4, 4], 8, 0)
    assert (group.tokens_of_all(6), group.tokens, comm.count) == ([6, 6], 12, 0)
    with pytest.raises(UsageError, match="has got 5 tokens"):
        group.tokens_of_all(5)
    group.begin_tokens(5)
    assert (group.tokens_of_all(3), group.tokens, comm.count) == ([3, 2], 5, 0)
    group.begin_tokens(7)  # the ranks have 4 and 3, and 4 is also half of 8
    assert (group.tokens_of_all(4), group.tokens, comm.count) == ([4, 3], 7, 1)
