"""Indexed datasets, and metrics that a map and a reduction compute."""

from __future__ import annotations

import functools
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from shardwise.data import (
    DataAnalyzer,
    DistributedDataAnalyzer,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)
from shardwise.data import analysis as module
from shardwise.data.indexed import data_file_path, index_file_path, write_rows
from shardwise.errors import ConfigError, UsageError
from tests.harness import run_ranks

ROWS = [[3, 1, 2], [], [7], [250, 0, 1, 4]]
ALL = [value for row in ROWS for value in row]


def write(path: Path, dtype: Any = np.uint8) -> str:
    builder = MMapIndexedDatasetBuilder(data_file_path(path), dtype)
    for number, row in enumerate(ROWS):
        builder.add_item(torch.tensor(row, dtype=torch.int64))
        if number in (1, 3):
            builder.end_document()
    assert not MMapIndexedDataset.exists(path)
    builder.finalize(index_file_path(path))
    return str(path)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_rows_are_read_as_they_were_written(dtype: Any, tmp_path: Path) -> None:
    found = MMapIndexedDataset(write(tmp_path / "a b; c", dtype))
    assert [row.tolist() for row in (found[i] for i in range(len(found)))] == ROWS
    assert found[0].dtype == dtype and found.get(3, 1, 2).tolist() == [0, 1]
    assert found.doc_idx.tolist() == [0, 2, 4] and found.values.tolist() == ALL
    with pytest.raises(UsageError, match="row 0 has 3 values; 2 to 4 are not in it"):
        found.get(0, 2, 2)
    assert sorted(os.listdir(tmp_path)) == ["a b; c.bin", "a b; c.idx"]


def test_a_pickled_dataset_maps_its_files_again(tmp_path: Path) -> None:
    write_rows(str(tmp_path / "long"), np.zeros(4000, np.uint8), np.ones(4000, np.int32))
    text = pickle.dumps(MMapIndexedDataset(tmp_path / "long"))
    assert len(text) < 1000 and len(pickle.loads(text)) == 4000
    found = pickle.loads(pickle.dumps(MMapIndexedDataset(write(tmp_path / "x"))))
    assert [row.tolist() for row in (found[i] for i in range(len(found)))] == ROWS and found.values.tolist() == ALL


def test_the_files_have_the_published_form(tmp_path: Path) -> None:
    write(tmp_path / "x", np.int32)
    assert (tmp_path / "x.bin").read_bytes() == np.array(ALL, "<i4").tobytes()
    wanted = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 3) + struct.pack("<4i", 3, 0, 1, 4)
    assert (tmp_path / "x.idx").read_bytes() == wanted + struct.pack("<4q", 0, 12, 12, 16) + struct.pack("<3q", 0, 2, 4)


@pytest.mark.parametrize(
    ("code", "dtype", "integers", "known"),
    [(6, "<u2", False, True), (7, "<u4", True, True), (7, "<f4", False, False), (6, "<f8", False, False)],
)
def test_codes_of_other_writers(code: int, dtype: str, integers: bool, known: bool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    np.array([1, 2, 3], dtype).tofile(data_file_path(path))
    size = np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 1) + struct.pack("<2i2qq", 2, 1, 0, 2 * size, 0)
    (tmp_path / "x.idx").write_bytes(head)
    if known:
        assert MMapIndexedDataset(path, integers=integers).values.tolist() == [1, 2, 3]
    else:
        with pytest.raises(ConfigError, match=f"values of code {code} and {size} bytes are not known"):
            MMapIndexedDataset(path, integers=integers)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x")
    index = (tmp_path / "x.idx").read_bytes()
    for name, content, problem in (
        ("short", index[:-1], "expected an index of version 1 and"),
        ("magic", b"\x80" + index[1:], "expected an index of version 1 and"),
        ("rows", index[:18] + struct.pack("<Q", 9) + index[26:], "expected an index of version 1 and"),
        ("beyond", index[:34] + struct.pack("<i", 99) + index[38:], "rows outside of the 8 bytes"),
        ("empty", b"", "no indexed dataset can be read there"),
    ):
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            MMapIndexedDataset(path)
        assert name
    with pytest.raises(UsageError, match="uint8 does not hold all values"):
        write_rows(str(tmp_path / "y"), np.array([300]), [1], np.uint8)
    with pytest.raises(UsageError, match="scale and round the values"):
        write_rows(str(tmp_path / "y"), np.array([0.5]), [1])


# -- analysis ----------------------------------------------------------------------------------------------------------

COUNT = 23


class Lines(Dataset[torch.Tensor]):
    """Rows of tokens of different length; `fails` is the first one that cannot be read."""

    def __init__(self, fails: int = COUNT) -> None:
        self.fails, self.read = fails, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.fails:
            raise OSError("the disk is gone")
        self.read += 1
        return torch.arange(1 + index * 7 % 5)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def lengths(batch: torch.Tensor) -> torch.Tensor:
    return (batch >= 0).sum(1)


def counts(batch: torch.Tensor) -> torch.Tensor:
    return torch.bincount(batch[batch >= 0], minlength=5)


WANTED = [1 + index * 7 % 5 for index in range(COUNT)]
METRICS: dict[str, Any] = {
    "metric_names": ["len gth;", "words"],
    "metric_functions": [lengths, counts],
    "metric_types": [module.VALUE, module.TOTAL],
    "collate_fn": pad,
    "batch_size": 4,
}


