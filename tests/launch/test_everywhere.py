"""`shardwise hosts run` and `ds_ssh`, with a stand-in for ssh; tests/machines has a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardwise_deepspeed.commands import ssh
from tests.harness.tables import tables
from tests.launch.conftest import Call

SSH = f"""#!{sys.executable}
import json, os, subprocess, sys
host, command = sys.argv[-2:]
with open(f"{{host}}.json", "w") as file:
    json.dump([sys.argv[1:], sys.stdin.read()], file)
if host == "away":
    print("ssh: connect to host away port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
sys.exit(subprocess.run(["/bin/sh", "-c", command], env={{"HOST": host, "PATH": "/usr/bin:/bin"}}).returncode)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hostfile, and a stand-in for ssh."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=1\nn2 slots=4\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_output_has_the_host_in_front_and_arguments_stay_as_they_are(call: Call) -> None:
    code, out, err = call("hosts", "run", "-H", "hosts", "--", "printf", r"%s|%s\n", "a  b", "$HOST")
    assert (code, err) == (0, "") and sorted(out.splitlines()) == ["[n2   ] a  b|$HOST", "[node1] a  b|$HOST"]
    more = ("--ssh-port", "2222", "--launcher-args", "-F 'my config'", "--include", "n2:0")
    code, out, err = call("hosts", "run", "-H", "hosts", *more, 'echo "$HOST" | tr n m; echo no >&2')
    assert (code, out, err) == (0, "[n2] m2\n", "[n2] no\n")
    argv, given = json.loads(Path("n2.json").read_text())
    assert argv[:3] == ["-T", "-p", "2222"] and argv[-4:-2] == ["-F", "my config"]
    assert "BatchMode=yes" in argv and not given and not any("Control" in part for part in argv)


def test_the_first_failure_in_the_list_is_the_exit_code_and_all_are_named(call: Call) -> None:
    Path("hosts").write_text("n1 slots=1\nn2 slots=1\naway slots=1\nn3 slots=1\n")
    code, _, err = call("hosts", "run", "-H", "hosts", "test $HOST != n2 || { sleep 0.2; exit 7; }; test $HOST != n3")
    assert code == 7 and "hosts run: n2: exit code 7.\n" in err and "hosts run: n3: exit code 1.\n" in err
    assert "hosts run: n1" not in err
    what = "hosts run: away: not reached: ssh: connect to host away port 22: Connection refused. No ssh server listens"
    assert what in err and call("hosts", "run", "-H", "hosts", "-i", "away", "ls")[0] == 255


def test_this_machine_needs_no_ssh(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hosts").write_text(f"localhost slots=1\n{socket.gethostname()} slots=1\n")
    monkeypatch.setenv("PATH", "/nowhere:/bin")
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setenv("HOME", str(folder / "bin"))
    code, out, _ = call("hosts", "run", "-H", "hosts", "-i", "localhost", "pwd; kill -9 $$")
    assert (code, out) == (137, f"[localhost] {folder / 'bin'}\n")
    Path("hosts").write_text("n1 slots=1\n")
    code, _, err = call("hosts", "run", "-H", "hosts", "ls")
    assert code == 1 and "There is no program ssh here. Install the OpenSSH client" in err


@pytest.mark.parametrize(("options", "message"), tables(__file__)["wrong"])
def test_wrong_options_are_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    for module in ("hosts", "commands.hosts"):
        monkeypatch.setattr(f"shardwise.launch.{module}.DEFAULT_HOSTFILE", "/nowhere")
    code, out, err = call("hosts", "run", *options)
    assert code == 2 and not out and message in err


def test_a_signal_ends_all_clients(folder: Path) -> None:
    command = [sys.executable, "-m", "shardwise.launch", "hosts", "run", "-H", "hosts", "echo $$; exec sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    # Without their parents they stay as zombies until the machine's first process has seen them.
    running = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not running


def test_ds_ssh_takes_a_command_line_as_pdsh(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, out, message in (
        (["-f", "hosts", "echo", "$HOST", "|", "tr", "n", "m"], 0, ["[n2   ] m2", "[node1] mode1"], ""),
        (["-f", "hosts", "exit", "4"], 4, [], "n2: exit code 4"),
        (["-f", "hosts"], 2, [], "ds_ssh: error: the command is missing"),
        (["-f", "none", "ls"], 2, [], "ds_ssh: error: Cannot read the hostfile none"),
    ):
        with pytest.raises(SystemExit) as end:
            ssh(arguments)
        shown = capsys.readouterr()
        assert (end.value.code, sorted(shown.out.splitlines())) == (code, out) and message in shown.err
