"""Models that are made smaller for good: outputs stay equal, shapes shrink, files load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.compression import Compression, init_compression, redundancy_clean, student_initialization
from shardwise.errors import ConfigError, UsageError
from tests.compression.test_training import SECTIONS, batch, engine_of, made, method, train
from tests.harness import run_ranks

transformers = pytest.importorskip("transformers")


def bert(layers: int = 2) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=20
    )
    return transformers.BertModel(config).eval()


def pruning(kind: str, ratio: float, modules: list[str], related: list[list[str]], **shared: Any) -> dict[str, Any]:
    group = {"params": {"dense_ratio": ratio}, "modules": modules, "related_modules": related}
    return {f"{kind}_pruning": {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}}


TOKENS = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["l1", "topk"])
def test_rows_and_heads_of_bert_are_removed(how: str) -> None:
    """As the tutorial of DeepSpeed's library writes it."""
    section = {
        **pruning("row", 0.5, ["intermediate.dense"], [["layer.\\w+.output.dense"]], method=how, schedule_offset=0),
        **pruning(
            "head",
            0.5,
            ["attention.output.dense"],
            [["self.query", "self.key", "self.value"]],
            method=how,
            schedule_offset=0,
            num_heads=4,
        ),
        "weight_quantization": method({"all": (["*"], {"start_bits": 8, "target_bits": 8})}, quantize_groups=4),
    }
    config = {"compression_training": section}
    plain = bert()(TOKENS).last_hidden_state
    model = init_compression(bert(), config)
    Compression.of(model).advance(0)
    before = model(TOKENS).last_hidden_state
    assert not torch.allclose(before, plain, atol=1e-3)
    cleaned = redundancy_clean(model, config)
    assert torch.allclose(cleaned(TOKENS).last_hidden_state, before, atol=1e-6)
    layer = cleaned.encoder.layer[1]
    assert layer.intermediate.dense.weight.shape == (10, 12) and layer.intermediate.dense.bias.shape == (10,)
    assert layer.output.dense.weight.shape == (12, 10)
    assert layer.attention.self.query.weight.shape == (6, 12)
    assert layer.attention.output.dense.weight.shape == (12, 6)
    assert layer.attention.self.num_attention_heads == 2
    assert Compression.of(cleaned) is None
    assert not any("mask" in name or "scores" in name for name in cleaned.state_dict())


def test_gpt2_is_quantized_and_pruned_in_its_own_layers() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=2, n_positions=16)
    section = {
        **pruning("row", 0.25, ["mlp.c_fc"], [["mlp.c_proj"]], schedule_offset=0),
        "weight_quantization": method({"g": (["c_fc", "c_attn"], {"start_bits": 4, "target_bits": 4})}),
    }
    source = {"compression_training": section}
    model = init_compression(transformers.GPT2LMHeadModel(config).eval(), source)
    Compression.of(model).advance(0)
    before = model(TOKENS).logits
    cleaned = redundancy_clean(model, source)
    assert torch.allclose(cleaned(TOKENS).logits, before, atol=1e-6)
    assert cleaned.transformer.h[1].mlp.c_fc.weight.shape == (12, 12)
    assert cleaned.transformer.h[1].mlp.c_proj.weight.shape == (12, 12)
    assert len(cleaned.transformer.h[0].attn.c_attn.weight.unique()) <= 15


