"""Hugging Face models as pipeline stages equal the whole model bit by bit: outputs, gradients, weights and names."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.module import PipelineModule

transformers = pytest.importorskip("transformers")
from shardwise.pipeline.huggingface import to_layers  # noqa: E402
from tests.harness import thorough  # noqa: E402

SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZE = SMALL | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SIZE | {"num_key_value_heads": 2}
T5_SIZE = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0}


def made(name: str, configuration: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(transformers, name)(getattr(transformers, configuration)(**options))

    return make


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": made("LlamaForCausalLM", "LlamaConfig", **SIZE),
    "llama-tied": made("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True),
    "mistral": made("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=4),
    "qwen2": made("Qwen2ForCausalLM", "Qwen2Config", **GROUPED, tie_word_embeddings=True),
    "gemma2": made("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=8, sliding_window=4),
    "mixtral": made("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "neox": made("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZE, hidden_dropout=0.1),
    "gpt2": made("GPT2LMHeadModel", "GPT2Config", **SMALL, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    "bloom": made("BloomForCausalLM", "BloomConfig", **SMALL, hidden_size=32, n_layer=3, n_head=4),
    "opt": made(
        "OPTForCausalLM",
        "OPTConfig",
        **(SMALL | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64}),
        word_embed_proj_dim=16,
    ),
    "bert": made("BertForMaskedLM", "BertConfig", **SIZE),
    "bert-classes": made("BertForSequenceClassification", "BertConfig", **SIZE, num_labels=3),
    "roberta": made("RobertaForMaskedLM", "RobertaConfig", **SIZE),
    "llama-classes": made("LlamaForSequenceClassification", "LlamaConfig", **SIZE, num_labels=3),
    "t5": made("T5ForConditionalGeneration", "T5Config", vocab_size=64, **T5_SIZE, tie_word_embeddings=True),
}


def batch_of(name: str, padded: bool) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2, 1]) if "classes" in name else tokens
    if not padded:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.ones_like(tokens)
    mask[0, 5:], mask[1, :3] = 0, 0
    return {"input_ids": torch.where(mask > 0, tokens, 0), "attention_mask": mask, "labels": labels}


def small_model(name: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = FAMILIES[name]().train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # as in training: a cache changes the memory layout, and so the last bits
    return model


def detached(item: Any) -> Any:
    return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item


def trainable(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor) and item.requires_grad]


def step(stages: list[nn.Module], batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run stages one after the other as on ranks of their own; return output and gradients by name."""
    torch.manual_seed(5)
    value: Any = batch
    passed = []
    for stage in stages:
        given = tree_map(detached, value) if passed else value
        value = stage(given) if isinstance(stage, PipelineModule) or passed or len(stages) > 1 else stage(**given)
        passed.append((given, value))
    output, grads = value, None
    for given, value in reversed(passed):
        results = [value.loss] if grads is None else trainable(value)
        torch.autograd.backward(results, grads)
        grads = [item.grad for item in trainable(given)]
    found: dict[str, torch.Tensor] = {}
    for stage in reversed(stages):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return output, found


def on_ranks(model: Any, count: int, **options: Any) -> list[PipelineModule]:
    """Return the modules of `count` ranks with copies of the model and one stage each."""
    modules = []
    for number in range(count):
        torch.manual_seed(3)
        module = PipelineModule(to_layers(copy.deepcopy(model)), **options)
        module.build([number], count)
        modules.append(module)
    return modules


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9")


@pytest.mark.parametrize(
    ("name", "padded"),
    [*((name, True) for name in FAMILIES), ("llama", False), *(thorough(n, False) for n in FAMILIES if n != "llama")],
)
def test_stages_equal_the_whole_model(name: str, padded: bool) -> None:
    model = small_model(name)
    batch = batch_of(name, padded)
    expected, grads = step([copy.deepcopy(model)], batch)
    names = {known for known, _ in model.named_parameters()}
    for count in (2, 5):
        modules = on_ranks(model, count)
        assert {known for module in modules for known, _ in module.named_parameters()} == names
        output, found = step([module.stage(i) for i, module in enumerate(modules)], batch)
        assert torch.equal(output.loss, expected.loss)
        assert torch.equal(output.logits, expected.logits)
        assert found.keys() == grads.keys()
        for known, grad in grads.items():
            if known == "shared.weight" and count == 2:
                # T5 uses the parameter three times, and two stages add the three gradients in another order.
                torch.testing.assert_close(found[known], grad, rtol=1e-6, atol=1e-8)
            else:
                assert torch.equal(found[known], grad), known


