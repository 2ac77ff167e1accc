"""`shardwise hosts` on machines with real ssh servers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.machines.lab import Lab
from tests.machines.test_ssh import nothing_left

pytestmark = pytest.mark.limit(120)


def hosts(lab: Lab, *arguments: str, **variables: str) -> CompletedProcess[str]:
    """Run `shardwise hosts` on machine 0."""
    command = [sys.executable, "-m", "shardwise.launch", "hosts", *arguments]
    # Without a terminal, on which ssh would ask.
    hidden = {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "SSH_ASKPASS")}
    process = lab.start(0, command, env={**hidden, **variables}, start_new_session=True, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=60)
    return CompletedProcess(command, process.returncode, out, err)


def test_a_command_runs_on_all_machines_and_those_that_are_down_are_named(lab: Lab) -> None:
    common = ["run", "-H", str(lab.hostfile(1)), "--launcher-args", " ".join(lab.ssh)]
    done = hosts(lab, *common, "echo up on $(hostname); pwd")
    expected = [f"[m{n}] {line}" for n in (1, 2, 3) for line in ("/root", f"up on m{n}")]
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == expected, done.stderr
    assert hosts(lab, *common, "-e", "m1", "--", "test", "$HOME", "=", "$HOME").returncode == 0
    lab.link(2, False)
    try:
        done = hosts(lab, *common, "test $(hostname) = m1")
    finally:
        lab.link(2, True)
    assert done.returncode == 255 and "hosts run: m2: not reached: ssh: connect to host m2 port 22: " in done.stderr
    assert "hosts run: m3: exit code 1.\n" in done.stderr and "hosts run: m1" not in done.stderr
    assert nothing_left(lab)


def test_a_new_key_is_installed_and_unknown_host_keys_are_not_accepted(lab: Lab, tmp_path: Path) -> None:
    """The first access is that of an agent with the lab's key; afterwards only the new key counts."""
    known = (lab.folder / "known_hosts").read_text().splitlines(keepends=True)
    (tmp_path / "known_hosts").write_text("".join(line for line in known if not line.startswith("m3,")))
    (tmp_path / "config").write_text(f"UserKnownHostsFile {tmp_path}/known_hosts\nStrictHostKeyChecking no\n")
    key, socket = tmp_path / ".ssh" / "id_ed25519", str(tmp_path / "agent")
    own = {"SSH_AUTH_SOCK": socket, "HOME": str(tmp_path)}
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        while not os.path.exists(socket):
            time.sleep(0.02)
        subprocess.run(["ssh-add", "-q", lab.folder / "key"], check=True, env={**os.environ, **own})
        options = ["setup-keys", "-H", str(lab.hostfile(1)), "--launcher-args", f"-F {tmp_path}/config"]
        planned = hosts(lab, *options, **own)
        assert planned.returncode == 0 and not key.exists() and not key.parent.exists()
        shown = planned.stdout.splitlines()[1:]
        assert [line.split()[0] for line in shown] == ["mkdir", "ssh-keygen", *3 * ["ssh-copy-id"]]
        done = hosts(lab, *options, "--apply", **own)
        assert [line.removeprefix("+ ") for line in done.stdout.splitlines() if line.startswith("+ ")] == shown
        assert done.returncode == 1 and "setup-keys: m3: not reached: Host key verification failed" in done.stderr
        assert "setup-keys: m1" not in done.stderr and "setup-keys: m2" not in done.stderr
        for number, count in ((1, 1), (2, 1), (3, 0)):
            path = lab.folder / f"home-{number}" / ".ssh" / "authorized_keys"
            assert (path.read_text().count(key.with_suffix(".pub").read_text()) if path.exists() else 0) == count
        names = [line.split(",")[0] for line in (tmp_path / "known_hosts").read_text().splitlines()]
        assert "m1" in names and "m3" not in names  # not in the text: keys are random letters
    finally:
        agent.kill()
        agent.wait()
    done = hosts(lab, *options, "--exclude", "m3", "--apply", HOME=str(tmp_path))
    assert done.returncode == 0 and f"All 2 machines accept {key} without a password" in done.stdout, done.stderr
    jobs = ["-H", str(lab.hostfile(1, [1, 2])), "--launcher-args", f"-F {tmp_path}/config -i {key}"]
    assert hosts(lab, "run", *jobs, "true").returncode == 0
