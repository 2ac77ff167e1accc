"""`shardwise hosts setup-keys`, with stand-ins for the programs of OpenSSH; tests/machines has real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import Call


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory with a hostfile, and programs that note their arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("localhost slots=1\nn1 slots=1\nn2 slots=1\n")
    (tmp_path / "bin").mkdir()
    for name, rest in (
        ("ssh", 'case "$*" in *n2*true) echo "x: Permission denied (publickey)." >&2; exit 255;; esac'),
        ("ssh-copy-id", 'case "$*" in *n2) exit 1;; esac'),
        ("ssh-keygen", 'while [ "$#" -gt 1 ]; do shift; done; touch "$1" "$1.pub"'),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nPATH=/bin:/usr/bin\necho "{name} $*" >> ran\n{rest}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    return tmp_path / "home"


SETUP = ("hosts", "setup-keys", "-H", "hosts", "--ssh-port", "2222", "--launcher-args", "-F 'my config'")


def test_commands_are_shown_and_run_with_apply_only(call: Call, home: Path) -> None:
    key = home / ".ssh" / "id_ed25519"
    copy = f"ssh-copy-id -i {key}.pub -o StrictHostKeyChecking=ask -p 2222 -F 'my config'"
    code, out, _ = call(*SETUP)
    expected = [f"mkdir -p -m 700 {key.parent}", f"ssh-keygen -q -t ed25519 -N '' -f {key}", f"{copy} n1", f"{copy} n2"]
    assert code == 0 and out.splitlines()[1:] == expected and not home.exists() and not Path("ran").exists()
    code, out, err = call(*SETUP, "--apply")
    assert code == 1 and out.splitlines() == [f"+ {line}" for line in expected]
    assert "setup-keys: n2: not reached: x: Permission denied (publickey). Its ssh server asks for a password" in err
    assert "n1" not in err and key.exists()
    check = [line for line in Path("ran").read_text().splitlines() if line.startswith("ssh -T")]
    assert len(check) == 2 and all(
        f"-i {key} -o IdentitiesOnly=yes" in line and "StrictHostKeyChecking=yes" in line for line in check
    )
    code, out, _ = call(*SETUP, "--exclude", "n2", "--apply")
    assert code == 0 and out.splitlines() == [f"+ {copy} n1", f"All 2 machines accept {key} without a password."]


def test_an_existing_key_is_used(call: Call, home: Path) -> None:
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").touch()
    code, _, err = call(*SETUP)
    assert code == 2 and f"{home}/.ssh/id_rsa has no public part {home}/.ssh/id_rsa.pub. Write it with" in err
    (home / ".ssh" / "id_rsa.pub").touch()
    assert all(f"-i {home}/.ssh/id_rsa.pub" in line for line in call(*SETUP)[1].splitlines()[1:])
    shown = call(*SETUP, "--key", "keys/other")[1].splitlines()
    assert shown[1:3] == [
        f"mkdir -p -m 700 {home.parent}/keys",
        f"ssh-keygen -q -t ed25519 -N '' -f {home.parent}/keys/other",
    ]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-H", "nope"], 2, "Cannot read the hostfile nope"),
        (["-H", "hosts", "--include", "n9"], 2, "no host 'n9' here"),
        (["-H", "hosts", "--apply"], 1, "There is no program ssh-copy-id here. Install the OpenSSH client"),
        (
            ["-H", "hosts", "--apply", "--key", "/dev/null/key"],
            1,
            "mkdir -p -m 700 /dev/null has failed with exit code 1",
        ),
    ],
)
def test_errors_are_one_message(
    call: Call, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, message: str
) -> None:
    if "ssh-copy-id" in message:
        Path("bin/ssh-copy-id").unlink()
        monkeypatch.setenv("PATH", "bin")
    found, _, err = call("hosts", "setup-keys", *options)
    assert found == code and message in err
