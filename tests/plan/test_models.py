"""Models by name: sizes, letters, and configurations of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.engine.plans import plan_model
from shardwise.errors import CommandLineError
from shardwise.memory import transformer_model_bytes
from shardwise.pipe import PipelineModule
from shardwise.plan.architectures import CONFIGS
from shardwise.plan.models import is_model_config, letters_of, longest, micro_batch, named_model

transformers = pytest.importorskip("transformers")

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "mixtral-8x7b": 46_702_792_704,
}
"""Elements of the published weights."""
SMALL = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name: str) -> None:
    assert list(PUBLISHED) == list(CONFIGS)
    model = named_model(name, False)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_letters_are_those_of_the_formulas() -> None:
    n, h, m, b, l = 4, 64, 4, 2, 64  # noqa: E741
    name = f"n={n},h={h},m={m},b={b},l={l}"
    assert letters_of(name) == {"n": n, "h": h, "m": m, "b": b, "l": l} and letters_of("bloom-560m") == {}
    model = named_model(name, False)
    assert 4 * sum(parameter.numel() for parameter in model.parameters()) == transformer_model_bytes(n, h)
    kept = n * (72 * b * l * h + 12 * b * m * l**2 + 16 * b * l)  # on a CPU; docs/memory.md
    config = {"train_micro_batch_size_per_gpu": b, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    for recompute, least, most in ((False, kept, 1.2 * kept), (True, 0.1 * kept, 0.6 * kept)):
        batch = micro_batch(model, b, l, pipeline=False)
        (plan,) = plan_model(named_model(name, recompute), config, ranks=1, stages=[0], batch=batch).plans
        assert least <= plan.peaks["activations"] <= most
    whole = named_model("n=24,h=1024,m=16,v=250880", False)
    assert sum(parameter.numel() for parameter in whole.parameters()) == 559_214_592  # BLOOM-560M
    assert isinstance(named_model(f"{name},v=96", False, pipeline=True), PipelineModule)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bloom-1b", r"bloom-1b: it is not known. Give bloom-560m, .*mixtral-8x7b; sizes such as n=24"),
        ("acme/tiny", r"acme/tiny: it is not known.*local cache of the Hugging Face hub"),
        ("n=2,h=64", r"give each letter once.*m \(heads\)"),
        ("n=2,h=64,m=4,x=3", "give each letter once"),
        ("n=2,h=64,m=4,n=3", "give each letter once"),
        ("n=2,h=64,m=four", "give each letter once"),
        ("n=0,h=64,m=4", "numbers from 1 up"),
        ("n=2,h=64,m=5", "the width h=64 is no multiple of the heads m=5"),
        ("no_module:f", "no_module:f: No module named 'no_module'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:wrong", r"wrong\(\) has raised ValueError: no"),
        (f"{__name__}:number", "has returned int"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        named_model(name, False)


def wrong() -> None:
    raise ValueError("no")


def number() -> int:
    return 3


def test_options_that_a_model_cannot_have() -> None:
    with pytest.raises(CommandLineError, match="give v, the vocabulary"):
        named_model("n=2,h=64,m=4", False, pipeline=True)
    with pytest.raises(CommandLineError, match=r"--recompute.*decides by itself"):
        named_model(f"{__name__}:number", True)


@pytest.mark.parametrize(
    ("kind", "more", "expected", "inputs"),
    [
        ("gpt2", {}, "GPT2LMHeadModel", ["input_ids", "labels"]),
        ("bert", {}, "BertForMaskedLM", ["input_ids", "labels"]),
        ("bert", {"is_decoder": True}, "BertLMHeadModel", ["input_ids", "labels"]),
        ("bert", {"architectures": ["BertModel"]}, "BertModel", ["input_ids"]),
        ("t5", {}, "T5ForConditionalGeneration", ["input_ids", "decoder_input_ids", "labels"]),
    ],
)
def test_heads_of_configurations(tmp_path: Path, kind: str, more: dict, expected: str, inputs: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 64, **SMALL[kind], **more}))
    assert is_model_config(str(path)) and is_model_config(str(tmp_path))
    model = named_model(str(tmp_path), False)
    assert type(model).__name__ == expected and next(model.parameters()).is_meta
    assert longest(model) == {"gpt2": 64, "bert": 512, "t5": None}[kind]
    batch = micro_batch(model, 2, 16, pipeline=False)
    assert list(batch) == inputs
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    (plan,) = plan_model(model, config, ranks=2, stages=[1], batch=batch).plans
    assert not plan.note and plan.peaks["activations"]
    again = named_model(str(path), True)
    assert any(getattr(part, "gradient_checkpointing", False) for part in again.modules())


def test_a_configuration_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "gpt2", **SMALL["gpt2"]}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for module in ("huggingface_hub.constants", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert type(named_model("acme/tiny", False)).__name__ == "GPT2LMHeadModel"


def test_configurations_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ('{"train_batch_size": 8}', "[]", "{", '{"model_type": "nothing"}'):
        path.write_text(text)
        assert is_model_config(str(path)) == ("model_type" in text)
        with pytest.raises(CommandLineError, match=r"it is no configuration of a model.*shardwise plan MODEL CONFIG"):
            named_model(str(path), False)
    path.write_text('{"model_type": "clip"}')
    with pytest.raises(CommandLineError, match="no model with a head for CLIPConfig"):
        named_model(str(path), False)
