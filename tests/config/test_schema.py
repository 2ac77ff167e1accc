"""The schema itself: complete, described, strict, exported, and free of heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.config import Config, json_schema, resolve
from shardwise.config.auto import FROM_FACTS, SIZED
from shardwise.config.conditions import holds, value_at
from shardwise.config.schema import ConfigSection
from shardwise.config.schema.tables import table
from shardwise.config.schema_index import keys_of, lookup, takes_any_key, walk
from shardwise.config.unsupported import IGNORED, UNSUPPORTED
from shardwise.errors import ConfigError, NotBuiltError
from tests.config.dotted import config_of
from tests.harness.tables import tables

TABLES = tables(__file__)

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
    config, exclusive = Config(), table("exclusive.toml")
    for entry in (*UNSUPPORTED, *IGNORED):
        assert lookup(entry["path"])
        assert not holds({**entry, "within": ()}, config), f"the default of {entry['path']} asks for something"
    rows = [exclusive["conditions"], exclusive["groups"], exclusive["local_sgd"], table("overruled.toml")]
    switches = [switch for entry in UNSUPPORTED for switch in entry.get("within", ())]
    pairs = [path for *pair, _ in exclusive["pairs"] for path in pair]
    for path in (*FROM_FACTS, *SIZED, *switches, *pairs, *(path for some in rows for path in some)):
        assert lookup(path)
    for row in (row for some in rows for row in some.values()):
        for path in (row.get("of", "train_batch_size"), *row.get("within", ()), *row.get("unless", ())):
            value_at(config, path)  # raises for an unknown name
    for path in table()["hints"]["paths"]:
        with pytest.raises(KeyError):
            lookup(path)


@pytest.mark.parametrize("entry", UNSUPPORTED, ids=lambda entry: entry["path"])
def test_asking_for_what_is_not_built_is_refused(entry: dict[str, Any]) -> None:
    path, within = entry["path"], entry.get("within", ())
    asked = {path: TABLES["asking"].get(path, True)}
    with pytest.raises(ConfigError) as caught:
        resolve(config_of(asked | dict.fromkeys(within, True)))
    refused = {problem.path: problem for problem in caught.value.problems if problem.error is NotBuiltError}
    # It says what is not there and what to do now.
    assert re.fullmatch(r"this version does not have .+; .{10,}", refused[path].message)
    for switch in within:
        assert resolve(config_of(asked | dict.fromkeys(within, True) | {switch: False})).no_effect


@pytest.mark.parametrize("path", [entry["path"] for entry in IGNORED])
def test_what_changes_only_the_output_is_accepted_with_a_warning(path: str) -> None:
    (warning,) = resolve(config_of({path: TABLES["asking"].get(path, True)})).warnings
    assert warning.startswith(f"{path}: accepted, and changes nothing: ")


def test_json_schema_judges_as_the_reader_does() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for config in TABLES["accepted"]:
        assert not list(validator.iter_errors(config)), config
    for config in TABLES["refused"]:
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
