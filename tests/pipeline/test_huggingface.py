"""Hugging Face models as pipeline stages equal the whole model bit by bit: outputs, gradients, weights and names."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.module import PipelineModule

transformers = pytest.importorskip("transformers")
from shardwise.pipeline.huggingface import to_layers  # noqa: E402
from tests.families import FAMILIES as FAMILIES_OF  # noqa: E402
from tests.families import WORDS, build  # noqa: E402
from tests.harness import thorough  # noqa: E402
from tests.pipeline.gradients import step_by_stages  # noqa: E402

DEEP = {"num_hidden_layers": 3}
PLAIN = ("llama", "llama untied", "mistral", "qwen2", "gemma2", "gpt2", "bloom", "bert", "roberta")
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: DEEP for name in PLAIN},
    "mixtral": {**DEEP, "output_router_logits": False},
    "gpt_neox": {**DEEP, "hidden_dropout": 0.1},
    "opt": {**DEEP, "word_embed_proj_dim": 16, "dropout": 0.1},
    "bert-classes": {**DEEP, "num_labels": 3},
    "llama-classes": {**DEEP, "num_labels": 3},
    "t5": {"dropout_rate": 0.1, "tie_word_embeddings": True},
}
QUICK = ("llama", "gemma2", "mixtral", "opt", "bert-classes", "t5")
SIZE = FAMILIES_OF["llama"][1]


def batch_of(name: str, padded: bool) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, WORDS, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 2, 1]) if "classes" in name else tokens
    if not padded:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.ones_like(tokens)
    mask[0, 5:], mask[1, :3] = 0, 0
    return {"input_ids": torch.where(mask > 0, tokens, 0), "attention_mask": mask, "labels": labels}


def small_model(name: str, device: str = "cpu") -> Any:
    family = name.removesuffix("-classes")
    with torch.device(device):
        if family == name:
            model = build(name, noise=0.0, **FAMILIES[name]).train()
        else:
            kind = getattr(transformers, family.capitalize() + "ForSequenceClassification")
            torch.manual_seed(0)
            model = kind(kind.config_class(**{**FAMILIES_OF[family][1], **FAMILIES[name]})).train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # as in training: a cache changes the memory layout, and so the last bits
    return model


def whole_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """Run the whole model as one stage."""
    forward = model.forward
    model.forward = lambda given: forward(**given)  # type: ignore[method-assign]
    found = step_by_stages([model], batch)
    model.forward = forward  # type: ignore[method-assign]
    return found


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
    [
        *((name, True) if name in QUICK else thorough(name, True) for name in FAMILIES),
        ("llama untied", False),
        *(thorough(n, False) for n in FAMILIES if n != "llama untied"),
    ],
)
def test_stages_equal_the_whole_model(name: str, padded: bool) -> None:
    model = small_model(name)
    batch = batch_of(name, padded)
    expected, grads = whole_step(copy.deepcopy(model), batch)
    names = {known for known, _ in model.named_parameters()}
    for count in (2, 5):
        modules = on_ranks(model, count)
        assert {known for module in modules for known, _ in module.named_parameters()} == names
        output, found = step_by_stages([module.stage(i) for i, module in enumerate(modules)], batch)
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
    model = small_model("llama")
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
    assert sizes == [WORDS * 32, size, size, size, WORDS * 32 + 32]


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


@pytest.mark.parametrize("name", ["llama", thorough("bert"), thorough("gpt2"), thorough("gemma2")])
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
                expected, grads = whole_step(whole, batch_of(name, True))
                output, found = step_by_stages([module], batch_of(name, True))
                assert torch.equal(output.logits, expected.logits)
                assert all(torch.equal(found[known], grad) for known, grad in grads.items())
    assert all(parameter.isfinite().all() for parameter in weights.values())


def test_one_process_has_an_ordinary_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    model = small_model("gpt2")
    module = PipelineModule(to_layers(copy.deepcopy(model)), num_stages=2, activation_checkpoint_interval=1)
    expected, grads = whole_step(model, batch_of("gpt2", True))
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
        model = build("llama", num_hidden_layers=3)
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
        transformers.DebertaV2Config(
            **FAMILIES_OF["bert"][1], relative_attention=True, pos_att_type=["p2c"], position_buckets=8
        )
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
    with pytest.raises(ConfigError, match=r"a small model of this configuration.*fails.*to_layers\(model, example="):
        to_layers(build("mixtral", num_local_experts=2, num_experts_per_tok=3))


def test_skipped_blocks_are_noticed() -> None:
    model = build("opt", num_hidden_layers=3)
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


@pytest.mark.parametrize("name", [thorough("gpt2"), "t5"])
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
        results.append(step_by_stages([module.stage(i) for i, module in enumerate(modules)], batch_of(name, True)))
        assert calls[0] == (1 + interval) * len(blocks)
    (expected, grads), (output, found) = results
    assert torch.equal(output.logits, expected.logits)
    assert all(torch.equal(found[known], grad) for known, grad in grads.items())
