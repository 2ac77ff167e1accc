"""What the workers print reaches the screen, the logs and the memory."""

from __future__ import annotations

import io
import os
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LaunchError
from shardwise.launch import output
from shardwise.launch.output import (
    Cursor,
    LineCutter,
    OutputChannel,
    OutputReader,
    Terminal,
    is_raw,
    open_log,
    open_pipe,
    prefix,
)

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: no\n"


def _channel(rank: int = 1, **options) -> tuple[io.BytesIO, OutputChannel]:
    file = io.BytesIO()
    return file, OutputChannel(rank, Terminal(file), **options)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff"]), max_size=20), st.integers(1, 5))
def test_lines_do_not_depend_on_where_reads_cut(pieces: list[bytes], step: int) -> None:
    data = b"".join(pieces)
    whole, parts = LineCutter(), LineCutter()
    at_once = whole.feed(data) + whole.close()
    in_steps = [line for i in range(0, len(data), step) for line in parts.feed(data[i : i + step])]
    assert in_steps + parts.close() == at_once
    shown = [text for text, superseded in at_once if not superseded]
    lines = re.sub(rb"\r+(\n|$)", rb"\1", data).split(b"\n")
    expected = [line.split(b"\r")[-1] for line in lines]
    assert shown == (expected if expected[-1] else expected[:-1])


def test_every_line_gets_the_prefix() -> None:
    file, channel = _channel(prefix=prefix("auto", 1, 12))
    channel.feed(b"one\ntw")
    assert file.getvalue() == b"[rank  1] one\n"
    channel.feed(b"o\r\n\n")
    channel.feed(b"rest")
    channel.close()
    assert file.getvalue() == b"[rank  1] one\n[rank  1] two\n[rank  1] \n[rank  1] rest\n"
    assert prefix("never", 1, 2) == b""


def test_progress_bar_as_lines(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    file, channel = _channel(prefix=b"> ")
    for percent in range(101):
        clock[0] += 0.05
        channel.feed(b"\r%d%%" % percent)
    channel.feed(b"\ndone\n")
    lines = file.getvalue().splitlines()
    assert lines[-2:] == [b"> 100%", b"> done"]
    assert 5 <= len(lines) <= 8  # 5 s of progress, one line a second
    assert channel.text() == "100%\ndone"


def test_raw_passes_bytes_and_still_keeps_lines() -> None:
    file, channel = _channel(raw=True, prefix=b"> ")
    channel.feed(b"\r 50%")
    assert file.getvalue() == b"\r 50%"
    channel.feed(b"\r100%\n" + TRACEBACK)
    assert file.getvalue() == b"\r 50%\r100%\n" + TRACEBACK
    assert channel.text().endswith("ValueError: no")


def test_lines_take_the_place_of_a_progress_bar_and_go_below_an_unfinished_line() -> None:
    terminal, cursor = io.BytesIO(), Cursor()
    out, err = Terminal(terminal, cursor), Terminal(terminal, cursor)
    err.write(b"\r 50", raw=True)
    err.write(b"%", raw=True)
    out.write(b"[rank 1] x\n")
    out.write(b"[rank 1] y\n")
    err.write(b"\r 60%\nname: ", raw=True)
    out.write(b"[rank 1] z\n")
    assert terminal.getvalue() == b"\r 50%\r\x1b[2K[rank 1] x\n[rank 1] y\n\r 60%\nname: \n[rank 1] z\n"


def test_logs_are_appended_to(tmp_path) -> None:
    for line in (b"first\n", b"second\r\n"):
        _, channel = _channel(log=open_log(tmp_path, 3, "err"))
        channel.feed(line)
        channel.close()
    assert (tmp_path / "rank_3.err").read_bytes() == b"first\nsecond\r\n"


def test_a_log_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "rank_3.err").mkdir()
    with pytest.raises(LaunchError, match=r"--log-dir: cannot write .*rank_3\.err: Is a directory"):
        open_log(tmp_path, 3, "err")


def test_pseudo_terminal_looks_like_the_real_one() -> None:
    import fcntl
    import struct
    import termios

    _, real = os.openpty()
    fcntl.ioctl(real, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 123, 0, 0))
    reader, writer = open_pipe(real)
    assert os.isatty(writer)
    assert os.get_terminal_size(writer) == (123, 33)
    file, channel = _channel(0, raw=True)
    pump = OutputReader()
    pump.add(reader, channel)
    os.write(writer, b"\r 50%\n")
    os.close(writer)
    assert channel.closed.wait(5)
    pump.stop()
    assert file.getvalue() == b"\r 50%\n"  # no second carriage return


@pytest.mark.parametrize(
    ("tags", "rank", "terminal", "raw"),
    [
        ("auto", 0, True, True),
        ("auto", 0, False, False),
        ("auto", 1, True, False),
        ("always", 0, True, False),
        ("never", 0, True, True),
        ("never", 1, True, False),
    ],
)
def test_who_is_shown_raw(tags: output.Tags, rank: int, terminal: bool, raw: bool) -> None:
    assert is_raw(tags, rank, terminal) is raw


def test_the_rest_is_shown_at_the_end_of_a_slow_terminal() -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(io.BytesIO):
        def write(self, data) -> int:
            begun.set()
            go.wait(10)
            return super().write(data)

    file = Slow()
    reader, writer = os.pipe()
    pump = OutputReader()
    pump.add(reader, OutputChannel(1, Terminal(file)))
    os.write(writer, b"first\n")
    assert begun.wait(10)
    os.write(writer, b"second\n")
    threading.Timer(0.1, go.set).start()
    pump.stop()
    os.close(writer)  # held open by a process that goes on
    assert file.getvalue() == b"first\nsecond\n"


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_full_terminal_that_does_not_block_is_waited_for(buffering: int) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    read: list[bytes] = []

    def drain() -> None:
        while data := os.read(reader, 1 << 16):
            read.append(data)

    lines = [b"%06d" % number * 5000 + b"\n" for number in range(20)]
    thread = threading.Timer(0.1, drain)
    with open(writer, "wb", buffering) as file:
        terminal = Terminal(file)
        thread.start()
        for line in lines:
            terminal.write(line)
    thread.join()
    os.close(reader)
    assert b"".join(read) == b"".join(lines)
