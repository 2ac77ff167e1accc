"""What is in the files, who may be writing them at the same time or before, and what is not an event."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from shardwise.errors import UsageError
from shardwise.monitor import Event, Monitor
from shardwise.monitor.files import CSVFiles, JSONLines, append
from shardwise.monitor.pending import Pending


def section(path: Path) -> Any:
    return SimpleNamespace(enabled=True, output_path=str(path / "logs"), job_name="run")


def events(*found: tuple[str, float, int]) -> list[Event]:
    return [Event(*entry, time=12.0) for entry in found]


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_csv_has_a_file_for_each_name_and_is_appended_to(tmp_path: Path) -> None:
    for begin in (0, 2):  # a second run goes on
        service = CSVFiles(section(tmp_path))
        service.open()
        service.log(events(("Train/loss", 0.1, begin), ("a,b", math.nan, begin), ("Train/loss", 1e-300, begin + 1)))
    directory = tmp_path / "logs" / "run"
    assert sorted(file.name for file in directory.iterdir()) == ["Train_loss.csv", "a,b.csv"]
    assert rows(directory / "Train_loss.csv") == [
        ["step", "loss"],
        ["0", "0.1"],
        ["1", "1e-300"],
        ["2", "0.1"],
        ["3", "1e-300"],
    ]
    assert rows(directory / "a,b.csv") == [["step", "a,b"], ["0", "nan"], ["2", "nan"]]


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "x" * 1000, "\u00e4\n"])
def test_no_name_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    service = CSVFiles(section(tmp_path))
    service.open()
    service.log(events((name, 1.0, 2)))
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.parent == tmp_path / "logs" / "run" and rows(file)[1] == ["2", "1.0"]


def test_json_lines_are_json_whatever_the_values_are(tmp_path: Path) -> None:
    service = JSONLines(section(tmp_path))
    service.open()
    service.log(events(("a/b", 0.1, 1), ('"\n', math.inf, 2), ("c", math.nan, 3)))
    lines = (tmp_path / "logs" / "run" / "events.jsonl").read_text().splitlines()

    def no_constant(text: str) -> None:
        raise AssertionError(text)

    found = [json.loads(line, parse_constant=no_constant) for line in lines]
    assert found[0] == {"name": "a/b", "value": 0.1, "step": 1, "time": 12.0}
    assert [float(line["value"]) for line in found[:2]] == [0.1, math.inf] and math.isnan(float(found[2]["value"]))
    assert found[1]["name"] == '"\n'


def test_half_a_line_of_before_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n2")
    append(path, "3\n")
    assert path.read_bytes() == b"1\n2\n3\n"


def test_values_of_every_usual_kind() -> None:
    given = [
        1,
        True,
        numpy.float32(0.5),
        numpy.int64(3),
        numpy.array(2.0),
        torch.tensor([4]),
        torch.tensor(0.25, dtype=torch.bfloat16),
        torch.ones(1, 1, requires_grad=True) * 7,
    ]
    found = Pending([("x", value, numpy.int64(5)) for value in given]).read()
    assert [event.value for event in found] == [1.0, 1.0, 0.5, 3.0, 2.0, 4.0, 0.25, 7.0]
    assert all(type(event.value) is float and type(event.step) is int for event in found)
    assert Pending([("x", 1, 5.0)]).read()[0].step == 5


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (("x", 1.0), r"expected \(name, value, step\), found \('x', 1.0\)"),
        (3, r"expected \(name, value, step\), found 3"),
        ((3, 1.0, 1), "the name of an event is a string that is not empty, found 3"),
        (("", 1.0, 1), "the name of an event is a string that is not empty, found ''"),
        (("x\0", 1.0, 1), "the name of an event is a string"),
        (("x", "1.0", 1), "the value of 'x' is a number or a tensor of one element, found '1.0'"),
        (("x", None, 1), "the value of 'x' .* found None"),
        (("x", torch.ones(2), 1), r"the value of 'x' .* found a tensor of shape \(2,\)"),
        (("x", 1.0, "1"), "the step of 'x' is an integer, found '1'"),
        (("x", 1.0, 1.5), "the step of 'x' is an integer, found 1.5"),
        (("x", 1.0, None), "the step of 'x' is an integer, found None"),
    ],
)
def test_what_is_no_event_is_refused_where_it_is_written(event: Any, message: str, tmp_path: Path) -> None:
    writing = Monitor(SimpleNamespace(csv_monitor=section(tmp_path)))
    try:
        with pytest.raises(UsageError, match=message):
            writing.write_events([("good", 1.0, 1), event])
    finally:
        writing.close()
    assert list(tmp_path.rglob("*.csv")) == []