def test_a_stage_has_its_own_parameters_only() -> None:
    model = small_model("llama-tied")
    first, last = on_ranks(model, 2, partition_method=[0, 2, 5])
    own = {name for name, _ in first.named_parameters()}
    block = {name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")}
    assert own == {"model.embed_tokens.weight"} | block
    names = [name for name, _ in last.named_parameters()]
    assert names[0] == "model.embed_tokens.weight"
    assert not any(name.startswith("model.layers.0.") for name in names)
    assert last.get_parameter("lm_head.weight") is last.get_parameter("model.embed_tokens.weight")
    assert last.state_dict().keys() | first.state_dict().keys() == model.state_dict().keys()
    assert [(tie.name, tie.users) for tie in last.tied_parameters()] == [("model.embed_tokens.weight", (0, 1))]
    sizes = [cost.parameters for cost in to_layers(model).costs()]
    size = sum(p.numel() for p in model.model.layers[0].parameters())
    assert sizes == [64 * 32, size, size, size, 64 * 32 + 32]


def test_tied_parameters_of_an_encoder_and_a_decoder() -> None:
    modules = on_ranks(small_model("t5"), 3, partition_method=[0, 2, 5, 7])
    for module in modules:
        assert [(t.name, t.users) for t in module.tied_parameters()] == [("shared.weight", (0, 1, 2))]
        assert "shared.weight" in dict(module.named_parameters())
    layers = to_layers(small_model("t5"))
    assert [cost.name for cost in layers.costs()] == [
        "Embedding",
        *["T5Block"] * 2,
        "DecoderEmbedding",
        *["T5Block"] * 2,
        "Head",
    ]


@pytest.mark.parametrize("name", ["llama-tied", "bert", thorough("gpt2"), thorough("gemma2")])
def test_a_model_on_the_meta_device_is_initialized_by_parts(name: str) -> None:
    weights: dict[str, torch.Tensor] = {}
    for count in (1, 2, 5):
        for number in range(count):
            model = small_model(name, "meta")
            torch.manual_seed(7)
            module = PipelineModule(to_layers(model), loss_fn=None)
            module.build([number], count, device="cpu")
            if count == 2:
                assert any(p.is_meta for p in model.parameters())
            for known, parameter in module.named_parameters():
                assert not parameter.is_meta
                assert torch.equal(weights.setdefault(known, parameter), parameter), known
            if count == 1:
                whole = small_model(name)
                whole.load_state_dict(module.state_dict())
                expected, grads = step([whole], batch_of(name, True))
                output, found = step([module], batch_of(name, True))
                assert torch.equal(output.logits, expected.logits)
                assert all(torch.equal(found[known], grad) for known, grad in grads.items())
    assert all(parameter.isfinite().all() for parameter in weights.values())


def test_one_process_has_an_ordinary_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    model = small_model("gpt2")
    module = PipelineModule(to_layers(copy.deepcopy(model)), num_stages=2, activation_checkpoint_interval=1)
    expected, grads = step([model], batch_of("gpt2", True))
    torch.manual_seed(5)
    output = module(**batch_of("gpt2", True))
    assert module.loss_fn is not None
    loss = module.loss_fn(output, None)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(module.get_parameter(known).grad, grad) for known, grad in grads.items())
    assert [known for known, _ in module.named_parameters()] == [known for known, _ in model.named_parameters()]
    module.eval()
    model.eval()
    tokens = batch_of("gpt2", False)["input_ids"]
    with torch.no_grad():
        assert torch.equal(module(tokens).logits, model(tokens).logits)
    with pytest.raises(UsageError, match=r"has no loss\. Put `labels` into the inputs"):
        module.loss_fn(module(tokens))


def test_layers_are_measured_and_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    with torch.device("meta"):
        model = FAMILIES["llama"]()
    module = PipelineModule(to_layers(model))
    costs = module.profile(batch_of("llama", False), device="cpu")
    assert all(cost.seconds and cost.bytes and cost.bytes > 4 * cost.parameters for cost in costs)
    module.build([0, 1], 2, device="cpu", costs=costs)
    assert module.boundaries is not None
    assert all(low < high for low, high in pairwise(module.boundaries))
    assert module(**batch_of("llama", False)).loss.isfinite()


