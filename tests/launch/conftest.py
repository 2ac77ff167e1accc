"""Fixtures of tests of the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.launch import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `shardwise ARGUMENTS` in this process; return exit code, standard output and standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return int(end.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture
def shown(call: Call) -> Callable[..., str]:
    """Run a command that succeeds; return its standard output."""

    def run(*args: object) -> str:
        code, out, error = call(*args)
        assert code == 0, error
        return out

    return run