def check_files(path: Path) -> None:
    def read(name: str, what: str) -> MMapIndexedDataset:
        return MMapIndexedDataset(path / name / f"{name}_{what}")

    assert read("len gth;", "sample_to_metric").values.tolist() == WANTED
    assert read("len gth;", "index_to_metric").values.tolist() == [1, 2, 3, 4, 5]
    rows = read("len gth;", "index_to_sample")
    for value in range(1, 6):
        assert rows[value - 1].tolist() == [index for index, length in enumerate(WANTED) if length == value]
    merged = read("len gth;", "index_to_sample_percentile_merged")
    assert merged.values.tolist() == rows.values.tolist() and len(merged) == COUNT
    words = [sum(length > word for length in WANTED) for word in range(5)]
    assert read("words", "metric_value").values.tolist() == words


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (3, 1), (2, 2)])
def test_workers_and_processes_find_the_same(workers: int, threads: int, tmp_path: Path) -> None:
    path = tmp_path / "a b; touch c"
    analyzers = [
        DataAnalyzer(Lines(), workers, worker, threads, save_path=path, **METRICS) for worker in range(workers)
    ]
    for analyzer in analyzers[1:]:
        analyzer.run_map()
    if workers > 1:
        with pytest.raises(UsageError, match="parts are missing"):
            analyzers[0].run_reduce()
    analyzers[0].run_map_reduce()
    check_files(path)


def test_an_interrupted_analysis_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART", 8)
    with pytest.raises(OSError, match="the disk is gone"):
        DataAnalyzer(Lines(fails=17), save_path=tmp_path, **METRICS).run_map_reduce()
    again = Lines()
    DataAnalyzer(again, save_path=tmp_path, **METRICS).run_map_reduce()
    assert again.read == COUNT - 16  # the parts of 8 that were complete are not read again
    check_files(tmp_path)
    DataAnalyzer(Lines(), save_path=tmp_path, **METRICS).run_map()
    with pytest.raises(ConfigError, match="has parts of another analysis"):
        DataAnalyzer(list(range(9)), save_path=tmp_path, **METRICS).run_map()
    others: list[dict[str, Any]] = [
        {"metric_functions": [lambda batch: 2 * lengths(batch), counts]},
        {"metric_functions": [counts, lengths]},
        {"collate_fn": functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)},
        {"sample_indices": range(1, COUNT + 1)},
    ]
    for other in others:
        with pytest.raises(ConfigError, match="has parts of another analysis"):
            DataAnalyzer(Lines(), save_path=tmp_path, **{**METRICS, **other}).run_map()


def scaled(batch: Any, factor: int, *, power: int = 1) -> Any:
    return lengths(batch) * factor**power


def in_closure(factor: int) -> Any:
    return lambda batch: scaled(batch, factor)


def in_default(factor: int) -> Any:
    return lambda batch, factor=factor: scaled(batch, factor)


@pytest.mark.parametrize("kind", ["argument", "keyword", "closure", "default"])
def test_values_of_a_metric_s_function_are_compared(kind: str, tmp_path: Path) -> None:
    def analyzed(factor: int) -> None:
        metric = {
            "argument": functools.partial(scaled, factor=factor),
            "keyword": functools.partial(scaled, factor=2, power=factor),
            "closure": in_closure(factor),
            "default": in_default(factor),
        }[kind]
        given = {**METRICS, "metric_functions": [metric, counts]}
        DataAnalyzer(Lines(), save_path=tmp_path, **given).run_map()

    analyzed(2)
    analyzed(2)
    with pytest.raises(ConfigError, match="has parts of another analysis"):
        analyzed(3)


def test_a_complete_analysis_begins_anew(tmp_path: Path) -> None:
    for factor in (1, 2):
        metrics = {**METRICS, "metric_functions": [lambda batch, factor=factor: factor * lengths(batch), counts]}
        DataAnalyzer(Lines(), save_path=tmp_path, **metrics).run_map_reduce()
        found = MMapIndexedDataset(tmp_path / "len gth;" / "len gth;_sample_to_metric").values.tolist()
        assert found == [factor * length for length in WANTED]


def test_a_second_reduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (DataAnalyzer(Lines(), 2, worker, save_path=tmp_path, **METRICS) for worker in range(2))
    with pytest.raises(UsageError, match=r"reduced already, or run_map\(\) has not begun"):
        first.run_reduce()
    first.run_map()
    second.run_map()
    write = first._write

    def write_late(name: str, *args: Any) -> None:
        if name == "words":
            second.run_reduce()
        write(name, *args)

    monkeypatch.setattr(first, "_write", write_late)
    first.run_reduce()
    check_files(tmp_path)
    with pytest.raises(UsageError, match=r"reduced already, or run_map\(\) has not begun"):
        second.run_reduce()


def on_both_ranks(path: Path) -> None:
    DistributedDataAnalyzer(Lines(), save_path=path, **METRICS).run_map_reduce()
    assert dist.get_world_size() == 2
    check_files(path)


def test_ranks_share_an_analysis(tmp_path: Path) -> None:
    run_ranks(on_both_ranks, 2, tmp_path)


def test_what_cannot_be_analyzed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a name, which can be that of a file"):
        DataAnalyzer(Lines(), save_path=tmp_path, **{**METRICS, "metric_names": ["../x", "words"]})
    wrong = {**METRICS, "metric_functions": [lambda batch: lengths(batch)[:1], counts]}
    with pytest.raises(UsageError, match=r"metric 'len gth;': 4 samples have values of the shape \(1,\)"):
        DataAnalyzer(Lines(), save_path=tmp_path, **wrong).run_map()
    with pytest.raises(UsageError, match="leave these arguments out"):
        DataAnalyzer(Lines(), specific_threads=[1], save_path=tmp_path, **METRICS)