class LateSkip(transformers.LlamaModel):  # type: ignore[misc,name-defined]
    """The end of the model sees the embedding again, which a stage with the head cannot compute."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        first = hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for block in self.layers:
            hidden = block(hidden, position_embeddings=positions)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.norm(hidden) + first)


class BetweenBlocks(transformers.LlamaModel):  # type: ignore[misc,name-defined]
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for block in self.layers:
            hidden = self.norm(block(hidden, position_embeddings=positions))
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=hidden)


class HiddenScale(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LateSkip, "LateSkip: as pipeline stages, the model gives another last_hidden_state"),
        (BetweenBlocks, "BetweenBlocks: norm is called between blocks"),
        (HiddenScale, "HiddenScale: scale belongs to a module that contains the blocks"),
    ],
)
def test_models_that_are_not_proved_equal_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_layers(make(transformers.LlamaConfig(**SIZE)))


def test_models_without_known_blocks_and_other_modules_are_refused() -> None:
    deberta = transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(**SIZE, relative_attention=True, pos_att_type=["p2c"], position_buckets=8)
    )
    with pytest.raises(
        ConfigError, match=r"DebertaV2ForMaskedLM: the model cannot be divided.*Write the model as a list"
    ):
        to_layers(deberta)
    with pytest.raises(UsageError, match=r"expected a transformers\.PreTrainedModel, found Linear"):
        to_layers(nn.Linear(2, 2))


def test_an_own_example_is_compared() -> None:
    config = transformers.LlamaConfig(**SIZE)
    layers = to_layers(small_model("llama"), example=transformers.LlamaForCausalLM(config))
    assert len(layers.costs()) == 5
    with pytest.raises(ConfigError, match="gives another last_hidden_state"):
        to_layers(small_model("llama"), example=LateSkip(config))


def test_a_small_model_that_fails_is_no_fault_of_the_stages() -> None:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=3)
    with pytest.raises(ConfigError, match=r"a small model of this configuration.*fails.*to_layers\(model, example="):
        to_layers(transformers.MixtralForCausalLM(config))


def test_skipped_blocks_are_noticed() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **(SMALL | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64}),
        word_embed_proj_dim=32,
    )
    model = transformers.OPTForCausalLM(config)
    (module,) = on_ranks(model, 1)
    module.stage(0)(batch_of("opt", False))
    for container in module.stage(0)._whole[1]:  # type: ignore[union-attr,index]
        container.layerdrop = 1.0  # type: ignore[assignment]
    module.train()
    with pytest.raises(UsageError, match=r"blocks of the layers \[\] in this forward pass, expected \[1, 2, 3\]"):
        module.stage(0)(batch_of("opt", False))


def test_wrong_inputs_and_intervals() -> None:
    (module,) = on_ranks(small_model("llama"), 1)
    with pytest.raises(UsageError, match="expected a mapping of arguments of the model, or a tensor of input_ids"):
        module((torch.ones(1), torch.ones(1)))
    with pytest.raises(UsageError, match="these are none: output_attentions"):
        module({"input_ids": torch.ones(1, 2).long(), "output_attentions": True})
    with pytest.raises(ConfigError, match="recomputed one by one: expected 0 or 1, found 2"):
        on_ranks(small_model("llama"), 1, activation_checkpoint_interval=2)
    module.build([0], 2)
    with pytest.raises(UsageError, match="has been dropped, because this rank did not need"):
        module.build([1], 2)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_recomputed_blocks_give_the_same_gradients(name: str) -> None:
    model = small_model(name)
    calls = [0]

    def count_calls(*_: Any) -> None:
        calls[0] += 1

    results = []
    for interval in (0, 1):
        modules = on_ranks(model, 3, activation_checkpoint_interval=interval)
        blocks = [m for module in modules for m in module.modules() if type(m).__name__ in ("GPT2Block", "T5Block")]
        for block in blocks:
            block.register_forward_pre_hook(count_calls)
        calls[0] = 0
        results.append(step([module.stage(i) for i, module in enumerate(modules)], batch_of(name, True)))
        assert calls[0] == (1 + interval) * len(blocks)
    (expected, grads), (output, found) = results
    assert torch.equal(output.logits, expected.logits)
    assert all(torch.equal(found[known], grad) for known, grad in grads.items())


def test_a_stage_keeps_no_tensor_of_a_pass() -> None:
    modules = on_ranks(small_model("llama"), 2)
    passed = modules[0].stage(0)(batch_of("llama", True))
    last = modules[1].stage(1)
    hidden = passed["values"]["hidden_states"]
    alive = weakref.ref(hidden)
    with torch.no_grad():
        last(passed)
    del passed, hidden
    assert alive() is None


def test_messages_have_one_order_on_all_ranks() -> None:
    modules = on_ranks(small_model("t5"), 2, partition_method=[0, 5, 7])
    passed = modules[0].stage(0)(batch_of("t5", True))
    assert list(passed["values"]) == ["encoder_hidden_states", "hidden_states", "position_bias"]
    assert list(passed["inputs"]) == ["input_ids", "attention_mask", "labels"]
