"""The communication log where times are known, and where the host does not learn them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.comm import ledger as ledgers
from shardwise.comm import logger
from shardwise.comm.ledger import Ledger
from shardwise.comm.logger import UNKNOWN, CommsLogger
from shardwise.errors import ConfigError
from tests.harness import on_ranks
from tests.profile.test_engine import engine_of, window


def test_what_was_not_measured_is_counted_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    log = CommsLogger()
    log.configure(enabled=True, verbose=True)
    log.append("all_gather", 1000, 0.5, 2)
    log.append("reduce_scatter", 1000, None, 2)
    log.append("reduce_scatter", 1000, None, 2)
    assert log.comms_dict == {
        "all_gather": {1000: [1, [500.0], [pytest.approx(1.6e-5)], [pytest.approx(8e-6)]]},
        "reduce_scatter": {1000: [2, [], [], []]},
    }
    assert log.get_operation_summary("reduce_scatter")[1000]["avg_latency_ms"] == 0
    measured, unknown = (line.split() for line in log.table().splitlines() if "1000 B" in line)
    assert measured == ["1000", "B", "1", "500.00", "500.00", "0.00", "0.00"]
    assert unknown == ["1000", "B", "2", *[UNKNOWN] * 4]
    assert log.get_total_operations() == 3


class Mark:
    """A place of a device that gets there when it is told to."""

    at = 0.0
    reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: Mark) -> float:
        return other.at - self.at


def test_times_of_a_device_are_read_when_it_has_got_there(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Mark] = []

    def now(cuda: bool) -> Mark:
        marks.append(Mark())
        marks[-1].at = 5.0 * len(marks)
        return marks[-1]

    monkeypatch.setattr(ledgers, "now", now)
    log = CommsLogger()
    log.configure(enabled=True)
    ledger = Ledger(timed=True)
    ledger.listener = functools.partial(log.put, False)
    for _ in range(3):
        record = ledger.open("all_gather", "data", 1000, 500, "layers.0", ranks=2)
        record.begun = now(True)
        ledger.close(record, 0.0)
        if len(marks) == 4:
            marks[1].reached = True  # the first collective has ended, and nobody has waited
    assert log.comms_dict["all_gather"][1000][:2] == [1, [5.0]] and not marks[3].reached
    assert log.get_operation_summary("all_gather")[1000]["count"] == 3  # a summary waits
    assert log.get_raw_data()["all_gather"][1000][1] == [5.0, 5.0, 5.0] and marks[5].reached


def test_after_an_error_the_log_does_not_wait_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, record, mark = CommsLogger(), Ledger().open("all_gather", "data", 1000, 500, "layers.0"), Mark()
    log.configure(enabled=True, path=str(tmp_path))
    record.begun = record.ended = mark
    log.put(False, record)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    log.configure(path="")
    log.reset_data()
    assert not mark.reached and not log.has_data()


def test_sizes_beyond_the_limit_share_an_entry() -> None:
    log = CommsLogger()
    log.configure(enabled=True)
    for size in range(0, 3000, 2):
        log.append("all_to_all", size, 0.5, 2)
    assert log.get_total_operations() == 1500 and len(log.comms_dict["all_to_all"]) == 512 + 3
    assert log.comms_dict["all_to_all"][2048][0] == 512


def test_the_log_may_begin_after_the_engine() -> None:
    log, ledger = CommsLogger(), Ledger()
    log.listen(SimpleNamespace(ledger=ledger, waits_on_host=False, device=torch.device("cuda")))  # type: ignore[arg-type]
    for enabled, timed, counted in ((None, False, 0), (True, True, 1), (False, False, 1)):
        log.configure(enabled=enabled)
        assert ledger.timed == timed
        ledger.close(ledger.open("all_gather", "data", 1000, 500, "layers.0"), 0.0)
        assert log.get_total_operations() == counted


@on_ranks(2)
def test_a_line_for_each_collective_of_each_rank(tmp_path: Path) -> None:
    engine = engine_of(3, comms_logger={"enabled": True, "path": str(tmp_path / "log")})
    for _ in range(2):
        window(engine)
    engine.sharded.finish_gathers()
    rank, log = engine.global_rank, logger.comms_logger
    log.append("mine", 4, 0.5, 2, "here:1")
    log.settle()
    lines = [json.loads(text) for text in (tmp_path / "log" / f"rank_{rank}.jsonl").read_text().splitlines()]
    records = [
        (record.op, record.label, record.size, record.sent, record.step)
        for record in engine.ledger.records()
        if record.finished is not None
    ]
    *engines, mine = lines
    told = [(line["op"], line["unit"], line["bytes"], line["sent"], line["step"]) for line in engines]
    assert sorted(told) == sorted(records) and {line["rank"] for line in lines} == {rank}
    assert {line["step"] for line in engines} == {0, 1} and len(engines) > 10
    assert all(0 <= line["waited_ms"] <= line["ms"] + 1e-6 and line["time"] > 1e9 for line in engines)
    assert [line["time"] for line in engines] == sorted(line["time"] for line in engines)
    assert {line["group"] for line in engines} == {"data_parallel"}
    assert (mine["op"], mine["bytes"], mine["ms"], mine["line"]) == ("mine", 4, 500.0, "here:1")
    assert mine["step"] is None and mine["sent"] is None
    step = engine.communication(1)
    for op, units in step.items():
        for unit, one in units.items():
            assert one.sent == sum(row[3] for row in records if (row[0], row[1], row[4]) == (op, unit, 1))
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(step)
    file = log.file
    engine_of(1, comms_logger={"enabled": True})
    assert log.file is file is not None  # another engine leaves the file open
    log.configure(enabled=False, path="")
    log.reset_data()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = CommsLogger()
    with pytest.raises(ConfigError, match=r"comms_logger\.path: .*file/rank_0\.jsonl cannot be written"):
        log.configure(path=str(tmp_path / "file"))
    assert log.file is None
