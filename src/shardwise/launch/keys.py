"""Sets up a key of this user on the machines of a hostfile, by ssh-keygen and ssh-copy-id."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch.everywhere import run_everywhere
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.runners.ssh import need

_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
"""Keys that ssh uses by itself; the first one is made if there is none."""


def key_of(given: str | None) -> Path:
    """Return the private key to set up, which may not exist. Raises CommandLineError if its public part is missing."""
    folder = Path.home() / ".ssh"
    found = [folder / name for name in _NAMES if (folder / name).exists()] or [folder / _NAMES[0]]
    key = found[0] if given is None else Path(given).absolute()
    if key.exists() and not public(key).exists():
        raise CommandLineError(
            f"{key} has no public part {public(key)}. Write it with `ssh-keygen -y -f {key} > {public(key)}`, or "
            "choose another key with --key."
        )
    return key


def public(key: Path) -> Path:
    """Return the file of the public part of a key."""
    return key.with_name(key.name + ".pub")


def commands(hosts: Sequence[str], key: Path, port: int | None, args: Sequence[str]) -> list[list[str]]:
    """Return the commands that make the key if it does not exist, and install it on hosts."""
    # ssh-copy-id has its temporary files in the second directory.
    folders = [folder for folder in dict.fromkeys((key.parent, Path.home() / ".ssh")) if not folder.is_dir()]
    made = [["mkdir", "-p", "-m", "700", str(folder)] for folder in folders]
    if not key.exists():
        # Without a passphrase, because the launcher cannot ask for one.
        made.append(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
    where = [] if port is None else ["-p", str(port)]
    # The first value counts: no configuration lets ssh accept an unknown host key without a question.
    common = ["ssh-copy-id", "-i", str(public(key)), "-o", "StrictHostKeyChecking=ask", *where, *args]
    return [*made, *([*common, host] for host in hosts if not is_this_machine(host))]


def set_up(
    hosts: Sequence[str], given: str | None, port: int | None = None, args: Sequence[str] = (), *, apply: bool = False
) -> int:
    """Make a key if there is none, install it on hosts, and check that they accept it without a password.

    Args:
        hosts: names; this machine is left out.
        given: private key; None: the first that ssh uses by itself.
        port: of the ssh servers; None: as configured.
        args: further arguments of ssh and ssh-copy-id.
        apply: False: only print the commands.

    Returns:
        0, or 1 if a host does not accept the key.

    Raises:
        CommandLineError: the key has no public part.
        LaunchError: a program of OpenSSH is missing, or the key cannot be made.
    """
    key = key_of(given)
    planned = commands(hosts, key, port, args)
    if not apply:
        print("# Nothing is done without --apply, which runs these commands and then checks all machines:")
        print("\n".join(map(shlex.join, planned)))
        return 0
    for program in ("ssh", "ssh-keygen", "ssh-copy-id"):
        need(program)
    for command in planned:
        print(f"+ {shlex.join(command)}", flush=True)
        code = subprocess.run(command).returncode
        if code and command[0] != "ssh-copy-id":  # a machine that fails is named by the check
            raise LaunchError(f"{shlex.join(command)} has failed with exit code {code}.")
    strict = (
        "IdentitiesOnly=yes",
        "PreferredAuthentications=publickey",
        "StrictHostKeyChecking=yes",
        "ControlPath=none",
    )
    only = ["-i", str(key), *(part for setting in strict for part in ("-o", setting))]
    if run_everywhere(hosts, "true", port, [*only, *args], name="shardwise hosts setup-keys"):
        return 1
    print(f"All {len(hosts)} machines accept {key} without a password.")
    return 0
