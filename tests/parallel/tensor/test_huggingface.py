"""Models of transformers, whose layers are divided, against one process."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.config.schema.parallel import TensorParallel
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel import share_attention, split
from shardwise.parallel.data import complete
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.huggingface import divide_model
from shardwise.parallel.tensor.layers import ShardSpec
from shardwise.parallel.tensor.plan import TensorParallelPlan, cuts_of
from shardwise.utils import safe_get_full_grad
from tests.families import ROWS, alone, batch, build
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.pool import RankFailure
from tests.harness.training import config_of
from tests.parallel.models import data, loss_of
from tests.parallel.tensor.models import check, trained

STEPS = 8
PLACES = {"max_position_embeddings": 64, "attn_implementation": "sdpa", "use_cache": False}


def itself(model: nn.Module) -> nn.Module:
    return model


def config(stage: int, size: int, **more: Any) -> dict[str, Any]:
    stepped = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}
    return config_of(stage, stepped, rows=ROWS, gradient_clipping=1e9, tensor_parallel={"autotp_size": size, **more})


def train(
    family: str,
    settings: dict[str, Any],
    steps: int = STEPS,
    prepare: Callable[[nn.Module], nn.Module] = itself,
    **more: Any,
) -> Any:
    """Train divided; return losses, gradient norm, each parameter with what it is of, and each rank's matrices."""
    model = prepare(build(family, seed=dist.get_rank(), **more))
    engine, *_ = shardwise.initialize(model=model, config=settings)

    def loss_of(step: int, rows: slice, count: int) -> torch.Tensor:
        given = batch(family, step, count)
        loss: torch.Tensor = engine(**{key: value[rows] for key, value in given.items()}).loss
        return loss

    return trained(engine, steps, loss_of)


def compare(found: list[Any], expected: Any, bound: float = 2e-5) -> float:
    """Compare what ranks have found with one process; return the share of all elements that the first rank has."""
    exact = expected[2]
    for one in found:
        check(one, expected, bound, least=1.0)
    parts = found[0][2]
    return sum(tensor.numel for tensor, _ in parts.values()) / sum(exact[name].numel() for name in parts)


