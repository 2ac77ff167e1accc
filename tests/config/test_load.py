"""Reading a configuration from every form that users keep it in."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import load, resolve
from shardwise.config.jsonc import JSONSyntaxError, parse
from shardwise.errors import ConfigError
from tests.harness.tables import tables

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "betas": [0.9, 1e-3]}
TEXT = json.dumps(CONFIG)


def test_every_form_gives_the_same_dictionary(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(TEXT)
    encoded = base64.urlsafe_b64encode(TEXT.encode()).decode()
    plain = base64.b64encode(TEXT.encode()).decode()
    for source in (CONFIG, file, str(file), encoded, plain, TEXT, "  \n" + TEXT, "# a\n/* {\n*/ // b\n" + TEXT):
        assert load(source) == CONFIG, source


def test_dictionary_is_copied_and_never_changed() -> None:
    source = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "cpu_offload": False},
        "aio": {"thread_count": 1},
    }
    before = json.dumps(source)
    copy = load(source)
    copy["zero_optimization"]["stage"] = 3
    resolution = resolve(source)
    resolution.config.zero_optimization.stage = 1
    resolution.raw["zero_optimization"]["stage"] = 1
    assert json.dumps(source) == before


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text(
        """# for the big machine
        {
          // samples
          "train_batch_size": 8, /* over
             all ranks */
          "zero_optimization": {"stage": 2,},
          "name": "a // b # c /* d */",  # not a comment inside a string
          "list": [1, 2, 3,],
        } // end
        """
    )
    assert load(file) == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2},
        "name": "a // b # c /* d */",
        "list": [1, 2, 3],
    }


def test_a_byte_order_mark_counts_at_the_beginning_only(tmp_path: Path) -> None:
    file = tmp_path / "marked.json"
    file.write_text('\ufeff{"a": "\ufeff"}', encoding="utf-8")
    assert load(file) == {"a": "\ufeff"}


@pytest.mark.parametrize(("text", "line", "column", "words"), tables(__file__)["syntax"])
def test_syntax_errors_have_line_and_column(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(JSONSyntaxError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"line {line}, column {column}: ")
    assert words in str(caught.value)


def test_syntax_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text('{\n  "train_batch_size": 8,\n  "fp16" {}\n}')
    with pytest.raises(ConfigError, match=r"broken\.json is not JSON: line 3, column 10"):
        load(file)


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text('{"fp16": {"enabled": true,\n "enabled": false}, "a": [{"b": 1, "b": 2}], "c": {"d": {}, "d": {}}}')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [problem.path for problem in caught.value.problems] == ["fp16.enabled", "a[0].b", "c.d"]


@pytest.mark.parametrize("source", ["/no/such/file.json", Path("/no/such/file.json"), "bm90IGpzb24=", "x" * 5000, ""])
def test_missing_file(source: object) -> None:
    with pytest.raises(ConfigError, match="there is no file") as caught:
        load(source)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("source", [None, 3, ["a"], b"{}"])
def test_wrong_kind_of_source(source: object) -> None:
    with pytest.raises(ConfigError, match=type(source).__name__):
        load(source)


def test_directory_binary_and_non_object(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"{\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(binary)
    array = tmp_path / "array.json"
    array.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load(array)


def test_extensions_are_reported_with_their_lines() -> None:
    found = resolve('{"train_batch_size": 1,\n "fp16": {"enabled": false,},  # off\n}')
    assert found.extensions == "a comment (line 2), a trailing comma (line 2)"
    assert resolve({"train_batch_size": 1}).extensions is None


def test_what_no_check_could_go_through_is_an_error_like_any_other(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"train_batch_size": 1}
    circle.update({name: circle for name in ("fp16", "bf16", "optimizer", "scheduler")})
    line: list[Any] = []
    line.append(line)
    for source, words in [
        (circle, "contains itself"),
        ({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"betas": line}}}, "contains itself"),
        ({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 10**400}}}, "beyond the range"),
        ({"train_batch_size": 10**5000}, "beyond the range"),
    ]:
        with pytest.raises(ConfigError, match=words):
            resolve(source)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a pipe or a device"):
        resolve(tmp_path / "pipe")


def test_huge_files_have_messages_of_bounded_size(tmp_path: Path) -> None:
    file = tmp_path / "huge.json"
    file.write_text(json.dumps({f"kye_{number}": number for number in range(8_000)}, indent=1))
    with pytest.raises(ConfigError) as caught:
        resolve(file)
    assert "and 7981 more" in str(caught.value) and len(str(caught.value)) < 10_000
    for source in (
        {"train_batch_size": 1, "log_level": "x" * 10**7},
        {"train_batch_size": 1, "wandb": {"team": list(range(10**5))}},
        {"train_batch_size": 1, "x" * 10**6: 1},
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(source)
        assert len(str(caught.value)) < 2_000
