"""One-line notes on memory: formats, silence, ranks."""

from __future__ import annotations

import re

import pytest
import torch

from shardwise.utils import memory_status, see_memory_usage
from tests.harness import run_ranks

NUMBER = r"-?\d+\.\d+"


def test_see_memory_usage_is_silent_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    see_memory_usage("after building", force=True)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "after building"
    assert re.fullmatch(rf"MA {NUMBER} GB  Max_MA {NUMBER} GB  CA {NUMBER} GB  Max_CA {NUMBER} GB", second)
    percent = re.fullmatch(rf"CPU Virtual Memory:  used = {NUMBER} GB, percent = ({NUMBER})%", third)
    assert percent and 0 < float(percent.group(1)) <= 100


def test_memory_status_tells_what_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    memory_status("before")
    kept = torch.ones(80 << 20, dtype=torch.uint8)
    memory_status("after")
    line = capsys.readouterr().out.splitlines()[1]
    figures = re.search(rf"current alloc=({NUMBER})GB \(delta=({NUMBER})GB max=({NUMBER})GB\)", line)
    assert line.startswith("RANK=0 MEMSTATS after device=") and figures
    now, delta, most = map(float, figures.groups())
    assert now <= most
    if not torch.cuda.is_available():
        assert delta * 2**30 >= 0.9 * kept.nbytes


def _status() -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        memory_status("all")
        memory_status("one", print_rank=1)
        see_memory_usage("first", force=True)
    return out.getvalue()


def test_ranks_that_print() -> None:
    first, second = run_ranks(_status, 2)
    assert "RANK=0 MEMSTATS all" in first and "RANK=1 MEMSTATS all" in second
    assert "MEMSTATS one" not in first and "RANK=1 MEMSTATS one" in second
    assert "Max_MA" in first and "Max_MA" not in second