def test_a_weight_that_modules_share_is_cleaned_only_if_they_compute_the_same() -> None:
    config = transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=1, n_head=2, n_positions=16)
    for modules, match in (
        (["*"], "transformer.wte.weight and lm_head.weight are one parameter"),
        (["wte", "head"], ""),
    ):
        group = (modules, {"start_bits": 3, "target_bits": 3})
        source = {"compression_training": {"weight_quantization": method({"g": group})}}
        model = transformers.GPT2LMHeadModel(config).eval()
        plain = model(TOKENS).logits
        if match:
            with pytest.raises(UsageError, match=match):
                redundancy_clean(model, source)
            assert Compression.of(model) is None
            assert torch.equal(model(TOKENS).logits, plain)
        before = init_compression(model, source)(TOKENS).logits
        if match:
            with pytest.raises(UsageError, match=match):
                redundancy_clean(model, source)
            assert torch.equal(model(TOKENS).logits, before)
        else:
            assert torch.allclose(redundancy_clean(model, source)(TOKENS).logits, before, atol=1e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.out = nn.Conv2d(8, 4, 3, padding=1), nn.Linear(4 * 5 * 5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(torch.relu(self.bn1(self.conv1(x))))
        return self.out(torch.relu(x).flatten(1))


def test_channels_are_removed_with_their_norm_and_what_reads_them() -> None:
    torch.manual_seed(1)
    model, images = Residual(), torch.randn(4, 3, 5, 5)
    model.bn1.bias.data.normal_()
    section = pruning("channel", 0.5, ["conv1"], [["conv2", "bn1"]], schedule_offset=0)
    section |= {
        "activation_quantization": method(
            {"g": (["conv2"], {"bits": 8})}, schedule_offset=0, range_calibration="static"
        )
    }
    config = {"compression_training": section}
    init_compression(model, config)
    Compression.of(model).advance(0)
    model(images)
    Compression.of(model).advance(1)
    model.eval()
    before = model(images)
    cleaned = redundancy_clean(model, config)
    assert torch.allclose(cleaned(images), before, atol=1e-5)
    assert cleaned.conv1.weight.shape == (4, 3, 3, 3) and cleaned.bn1.running_mean.shape == (4,)
    assert cleaned.bn1.num_features == 4 and cleaned.conv2.in_channels == 4
    assert len(cleaned.conv2._forward_pre_hooks) == 1  # inputs stay quantized


def test_a_part_of_a_model_is_cleaned() -> None:
    related = [["self.query", "self.key", "self.value"]]
    section = pruning("head", 0.5, ["attention.output.dense"], related, schedule_offset=0, num_heads=4)
    part = bert()
    model = nn.ModuleDict({"part": part, "rest": nn.Linear(2, 2)})
    init_compression(part, {"compression_training": section})
    Compression.of(model).advance(0)
    before = part(TOKENS).last_hidden_state
    assert redundancy_clean(model, {"compression_training": section}) is model
    assert torch.allclose(part(TOKENS).last_hidden_state, before, atol=1e-6)
    assert part.encoder.layer[1].attention.self.num_attention_heads == 2 and Compression.of(model) is None


def test_flattened_channels_are_runs_of_inputs() -> None:
    torch.manual_seed(2)
    model, images = Residual().eval(), torch.randn(4, 3, 5, 5)
    config = {"compression_training": pruning("channel", 0.5, ["conv2"], [["out"]], schedule_offset=0)}
    init_compression(model, config)
    Compression.of(model).advance(0)
    before = model(images)
    assert torch.allclose(redundancy_clean(model, config)(images), before, atol=1e-6)
    assert model.out.weight.shape == (2, 50)


def test_without_related_modules_zeros_stay() -> None:
    config = {"compression_training": {"row_pruning": method({"g": (["up"], {"dense_ratio": 0.5})})}}
    cleaned = redundancy_clean(made(), config)  # prepared here, and pruned from the present weights
    assert (cleaned.up.weight == 0).all(1).sum() == 4 and cleaned.up.weight.shape == (8, 6)
    assert ((cleaned.up.bias == 0) == (cleaned.up.weight == 0).all(1)).all()


def test_what_cannot_be_made_smaller_is_refused() -> None:
    config = {"compression_training": pruning("row", 0.5, ["up"], [["up|down"]])}
    assert redundancy_clean(made(), config).down.weight.shape == (6, 4)
    with pytest.raises(ConfigError, match="has to name one module next to 'up', and finds no module"):
        redundancy_clean(made(), {"compression_training": pruning("row", 0.5, ["up"], [["other"]])})
    with pytest.raises(ConfigError, match="finds words, down, head"):
        redundancy_clean(made(), {"compression_training": pruning("row", 0.5, ["up"], [["."]])})
    with pytest.raises(UsageError, match="'head' has 6 inputs, no multiple of 8 parts"):
        redundancy_clean(made(), {"compression_training": pruning("row", 0.5, ["up"], [["head"]])})
    tied = made()
    tied.down.weight = nn.Parameter(torch.randn(6, 8))
    tied.again = nn.Linear(8, 6)
    tied.again.weight = tied.down.weight
    with pytest.raises(UsageError, match=r"down.weight is shared with another module"):
        redundancy_clean(tied, {"compression_training": pruning("row", 0.5, ["up"], [["down"]])})
    engine = engine_of("sparse", 0)
    with pytest.raises(UsageError, match=r"Call engine.destroy\(\) before"):
        redundancy_clean(engine.module, {"compression_training": SECTIONS["sparse"]})


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_of_a_sharded_model_load_into_a_prepared_one_and_clean_to_equal_outputs(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path))
    for kind in ("weights", "sparse", "static"):
        expected = load_file(tmp_path / f"{kind}.out")["out"]
        config = {"compression_training": SECTIONS[kind]}
        model = init_compression(made(), config)
        model.load_state_dict(load_file(tmp_path / kind / "model.safetensors"))
        compression = Compression.of(model)
        assert compression is not None
        compression.loaded(5, dict(model.state_dict()))
        model.eval()
        assert torch.equal(model(batch(9, 0)[0]), expected), kind
        copied = copy.deepcopy(model)
        assert torch.allclose(redundancy_clean(copied, config)(batch(9, 0)[0]), expected, atol=1e-6), kind
        assert torch.equal(model(batch(9, 0)[0]), expected), kind  # the copy had hooks of its own


def _saves(directory: str) -> None:
    from safetensors.torch import save_file

    for kind in ("weights", "sparse", "static"):
        engine = engine_of(kind, 3)
        train(engine, range(5))
        engine.save_16bit_model(f"{directory}/{kind}")
        engine.eval()
        with torch.no_grad():
            out = engine(batch(9, 0)[0])
        if torch.distributed.get_rank() == 0:
            save_file({"out": out}, f"{directory}/{kind}.out")
        engine.destroy()
        assert torch.equal(engine.module(batch(9, 0)[0]), out)


# -- layers of a teacher -----------------------------------------------------------------------------------------------


def reduction(**changes: Any) -> dict[str, Any]:
    section = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "encoder.layer",
        "teacher_layer": [1, 3],
        "other_module_name": ["embeddings", "pooler"],
    }
    return {"compression_training": {"layer_reduction": {**section, **changes}}}


