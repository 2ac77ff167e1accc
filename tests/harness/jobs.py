"""Jobs of `shardwise run`, started as a user does."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from shardwise.launch import cli


def environment(without: Sequence[str] = (), **changes: str) -> dict[str, str]:
    """Return this process's variables but for some, with a PYTHONPATH on which a process finds what this one does."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    paths = filter(None, [os.environ.get("PYTHONPATH"), *sys.path])
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **changes}


def launch(*words: object) -> list[str]:
    """Return the command `shardwise run` with options, a script and its arguments."""
    return [sys.executable, "-m", "shardwise.launch", "run", *map(str, words)]


def run_job(*words: object, without: Sequence[str] = (), **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a job to its end with this process as its launcher; `without` and `changes` are those of `environment`."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with (
        mock.patch.dict(os.environ, environment(without, **changes), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main(["run", *map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
    printed = []
    for stream in (out, err):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(list(map(str, words)), code, *printed)


def script(folder: Path, text: str) -> Path:
    """Write a script."""
    path = folder / "script.py"
    path.write_text(text)
    return path


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
