"""Hostfiles and include / exclude filters."""

from __future__ import annotations

import shlex
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch import hosts, machines
from shardwise.launch.hosts import is_this_machine, parse_filter, parse_hostfile, read_hostfile, select
from shardwise.launch.job import Job
from shardwise.launch.placement import Host
from shardwise.launch.runners.ssh import host_of_alias

TWO = {"a": (0, 1, 2, 3), "b": (0, 1)}
names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(st.dictionaries(names, st.integers(1, 64), min_size=1))
def test_hostfile_round_trip(machines: dict[str, int]) -> None:
    text = "# written by a scheduler\n\n" + "\n".join(f"{h}   slots={n} # c" for h, n in machines.items())
    assert parse_hostfile(text, "f") == machines


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a slots=2\na slots=3", "line 2: a occurs twice"),
        ("a slots=2\n\nb slot=3", "line 3: expected `host slots=N`"),
        ("a slots=4 max_slots=2", "line 1: "),
        ("a slots=\uff14", "line 1: expected"),
        ("a", "line 1: expected"),
        ("a slots=x", "line 1: expected"),
        ("a slots=0", "line 1: expected"),
        ("-F slots=1", "line 1: expected"),  # an option of ssh
        ("a slots=2 b slots=2", "line 1: expected"),
        ("# nothing", "names no host"),
    ],
)
def test_hostfile_errors_name_the_line(text: str, found: str) -> None:
    with pytest.raises(CommandLineError, match=found):
        parse_hostfile(text, "hostfile h")


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


@pytest.mark.parametrize("text", ["", "@", "a@", "a:", "a:x", "a:1,,2", "a:-1", "a:0@a:1", "a:1,1", ":1"])
def test_bad_filters_are_refused(text: str) -> None:
    with pytest.raises(CommandLineError, match="--include"):
        parse_filter(text, "--include")


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        (None, None, TWO),
        ("a", None, {"a": (0, 1, 2, 3)}),
        ("b@a:2,0", None, {"a": (0, 2), "b": (0, 1)}),
        (None, "a", {"b": (0, 1)}),
        (None, "a:0,1@b:1", {"a": (2, 3), "b": (0,)}),
        (None, "b:0,1", {"a": (0, 1, 2, 3)}),
    ],
)
def test_select(include: str | None, exclude: str | None, chosen: dict[str, tuple[int, ...]]) -> None:
    assert select(TWO, include, exclude) == chosen


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "cannot be combined"),
        ("c", None, "no host 'c' here, only a, b"),
        (None, "b:2", "b has no slot 2, only 0, 1"),
        (None, "a@b", "leaves no slot"),
    ],
)
def test_select_errors(include: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        select(TWO, include, exclude)


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
