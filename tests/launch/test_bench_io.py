"""`shardwise bench io`: a table, a section to paste, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import OffloadError
from shardwise.launch.commands import bench
from shardwise.offload import measure, tmpfile
from shardwise.offload.files import DiskOptions
from shardwise.offload.measure import MeasuredFile, Speed, Way, settings, smallest

Call = Callable[..., tuple[int, str, str]]

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


def test_defaults(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    asked: list[bench.Wanted] = []
    monkeypatch.setattr(bench, "show", asked.append)
    call("bench", "io")
    call("bench", "io", "--quick")
    full, quick = asked
    assert full == bench.Wanted(".")
    assert (quick.rounds, quick.most) == (1, 256 << 20)
    count = [len(settings(one.blocks, one.depths, one.threads)) for one in asked]
    assert count == [18, 6]


def test_the_size_follows_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bench.Wanted(".", blocks=(1 << 20,))
    assert bench._size(wanted, 100 << 20) == 25 << 20
    assert bench._size(wanted, 1 << 50) <= wanted.most
    assert bench._size(bench.Wanted(".", size=5_000_000, blocks=(1 << 20,)), 1 << 50) == 4 << 20


def test_a_directory_without_permission(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert call("bench", "io", "--dir", str(tmp_path))[2].endswith("this user cannot write there.\n")


def test_too_little_space(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    code, _, error = call("bench", "io", "--dir", str(tmp_path))
    assert code == 2 and "40960 bytes are free there, too little" in error


def test_a_disk_that_is_fuller_than_it_says(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    code, shown, error = call("bench", "io", "--dir", str(tmp_path), *SMALL)
    assert (code, shown) == (2, "") and "no file of 1.00 MiB can be made: No space left on device." in error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_fails(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    before = len(os.listdir("/proc/self/fd"))
    code, shown, error = call("bench", "io", "--dir", str(tmp_path), *SMALL)
    assert (code, shown) == (1, "") and error.startswith("shardwise: error: ") and "Input/output error" in error
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OffloadError, match="fail"):
        loops_that_fail(tmp_path)


def loops_that_fail(directory: Path) -> None:
    file = MeasuredFile(directory, 1 << 20, 1 << 16)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            file.speeds([Way(1 << 16, 2, plain=True)], 1, write=False)
        raise OffloadError("fail")
    finally:
        file.close()


def test_a_result_that_cannot_be_written(call: Call, tmp_path: Path) -> None:
    code, _, error = call("bench", "io", "--dir", str(tmp_path), *SMALL, "--json", str(tmp_path))
    assert code == 1 and error == f"shardwise: error: --json {tmp_path}: Is a directory\n"


def test_wrong_directories_do_not_wait_for_torch(tmp_path: Path) -> None:
    text = (
        "import sys; from shardwise.launch import cli\n"
        "try: cli.main(['bench', 'io', '--dir', 'nope'])\n"
        "finally: print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n")


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


def test_help_names_the_group(call: Call) -> None:
    for arguments, words in ((["--help"], "bench"), (["bench", "--help"], "and show the section to paste.")):
        shown = " ".join(call(*arguments)[1].split())
        assert words in shown and "..." not in shown.replace("COMMAND [ARGS]...", "")


def test_the_smallest_of_the_fast() -> None:
    speeds = {DiskOptions(block, depth): Speed(100.0, 100.0) for block in (1 << 20, 1 << 18) for depth in (8, 32)}
    assert smallest(speeds) == DiskOptions(1 << 18, 8)
    speeds[DiskOptions(1 << 18, 8)] = Speed(98.0, 98.0)
    assert smallest(speeds) == DiskOptions(1 << 18, 8)
    speeds[DiskOptions(1 << 18, 8)] = Speed(200.0, 60.0)  # reading is what takes the time
    assert smallest(speeds) == DiskOptions(1 << 20, 8)  # as many bytes as (1 << 18, 32), fewer requests
    assert smallest({DiskOptions(): Speed(None, 5.0), DiskOptions(queue_depth=1): Speed(None, 4.0)}) == DiskOptions()


def test_values_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_STEP", 100_000)
    file = MeasuredFile(tmp_path, (1 << 20) - 5000, 1 << 16)
    before = file._memory.copy()
    speeds = file.speeds([Way(1 << 16, 3), Way(1 << 14, 2), Way(1 << 16, 2, plain=True)], 2)
    assert (file._memory == before).all() and all(speed.time > 0 for speed in speeds)
    assert len(set(before.tolist())) == 256
    file.close()