FAMILIES = [
    *("gpt2", "t5", "mixtral", "qwen2_moe", "phi3", "llama", "bloom"),
    *("qwen3", "t5 gated", "gpt_neox", "opt", "bert", "modernbert", "falcon", "falcon alibi", "mpt", "bigcode", "phi"),
    *("gemma2", "olmo2", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama untied", "falcon new"),
]


@pytest.mark.parametrize(
    ("family", "size", "stage", "steps"),
    [
        *((family, 2, number % 4, 2) for number, family in enumerate(FAMILIES[:3])),
        *(thorough(family, 2, number, 2) for number, family in enumerate(FAMILIES[3:5])),
        *(thorough(family, 4, number % 4, STEPS) for number, family in enumerate(FAMILIES[:7])),
        *(thorough(family, 2 + number % 2, 3 * (number % 2), 4) for number, family in enumerate(FAMILIES[7:-2])),
    ],
)
def test_training_is_that_of_one_process(family: str, size: int, stage: int, steps: int) -> None:
    share = compare(run_ranks(train, size, family, config(stage, size), steps), alone(family, steps, 1))
    assert share < (0.5 if family in FAMILIES[7:] else 0.2) + 1 / size


@pytest.mark.parametrize("family", ["llama untied", thorough("falcon new")])
def test_heads_that_ranks_cannot_share_are_refused_with_numbers_that_would_do(family: str) -> None:
    with pytest.raises(RankFailure, match="numbers that would do: 2, 4, 6, 8"):
        run_ranks(train, 3, family, config(0, 3), 1)


def divided_by_transformers(model: nn.Module, directory: str) -> nn.Module:
    """Have transformers divide the first rank's model while it loads it: its parameters are DTensors."""
    from transformers.distributed import DistributedConfig

    kind: Any = type(model)
    if dist.get_rank() == 0:
        cast(Any, model).save_pretrained(directory)
    dist.barrier()
    found: nn.Module = kind.from_pretrained(directory, distributed_config=DistributedConfig(tp_size=2))
    return found


@pytest.mark.parametrize(("family", "stage"), [thorough("llama", 3), ("llama untied", 1)])
def test_models_that_transformers_divides(family: str, stage: int, tmp_path: Path) -> None:
    prepare = functools.partial(divided_by_transformers, directory=str(tmp_path))
    compare(run_ranks(train, 2, family, config(stage, 2), 2, prepare), alone(family, 2, 1))


def test_fused_experts_that_transformers_divides_are_refused(tmp_path: Path) -> None:
    prepare = functools.partial(divided_by_transformers, directory=str(tmp_path))
    with pytest.raises(RankFailure, match=r"without a plan, and write tensor_parallel\.autotp_size"):
        run_ranks(train, 2, "mixtral", config(1, 2), 1, prepare)


def shared_gradients(stage: int) -> dict[str, torch.Tensor]:
    """Return whole gradients of a model of whose tensors and sequences ranks have a part each."""
    model = share_attention(build("llama untied", **PLACES))
    engine = shardwise.initialize(model=model, config={**config(stage, 2), "sequence_parallel_size": 2}).engine
    loss, tokens = loss_of(engine, split(data(0, 1)))
    engine.backward(loss, weight=tokens)
    registry = engine.sharded.registry
    pairs = zip(registry, registry.parameters, strict=True)
    return {tensor.name: safe_get_full_grad(parameter) for tensor, parameter in pairs}


@pytest.mark.parametrize("stage", [1, thorough(3)])
def test_gradients_of_shared_tensors_and_sequences_are_those_of_one_process(stage: int) -> None:
    plain = build("llama untied", **PLACES)
    loss_of(plain, complete(data(0, 1)))[0].backward()
    for found in run_ranks(shared_gradients, 4, stage):
        assert found.keys() == {name for name, _ in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_copies_of_the_model_that_recompute() -> None:
    compare(run_ranks(train, 4, "qwen3", config(3, 2), 2, recomputing), alone("qwen3", 2, 2))


def recomputing(model: nn.Module) -> nn.Module:
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model


def adapters(model: nn.Module, kind: str, **how: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what peft asks it
        found: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**how))
    return found


def with_adapters(model: nn.Module) -> nn.Module:
    names = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = adapters(model, "LoraConfig", r=3, target_modules=names)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


def test_adapters_are_divided_with_their_layers() -> None:
    pytest.importorskip("peft")  # inside of a rank a skip would be a failure
    found = run_ranks(train, 2, "llama", config(3, 2), STEPS, with_adapters)
    compare(found, alone("llama", STEPS, 1, with_adapters))
    shapes = {name.partition("layers.0.")[2]: tensor.shape for name, (tensor, _) in found[0][2].items()}
    assert shapes["self_attn.q_proj.lora_A.default.weight"] == (3, 32)
    assert shapes["self_attn.q_proj.lora_B.default.weight"] == (16, 3)
    assert shapes["mlp.down_proj.lora_A.default.weight"] == (3, 12)


@on_ranks(3)
def test_divided_logits_are_put_together_in_evaluation() -> None:
    model, given = build("llama", vocab_size=41), batch("llama", 0, ROWS)
    loss, counted = float(model(**given).loss), float(model(**given, num_items_in_batch=5).loss)
    settings = config(0, 3, vocab_parallel_lm_head=True)
    engine, *_ = shardwise.initialize(model=build("llama", vocab_size=41), config=settings)
    engine.train()
    trained = engine(**given)
    assert trained.logits.shape[-1] == (14, 14, 13)[dist.get_rank()]
    found = [float(trained.loss), float(engine(**given, num_items_in_batch=5).loss)]
    engine.eval()
    with torch.no_grad():
        evaluated = engine(**given)
    assert evaluated.logits.shape[-1] == 41
    assert [*found, float(evaluated.loss)] == pytest.approx([loss, counted, loss], rel=1e-5)


def rule(pattern: str, kind: str = "column", **more: Any) -> dict[str, Any]:
    return {"patterns": [pattern], "partition_type": kind, **more}


def rules(*specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(specs), **more}}


SHAPES = [
    {"patterns": ["qkv_proj"], "shape": [[32, 16, 16], -1], "partition_dim": 0},
    {"patterns": ["gate_up_proj"], "shape": [2, -1], "partition_dim": 0},
    rule("(o|down)_proj", "row"),
]
GATHERED = rule("c_attn", gather_output=True, model_types=["gpt2"]), rule(r"attn\.c_proj", "skip")
RULED: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered": ("gpt2", rules(*GATHERED)),
    "shape": ("phi3", rules(*SHAPES, use_default_specs=False)),
    "policy": ("llama", {"injection_policy_tuple": ["self_attn.o_proj", ["mlp.down_proj"]]}),
    "policy of unknown names": ("bert", {"injection_policy_tuple": ["attention.output.dense", "output.dense"]}),
    "preset": ("bloom", {"preset_model": "bloom"}),
    "words": ("llama untied", {"partition_config": {"embedding_partition_dim": 0}, "tp": {"tp_grain_size": 8}}),
    "skip": ("mixtral", rules(rule("experts", "skip"))),
    "divided logits": ("modernbert", {"vocab_parallel_lm_head": True}),
    "tokens": ("llama untied", {"sequence_parallel": True}),
    "tokens of gpt2": ("gpt2", {"sequence_parallel": True}),
    "tokens of mixtral": ("mixtral", {"sequence_parallel": True}),
    "divided logits of a head of its own": ("llama untied", {"vocab_parallel_lm_head": True}),
}


