"""The ledger keeps totals for ever and the newest records; the communication log follows its conventions."""

from __future__ import annotations

import pytest

from shardwise.comm.ledger import Ledger
from shardwise.comm.logger import CommsLogger, bandwidths
from shardwise.errors import UsageError


def test_records_are_written_before_launch_and_closed_after_waiting() -> None:
    ledger = Ledger(capacity=2)
    seen: list[int] = []
    ledger.listener = lambda record: seen.append(record.sequence)
    first = ledger.open("all_gather", "dp", 100, 50, "block.0")
    assert ledger.in_flight() == [first]
    ledger.close(first, 0.25)
    assert first.waited == 0.25
    assert first.finished is not None
    for _ in range(3):
        ledger.open("reduce_scatter", "dp", 10, 5, "block.1")
    assert seen == [0]
    assert ledger.sequence == 4
    assert [r.sequence for r in ledger.records()] == [2, 3]
    assert [r.sequence for r in ledger.records(since=3)] == [3]
    assert ledger.totals["reduce_scatter"].count == 3
    assert ledger.totals["reduce_scatter"].sent == 15
    ledger.reset()
    assert not ledger.totals
    assert ledger.open("x", "dp", 0, 0, "").sequence == 4


def test_bandwidth_conventions() -> None:
    one_gbit = 125_000_000
    assert bandwidths("all_reduce", one_gbit, 1.0, 4) == (pytest.approx(2.0), pytest.approx(1.5))
    assert bandwidths("all_gather", one_gbit, 1.0, 4) == (pytest.approx(1.0), pytest.approx(0.75))
    assert bandwidths("all_to_all_single", one_gbit, 1.0, 4) == (pytest.approx(1.0), pytest.approx(0.75))
    assert bandwidths("broadcast", one_gbit, 1.0, 4) == (pytest.approx(1.0), pytest.approx(1.0))
    assert bandwidths("broadcast", one_gbit, 0.0, 4) == (0.0, 0.0)


def test_the_log_records_what_it_is_asked_to() -> None:
    log = CommsLogger()
    log.append("all_reduce", 8, 1e-3, 2)
    assert not log.has_data()
    log.configure(enabled=True, prof_all=False, prof_ops=["broadcast"])
    log.append("all_reduce", 8, 1e-3, 2)
    log.append("broadcast", 8, 1e-3, 2)
    log.append("broadcast", 8, 3e-3, 2)
    log.append("broadcast", 4096, 1e-3, 2)
    assert log.get_operation_names() == ["broadcast"]
    assert log.get_total_operations() == 3
    assert log.comms_dict["broadcast"][8][1] == [pytest.approx(1.0), pytest.approx(3.0)]
    assert log.summary()["broadcast"][8]["total_latency_ms"] == pytest.approx(4.0)
    assert "4.00 KiB" in log.table()
    log.configure(debug=True)
    log.append("broadcast", 1, 1e-3, 2, "train.py:3")
    assert "broadcast | train.py:3" in log.get_operation_names()
    log.comms_dict = {}
    assert not log.has_data()


def test_what_is_recorded_can_be_chosen_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    log = CommsLogger()
    log.start_profiling_comms()
    log.append("all_gather", 8, 0.001, 2)
    log.stop_profiling_comms()
    log.append("all_gather", 8, 0.001, 2)
    log.start_profiling_op(["all_reduce"])
    log.start_profiling_op(["all_reduce", "broadcast"])
    assert log.prof_ops == ["all_reduce", "broadcast"]
    log.append("all_reduce", 8, 0.002, 2)
    log.stop_profiling_op(["all_reduce"])
    log.append("all_reduce", 8, 0.002, 2)
    raw = log.get_raw_data()
    assert {name: sizes[8][:2] for name, sizes in raw.items()} == {"all_gather": [1, [1.0]], "all_reduce": [1, [2.0]]}
    raw["all_gather"][8][1].append(5.0)
    assert log.comms_dict["all_gather"][8][1] == [1.0]
    assert log.get_operation_summary("all_reduce")[8]["count"] == 1 and log.get_operation_summary("send") == {}
    assert log.log_all(print_log=False) == log.summary() and not capsys.readouterr().out
    log.log_all()
    assert "all_reduce" in capsys.readouterr().out
    with pytest.raises(UsageError, match="on every rank"):
        log.log_all(show_straggler=True)
