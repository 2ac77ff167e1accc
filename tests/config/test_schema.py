"""The schema itself: complete, described, strict, exported, and free of heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.config import Config, json_schema, resolve
from shardwise.config.auto import RULES
from shardwise.config.schema import ConfigSection
from shardwise.config.schema.not_built import table
from shardwise.config.schema_index import keys_of, lookup, takes_any_key, walk
from shardwise.config.unsupported import IGNORED, UNSUPPORTED, Feature, value_at
from shardwise.errors import ConfigError, NotBuiltError

FREE_FORM = {"amp", "datastates_ckpt"}


def test_every_key_has_a_description_and_a_default() -> None:
    for path, key in walk():
        assert key.field.description and key.field.description.rstrip()[-1] in ".!?", path
        assert not key.field.is_required(), path


def test_every_section_forbids_unknown_keys_and_has_a_docstring() -> None:
    for path, key in walk():
        if key.child is None:
            continue
        assert key.child.__doc__ != ConfigSection.__doc__, path
        assert takes_any_key(key.child) == (path[0] in FREE_FORM), path
        if not takes_any_key(key.child):
            with pytest.raises(ValidationError, match="extra_forbidden"):
                key.child.model_validate({"no_such_key": 1})


def test_no_spelling_stands_for_two_keys() -> None:
    for section in {key.owner for _, key in walk()}:
        spellings = [
            spelling for name, key in keys_of(section).items() if name == key.name for spelling in key.spellings
        ]
        assert len(spellings) == len(set(spellings)), section


def test_replacements_of_deprecated_keys_exist() -> None:
    deprecated = [key for _, key in walk() if key.replacement]
    assert len(deprecated) == 6
    for key in deprecated:
        assert not lookup(key.replacement).replacement


def test_tables_name_existing_keys() -> None:
    config = Config()
    for entry in UNSUPPORTED:
        assert lookup(entry.path)
        assert not entry.requests(value_at(config, entry.path)), f"the default of {entry.path} asks for something"
        assert all(lookup(switch) for switch in entry.within)
    for entry in IGNORED:
        assert lookup(entry.path)
        assert not entry.requests(value_at(config, entry.path)), f"the default of {entry.path} asks for something"
    for path in RULES:
        assert lookup(path)
    for path in table()["hints"]["paths"]:
        with pytest.raises(KeyError):
            lookup(path)


ASKING: dict[str, Any] = {
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "zero_optimization.zenflow": {},
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.zeropp_loco_param": {},
    "zero_optimization.mics_shard_size": 2,
    "pipeline.stages": 2,
    "tensor_parallel.vocab_parallel_ce_backend": "liger",
    "expert_parallel.route_scale": 2.0,
    "expert_parallel.score_apply": "pre",
    "expert_parallel.num_expert_groups": 2,
    "expert_parallel.num_limited_groups": 1,
    "expert_parallel.score_func": "sigmoid",
    "expert_parallel.top_k": 2,
    "expert_parallel.routed_scaling_factor": 2.0,
    "expert_parallel.comm_backend": "deepep",
    "datastates_ckpt": {},
    "weight_quantization": {},
}


def put(source: dict[str, Any], path: str, value: Any) -> None:
    place = source
    *parents, last = path.split(".")
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value


@pytest.mark.parametrize("entry", UNSUPPORTED, ids=lambda entry: entry.path)
def test_asking_for_what_is_not_built_is_refused(entry: Feature) -> None:
    source: dict[str, Any] = {"train_batch_size": 1}
    for switch in entry.within:
        put(source, switch, True)
    put(source, entry.path, ASKING.get(entry.path, True))
    with pytest.raises(ConfigError) as caught:
        resolve(source)
    refused = {problem.path: problem for problem in caught.value.problems if problem.error is NotBuiltError}
    # It says what is not there and what to do now.
    assert re.fullmatch(r"this version does not have .+; .{10,}", refused[entry.path].message)
    for switch in entry.within:
        put(source, switch, False)
        assert resolve(source).no_effect
        put(source, switch, True)


UNHEARD_VALUES: dict[str, Any] = {
    "pipeline.activation_checkpoint_interval": 1,
    "timers": {"throughput": {"enabled": False}},
}


@pytest.mark.parametrize("path", [entry.path for entry in IGNORED])
def test_what_changes_only_the_output_is_accepted_with_a_warning(path: str) -> None:
    source: dict[str, Any] = {"train_batch_size": 1}
    put(source, path, UNHEARD_VALUES.get(path, True))
    (warning,) = resolve(source).warnings
    assert warning.startswith(f"{path}: accepted, and changes nothing: ")


EDITOR_ACCEPTS: list[dict[str, Any]] = [
    {"$schema": "x.json", "train_batch_size": "auto", "fp16": None, "bfloat16": {"enabled": "auto"}},
    {"zero_optimization": True, "allgather_size": 5e8},
    {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5e7, "cpu_offload": True}},
    {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "anything": 1}},
        "amp": {"enabled": True, "opt_level": "O1"},
    },
    {"checkpoint": {"tag_validation": "WARN"}, "pipeline": {"stages": "auto"}, "steps_per_print": 10},
]
EDITOR_REFUSES: list[dict[str, Any]] = [
    {"train_batch_size": 0},
    {"train_batch_sise": 8},
    {"zero_optimization": {"stagee": 1}},
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": {"prefetch_bucket_size": -1}},
    {"fp16": {"enabled": "maybe"}},
    {"steps_per_print": 2.5},
    {"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": []}]}}},
]


def test_json_schema_judges_as_the_reader_does() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for config in EDITOR_ACCEPTS:
        assert not list(validator.iter_errors(config)), config
    for config in EDITOR_REFUSES:
        assert list(validator.iter_errors(config)), config
        with pytest.raises(ConfigError):
            resolve({"train_batch_size": 8, **config})


def test_json_schema_knows_every_spelling() -> None:
    schema = json_schema()
    for section in {key.owner for _, key in walk()}:
        target = schema if section is Config else schema["$defs"][section.__name__]
        known = set(target["properties"]) - {"$schema"}
        assert known == set(keys_of(section)), section


def test_import_is_light_and_does_not_import_torch() -> None:
    code = (
        "import sys, shardwise.config as c; "
        "c.resolve({'train_batch_size': 8, 'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}, "
        "'scheduler': {'type': 'WarmupLR', 'params': {'warmup_max_lr': 'auto'}}}); c.json_schema(); "
        "print(sorted(m for m in ('torch', 'rich', 'typer', 'transformers', 'hjson') if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