@pytest.mark.parametrize(
    "name",
    [
        "gathered",
        "divided logits",
        "tokens",
        *map(thorough, sorted(RULED.keys() - {"gathered", "divided logits", "tokens"})),
    ],
)
def test_rules(name: str) -> None:
    family, more = RULED[name]
    assert compare(run_ranks(train, 2, family, config(1, 2, **more), 3), alone(family, 3, 1)) < 0.95


def planned(
    family: str, size: int = 2, prepare: Callable[[nn.Module], nn.Module] = itself, **more: Any
) -> TensorParallelPlan:
    return cuts_of(prepare(build(family)), size, TensorParallel(autotp_size=size, **more))


def spec(pattern: str, **more: Any) -> dict[str, Any]:
    return rules({"patterns": [pattern], **more})


def with_dora(model: nn.Module) -> nn.Module:
    return adapters(model, "LoraConfig", r=2, target_modules=["q_proj"], use_dora=True)


def with_ia3(model: nn.Module) -> nn.Module:
    return adapters(model, "IA3Config", target_modules=["k_proj"], feedforward_modules=[])


WRONG: dict[str, tuple[str, int, dict[str, Any], Any, list[str]]] = {
    "heads": ("llama untied", 3, {}, itself, ["autotp_size", "self_attn.o_proj", "numbers that would do: 2"]),
    "features": ("gpt2", 2, {"tp": {"tp_grain_size": 64}}, itself, ["autotp_size", "lm_head", "tp_grain_size"]),
    "pattern": ("llama", 2, spec("k_projj"), itself, ["layer_specs[0].patterns", "'k_projj'", "self_attn.k_proj"]),
    "shape": ("phi3", 2, spec("qkv_proj", shape=[[5, 6], -1]), itself, ["layer_specs[0].shape", "qkv_proj"]),
    "dimension": ("phi3", 2, spec("qkv_proj", partition_dim=2), itself, ["partition_dim", "qkv_proj"]),
    "strict": ("gpt2", 2, {"partition_config": {"strict_mode": True}}, itself, ["strict_mode", "transformer.wpe"]),
    "policy": ("gpt2", 2, {"injection_policy_tuple": ["o_proj"]}, itself, ["injection_policy_tuple", "'o_proj'"]),
    "preset": ("gpt2", 2, {"preset_model": "phi3"}, itself, ["preset_model", "'phi3'", "qkv_proj"]),
    "tied": ("llama", 2, spec("embed_tokens", partition_type="skip"), itself, ["lm_head", "same weight"]),
    "dora": ("llama", 2, {}, with_dora, ["q_proj", "use_dora"]),
    "ia3": ("llama", 2, {}, with_ia3, ["k_proj", "ia3"]),
    "nothing": ("llama", 2, rules(use_default_specs=False), itself, ["no layer of LlamaForCausalLM is divided"]),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_errors_name_key_and_layer(case: str) -> None:
    family, size, more, prepare, words = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        planned(family, size, prepare, **more)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_loss_of_the_forward_pass_is_not_replaced() -> None:
    division = planned("t5", vocab_parallel_lm_head=True)
    with pytest.raises(ConfigError, match="vocab_parallel_lm_head: the loss of T5ForConditionalGeneration"):
        divide_model(build("t5"), division, TensorGroup(None, [[0], [1]], 0))


@pytest.mark.parametrize(
    ("key", "value"),
    [("kernel_inject", True), ("vocab_parallel_ce_backend", "liger"), ("tp", {"tp_group": object()})],
)
def test_what_is_not_built_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel.{key}"):
        resolve({"train_batch_size": 1, "tensor_parallel": {key: value}})


def test_old_names_of_styles() -> None:
    """Of transformers 4.56; a plan for layers that are not known otherwise."""
    model = build("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.first, layer.mlp.second = nn.Linear(8, 6), nn.Linear(6, 8)  # type: ignore[union-attr]
    model._tp_plan = {"model.layers.*.mlp.first": "colwise_rep", "model.layers.*.mlp.second": "rowwise_rep"}
    found = cuts_of(model, 2, TensorParallel(autotp_size=2)).layers
    assert found["model.layers.1.mlp.first"] == ShardSpec("column", (((0, 3),), ((3, 6),)), whole_output=True)
    assert found["model.layers.1.mlp.second"] == ShardSpec("row", (((0, 3),), ((3, 6),)), whole_input=True)


def test_copies_of_divided_models_keep_what_they_have() -> None:
    model = build("phi3")
    division = cuts_of(model, 2, TensorParallel(autotp_size=2))
    divide_model(model, division, TensorGroup(None, [[0], [1]], 1))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = one.model.layers[0].self_attn
        assert (attention.config.num_attention_heads, attention.num_key_value_heads) == (4, 2)
        assert attention.config.hidden_size == 32 and one.config.num_attention_heads == 8
        assert torch.equal(attention.qkv_proj.weight, model.model.layers[0].self_attn.qkv_proj.weight)  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="no engine"):
            one(**batch("phi3", 0, 1))