def test_a_student_begins_with_layers_of_its_teacher() -> None:
    teacher, student = bert(4), bert(2)
    for parameter in student.parameters():
        parameter.data.zero_()
    init_compression(student, reduction(), teacher_model=teacher)
    for at, number in ((0, 1), (1, 3)):
        pairs = zip(student.encoder.layer[at].parameters(), teacher.encoder.layer[number].parameters(), strict=True)
        assert all(torch.equal(own, of) for own, of in pairs)
    assert torch.equal(student.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight)
    engine = shardwise.initialize(model=student, config={"train_batch_size": 1, **reduction()})[0]
    assert Compression.of(engine.module).reduced


def test_a_sharded_teacher_gives_its_layers() -> None:
    run_ranks(_sharded_teacher, 2)


def _sharded_teacher() -> None:
    stage3 = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    teacher = shardwise.initialize(model=bert(4), config=stage3)[0]
    with shardwise.zero.Init(config_dict_or_path=stage3):
        student = bert(2)
    student_initialization(student, teacher.module, reduction())
    for own, of in zip(
        student.encoder.layer[1].parameters(), teacher.module.encoder.layer[3].parameters(), strict=True
    ):
        with shardwise.zero.GatheredParameters([own, of]):
            assert torch.equal(own, of)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"keep_number_layer": 3, "teacher_layer": [1, 2, 3]}, ConfigError, "is 3, and the student has 2 layers"),
        ({"teacher_layer": [1, 9]}, ConfigError, r"the teacher has no module 'encoder.layer.9'"),
        ({"other_module_name": ["classifier"]}, ConfigError, "the student has no module 'classifier'"),
        ({"teacher_layer": [1]}, ConfigError, "has 1 layers, and .*keep_number_layer` is 2"),
        ({"module_name_prefix": None}, ConfigError, "module_name_prefix: is missing"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        init_compression(bert(2), reduction(**changes), teacher_model=bert(4))
    with pytest.raises(UsageError, match="needs teacher_model="):
        init_compression(bert(2), reduction())
