"""Resolution: "auto", deprecated keys, notes, keys without effect, effective values."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from shardwise.config import Facts, accept, describe, effective, resolve
from shardwise.config.conditions import value_at
from shardwise.config.export import without_secrets
from shardwise.config.schema_index import walk
from shardwise.errors import BatchSizeError, ConfigError
from shardwise.memory.places import Where
from shardwise.zero.units.plan import where_of
from tests.config.dotted import config_of
from tests.harness.tables import tables

TABLES = tables(__file__)

FACTS = Facts(
    lr=3e-4,
    betas=(0.8, 0.95),
    eps=1e-6,
    weight_decay=0.1,
    max_grad_norm=0.5,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    total_num_steps=500,
    warmup_num_steps=50,
    precision="bf16",
)
TRAINER: dict[str, Any] = TABLES["trainer"]


def test_autos_of_a_trainer_are_filled_from_facts() -> None:
    resolution = resolve(TRAINER, world_size=8, facts=FACTS)
    notes, config = {note.path: note.reason for note in resolution.notes}, resolution.config
    for path in ("gradient_clipping", "optimizer.params.eps", "scheduler.params.warmup_max_lr", "fp16.enabled"):
        assert notes[path], path
    assert notes["optimizer.params.lr"] == "the caller's lr"
    assert notes["train_batch_size"] == "derived: 64 = 4 x 2 x 8 ranks"
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (64, 4)
    assert config.gradient_accumulation_steps == 2
    assert config.gradient_clipping == 0.5
    assert config.bf16.enabled and not config.fp16.enabled
    assert config.optimizer.params == {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    assert config.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_num_steps": 50,
        "total_num_steps": 500,
    }
    zero = config.zero_optimization
    assert zero.reduce_bucket_size == 500_000_000
    assert zero.stage3_prefetch_bucket_size is None
    assert zero.stage3_param_persistence_threshold is None
    assert config.steps_per_print is None


def test_autos_without_facts_take_the_default() -> None:
    source = {**TRAINER, "train_micro_batch_size_per_gpu": 2}
    source["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    config = resolve(source).config
    assert config.gradient_clipping == 0 and not config.bf16.enabled
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert config.scheduler.params == {"warmup_num_steps": 1000}
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    # A default is not the user's own number: code that asks whether the key was given gets "no".
    assert "reduce_bucket_size" not in config.zero_optimization.model_fields_set
    assert "sub_group_size" in config.zero_optimization.model_fields_set


def test_auto_that_needs_a_fact_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({**TRAINER, "train_micro_batch_size_per_gpu": 1})
    assert [problem.path for problem in caught.value.problems] == ["scheduler.params.total_num_steps"]
    assert "total_num_steps, a fact that the caller has not given" in str(caught.value)


def test_auto_arguments_of_torch_classes() -> None:
    source = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"momentum": "auto", "nesterov": "auto"}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 5, "gamma": "auto"}},
    }
    config = resolve(source).config
    assert config.optimizer.params == {"momentum": 0, "nesterov": False}
    assert config.scheduler.params == {"step_size": 5, "gamma": 0.1}
    source["scheduler"]["params"]["step_size"] = "auto"  # type: ignore[index]
    with pytest.raises(ConfigError, match="needs step_size, a fact"):
        resolve(source)


ASKS_BY_PRESENCE = (
    "weight_quantization",
    "datastates_ckpt",
    "checkpoint.on_signal",
    "zero_optimization.zenflow",
    "zero_optimization.zeropp_loco_param",
)


def test_auto_works_for_every_single_value() -> None:
    tried = 0
    for path, key in walk():
        dots = ".".join(path)
        if key.kind != "value" or {"[]", "*"} & {*path} or dots.startswith(ASKS_BY_PRESENCE):
            continue
        resolution = resolve(config_of({"train_batch_size": 4, dots: "auto"}), facts=Facts(micro_batch_size=4))
        value = value_at(resolution.config, dots)
        if key.takes_auto:
            assert value == "auto", dots
        else:
            assert value != "auto", dots
            assert dots in {note.path for note in resolution.notes}
        tried += 1
    assert tried > 300


@pytest.mark.parametrize(
    ("keys", "path", "value"), TABLES["deprecated"], ids=lambda item: item if isinstance(item, str) else ""
)
def test_deprecated_keys_are_forwarded_with_one_warning_each(keys: dict[str, Any], path: str, value: Any) -> None:
    resolution = resolve({"train_batch_size": 4, **keys})
    assert value_at(resolution.config, path) == value
    assert sum(path in warning for warning in resolution.warnings) == 1
    assert any(note.path == path and "deprecated" in note.reason for note in resolution.notes)


def offloading(stage: int, **keys: Any) -> Any:
    return resolve({"train_batch_size": 1, "zero_optimization": {"stage": stage, **keys}}).config.zero_optimization


def test_where_state_is_to_live() -> None:
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/fast"}
    for optimizer, parameters, where in (
        (None, None, Where()),
        ({"device": "none", "ratio": 0.5}, {"device": "none"}, Where()),
        ({**host, "ratio": 0.5}, None, Where("host", "host", share=0.5)),
        ({**host, "pin_memory": False}, {**host, "pin_memory": False}, Where("host", "pageable", "pageable")),
        (disk, None, Where("disk", "host")),
        ({**disk, "gradients": "nvme"}, None, Where("disk", "disk")),
        ({**host, "gradients": "nvme", "nvme_path": "/fast"}, None, Where("host", "disk")),
        (disk, disk, Where("disk", "host", "disk", near=1_000_000_000)),
        (None, {**disk, "max_in_cpu": 7}, Where(parameters="disk", near=7)),
    ):
        assert where_of(offloading(3, offload_optimizer=optimizer, offload_param=parameters)) == where


def test_a_missing_batch_size_names_the_keys_that_were_left_out() -> None:
    config = {"train_micro_batch_size": 2, "gradient_accumulation": 4}
    with pytest.raises(BatchSizeError, match=r"Keys without effect.*`gradient_accumulation`, `train_micro_batch_size`"):
        resolve(accept(config))
    reasons = {note.path: note.reason for note in accept({**config, "moe": 1}).ignored}
    assert "did you mean `train_micro_batch_size_per_gpu`?" in reasons["train_micro_batch_size"]
    assert "did you mean `gradient_accumulation_steps`?" in reasons["gradient_accumulation"]
    assert "did you mean" not in reasons["moe"]


def test_every_spelling_reaches_the_same_key() -> None:
    for path, key in walk():
        if path[0] != "zero_optimization" or len(path) != 2 or key.replacement:
            continue
        for spelling in key.spellings[1:]:
            value = True if isinstance(key.default, bool) else 12_345
            source = {"train_batch_size": 1, "zero_optimization": {"stage": 3, spelling: value}}
            assert getattr(resolve(source).config.zero_optimization, key.name) == value, spelling
    assert resolve({"train_batch_size": 1, "bfloat16": {"enabled": True}}).config.bf16.enabled
    offloaded = offloading(3, cpu_offload_params=True).offload_param
    assert offloaded is not None and offloaded.device == "cpu"


def test_integral_floats_tuples_and_types() -> None:
    for written in ("bf16", "bfloat16", "BFloat16", "torch.bfloat16", torch.bfloat16):
        found = resolve({"train_batch_size": 1, "communication_data_type": written}).config
        assert found.communication_data_type == "bf16"
    source = {
        "train_batch_size": 8.0,
        "zero_optimization": {"sub_group_size": 1e12, "leaf_module": {"classes": ("A", "B"), "names": "c"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e2}},
        "optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}},
    }
    config = resolve(source).config
    assert config.train_batch_size == 8 and isinstance(config.train_batch_size, int)
    assert config.zero_optimization.sub_group_size == 10**12
    assert config.zero_optimization.leaf_module.classes == ["A", "B"]
    assert config.zero_optimization.leaf_module.names == ["c"]
    assert config.scheduler.params["warmup_num_steps"] == 100
    assert isinstance(config.scheduler.params["warmup_num_steps"], int)


def test_null_sections_are_absent_sections() -> None:
    source = {"train_batch_size": 1, "fp16": None, "zero_optimization": {"offload_param": None, "leaf_module": None}}
    assert resolve(source).config == resolve({"train_batch_size": 1}).config


@pytest.mark.parametrize(("config", "path"), TABLES["without_effect"])
def test_keys_without_effect_are_listed(config: dict[str, Any], path: str) -> None:
    (note,) = resolve({"train_batch_size": 1, **config}).no_effect
    assert note.path == path and note.reason


def test_warnings_for_what_is_probably_not_meant() -> None:
    warnings = resolve(
        {
            "train_batch_size": 1,
            "vocabulary_size": 50257,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}},
        }
    ).warnings
    assert len(warnings) == 2
    assert warnings[0].startswith("vocabulary_size: 50257") and "50264" in warnings[0]
    assert warnings[1].startswith("scheduler.params.total_num_steps: 10")


@pytest.mark.parametrize("source", TABLES["effective"])
def test_effective_values_are_json_and_resolve_to_themselves(source: dict[str, Any]) -> None:
    first = resolve(source)
    saved = json.dumps(effective(first), allow_nan=False)
    second = resolve(saved)
    assert effective(second) == effective(first)
    assert not second.warnings


def test_describe_lists_given_and_chosen_values() -> None:
    rows = {row.path: row for row in describe(resolve(TRAINER, world_size=8, facts=FACTS))}
    assert rows["train_batch_size"].source == "auto"
    assert rows["zero_optimization.stage"][1:4] == (3, 0, "given")
    assert rows["optimizer.params.lr"][1:] == (3e-4, None, "auto", "the caller's lr")
    assert rows["gradient_clipping"][1:3] == (0.5, 0.0)
    assert "wandb.enabled" not in rows
    derived = {row.path: row.source for row in describe(resolve({"train_batch_size": 4, "allgather_size": 9}))}
    assert derived == {
        "train_batch_size": "given",
        "train_micro_batch_size_per_gpu": "derived",
        "gradient_accumulation_steps": "derived",
        "zero_optimization.allgather_bucket_size": "forwarded",
        "zero_optimization.overlap_comm": "derived",
    }


def test_assignment_is_validated() -> None:
    config = resolve({"train_batch_size": 4}).config
    config.gradient_accumulation_steps = 2
    with pytest.raises(ValueError):
        config.gradient_accumulation_steps = 0
    with pytest.raises(ValueError):
        config.gradient_accumulation_stepss = 1  # type: ignore[attr-defined]
    assert config.gradient_accumulation_steps == 2


def test_keys_with_dots_are_taken_to_their_sections() -> None:
    given = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 7},
        "zero_optimization.reduce_bucket_size": 256,
        "zero_optimization.stage3_prefetch_bucket_size": 230.4,
        "zero_optimization.stage3_param_persistence_threshold": 10,
        "optimizer.type": "AdamW",
    }
    before = copy.deepcopy(given)
    found = resolve(given)
    assert given == before and found.raw == before
    zero = found.config.zero_optimization
    taken = (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold)
    assert taken == (256, 230, 7) and found.config.optimizer.type == "adamw"
    said = [warning for warning in found.warnings if "one key with dots" in warning]
    assert [("not used" in warning, "where it should be written" in warning) for warning in said] == [
        (False, True),
        (False, True),
        (True, False),
        (False, True),
    ]
    assert "section `zero_optimization` says 7" in said[2]


def test_a_stage_with_dots_keeps_the_keys_of_its_section() -> None:
    given = {
        "train_batch_size": 1,
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "zero_optimization.stage": 2,
    }
    document = accept(given)
    zero = resolve(document).config.zero_optimization
    assert zero.stage == 2 and zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    assert [(note.path, note.value) for note in document.ignored] == [("zero_optimization.stage", 2)]
    with pytest.raises(ConfigError, match=r"zero_optimization\.stag: unknown key"):
        resolve(accept({"train_batch_size": 1, "zero_optimization.stag": 2}))


@pytest.mark.parametrize(("path", "written", "value", "reason"), TABLES["lax"])
def test_what_is_meant_without_a_doubt_is_read_and_shown(path: str, written: Any, value: Any, reason: str) -> None:
    row = next(row for row in describe(resolve(config_of({path: written}))) if row.path == path)
    assert (row.value, row.source, row.reason) == (value, "given", reason)
    assert type(row.value) is type(value)


def test_secrets_are_neither_shown_nor_stored() -> None:
    source = {
        "train_batch_size": 1,
        "comet": {"enabled": True, "api_key": "k3y"},
        "mlflow": {"enabled": True, "tracking_uri": "https://me:p4ss@host:5000/a@b"},
    }
    found = resolve(source)
    assert found.config.comet.api_key == "k3y" and "p4ss" in found.config.mlflow.tracking_uri
    shown = effective(found)
    assert shown["comet"]["api_key"] == "***"
    assert shown["mlflow"]["tracking_uri"] == "https://***@host:5000/a@b"
    rows = {row.path: row.value for row in describe(found)}
    assert rows["comet.api_key"] == "***" and rows["mlflow.tracking_uri"] == "https://***@host:5000/a@b"
    assert "k3y" not in json.dumps(shown) and effective(resolve(shown)) == shown
    assert effective(resolve({"train_batch_size": 1}))["comet"]["api_key"] is None
    given = without_secrets(source)
    assert given["comet"] == {"enabled": True, "api_key": "***"} and list(given) == list(source)
