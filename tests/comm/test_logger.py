"""The communication log where times are known, and where the host does not learn them."""

from __future__ import annotations

import pytest

from shardwise.comm.logger import UNKNOWN, CommsLogger


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
