"""`shardwise bench io`: a table, a section to paste, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.offload import tmpfile
from tests.launch.conftest import Call

SMALL = ("--size", "1M", "--block-size", "64K,128K", "--queue-depth", "1,2", "--threads", "1,2", "--rounds", "2")


def section(text: str) -> dict[str, Any]:
    return json.loads(text[text.index("\n{") :])["aio"]


def test_a_table_and_the_section(call: Call, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    disk = tmp_path / "disk"
    disk.mkdir()
    code, shown, error = call("bench", "io", "--dir", str(disk), *SMALL, "--json", str(result))
    assert (code, error) == (0, "")
    lines = shown.splitlines()
    assert lines[0].startswith(f"{disk}: ") and "O_DIRECT" in lines[0]
    rows = [row.split() for row in lines if re.match(r" +\d+ ", row)]
    assert [row[:3] for row in rows[:6]] == [
        [block, depth, threads]
        for block in ("65536", "131072")
        for depth, threads in (("1", "1"), ("2", "1"), ("2", "2"))
    ]
    assert sum(row[-1] == "chosen" for row in rows) == 1
    assert [" ".join(row[3:]) for row in rows[-3:]][::2] == ["chosen, again", "plain loop, 1 thread"]
    told = json.loads(result.read_text())
    assert section(shown) == told["aio"]
    assert told["size"] == 1 << 20 and told["rounds"] == 2 and len(told["bytes_per_second"]) == 6
    chosen = next(row for row in told["bytes_per_second"] if row.items() >= told["aio"].items())
    assert chosen["write"] > 0 and chosen["read"] > 0
    assert [row["plain"] for row in told["compared_with_plain_loops"]] == [False, True, True]
    resolve({"train_batch_size": 1, "aio": told["aio"]}, world_size=1)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("kind", ["read", "write"])
def test_one_of_both(call: Call, tmp_path: Path, kind: str) -> None:
    other = "write" if kind == "read" else "read"
    code, shown, _ = call("bench", "io", "--dir", str(tmp_path), *SMALL, f"--no-{other}", "--json", str(tmp_path / "x"))
    assert code == 0 and " - " in shown
    for row in json.loads((tmp_path / "x").read_text())["bytes_per_second"]:
        assert row[other] is None and row[kind] > 0


def test_through_the_page_cache(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmpfile, "_pass_by", lambda descriptor, wanted: False)
    code, shown, _ = call("bench", "io", "--dir", str(tmp_path), *SMALL)
    assert code == 0 and "through the page cache: it does not take O_DIRECT" in shown.splitlines()[0]


def test_too_little_space(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    code, _, error = call("bench", "io", "--dir", str(tmp_path))
    assert code == 2 and "40960 bytes are free there, too little" in error


def test_a_disk_that_fails(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    before = len(os.listdir("/proc/self/fd"))
    code, shown, error = call("bench", "io", "--dir", str(tmp_path), *SMALL)
    assert (code, shown) == (1, "") and error.startswith("shardwise: error: ") and "Input/output error" in error
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, threading; from shardwise.launch import cli\n"
        "from shardwise.offload import measure\n"
        "begun = measure.MeasuredFile.speeds\n"
        "def speeds(*arguments, **options):\n"
        "    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return begun(*arguments, **options)\n"
        "measure.MeasuredFile.speeds = speeds\n"
        "cli.main(['bench', 'io', '--dir', sys.argv[1], '--size', '64M', '--block-size', '64K', '--rounds', '1000'])\n"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 130), done.stderr
    assert "terminate" not in done.stderr and list(tmp_path.iterdir()) == []
