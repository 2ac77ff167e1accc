"""Hostfiles and include / exclude filters."""

from __future__ import annotations

import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch import hosts, machines
from shardwise.launch.hosts import is_this_machine, parse_filter, parse_hostfile, read_hostfile, select
from shardwise.launch.job import Job
from shardwise.launch.placement import Host
from shardwise.launch.runners.ssh import host_of_alias
from tests.harness.tables import tables

TABLES = tables(__file__)

names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(st.dictionaries(names, st.integers(1, 64), min_size=1))
def test_hostfile_round_trip(machines: dict[str, int]) -> None:
    text = "# written by a scheduler\n\n" + "\n".join(f"{h}   slots={n} # c" for h, n in machines.items())
    assert parse_hostfile(text, "f") == machines


@pytest.mark.parametrize(("function", "arguments", "message"), TABLES["wrong"])
def test_errors_name_the_line_or_the_option(function: str, arguments: list[Any], message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        getattr(hosts, function)(*arguments)


def test_named_hostfile_must_exist(tmp_path, monkeypatch) -> None:
    with pytest.raises(CommandLineError, match=r"Cannot read the hostfile .*nowhere"):
        read_hostfile(str(tmp_path / "nowhere"))
    monkeypatch.setattr(hosts, "DEFAULT_HOSTFILE", str(tmp_path / "default"))
    assert read_hostfile(None) is None
    (tmp_path / "default").write_text("a slots=1")
    assert read_hostfile(None) == {"a": 1}


@given(st.dictionaries(names, st.lists(st.integers(0, 99), unique=True), min_size=1))
def test_filter_round_trip(machines: dict[str, list[int]]) -> None:
    text = "@".join(f"{h}:{','.join(map(str, s))}" if s else h for h, s in machines.items())
    assert parse_filter(text, "-i") == {h: tuple(s) for h, s in machines.items()}


@pytest.mark.parametrize(("include", "exclude", "chosen"), TABLES["select"])
def test_select(include: str | None, exclude: str | None, chosen: dict[str, list[int]]) -> None:
    found = select({"a": (0, 1, 2, 3), "b": (0, 1)}, include, exclude)
    assert {host: list(slots) for host, slots in found.items()} == chosen


def test_this_machine_has_several_names() -> None:
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", "::1", socket.gethostname())))
    assert not is_this_machine("192.0.2.1")  # reserved for documentation: nobody's address
    assert not is_this_machine("no-such-host.invalid")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_a_name_may_be_one_of_the_configuration_of_ssh_only(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host worker-1\n  HostName 127.0.0.1\n")
    options = ["-F", str(tmp_path / "config")]
    assert host_of_alias("worker-1", options) == "127.0.0.1" and host_of_alias("worker-2", options) == "worker-2"
    job = Job(script="s", launcher_args=shlex.join(options))
    assert machines._address(Host("worker-1", (0,)), [Host("worker-1", (0,))], job) == "127.0.0.1"
    with pytest.raises(LaunchError, match="worker-2: this machine knows no address of that name"):
        machines._address(Host("worker-2", (0,)), [Host("worker-2", (0,))], job)
