"""`shardwise hosts`: commands for all machines of a hostfile."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from shardwise.errors import CommandLineError
from shardwise.launch.hosts import DEFAULT_HOSTFILE
from shardwise.launch.job import split_arguments
from shardwise.launch.placement import Resources, hosts_of

Hostfile = Annotated[
    str | None, typer.Option("--hostfile", "-H", metavar="PATH", help="Machines, one a line: `host slots=N`.")
]
Include = Annotated[str | None, typer.Option("--include", "-i", metavar="SPEC", help="Machines to use: NAME@NAME...")]
Exclude = Annotated[
    str | None, typer.Option("--exclude", "-e", metavar="SPEC", help="Machines not to use, in the same form.")
]
Port = Annotated[int | None, typer.Option("--ssh-port", metavar="PORT", help="As in `shardwise run`.")]
Arguments = Annotated[
    str, typer.Option("--launcher-args", metavar="ARGS", help="Further arguments of ssh, in one string.")
]


def register(app: typer.Typer) -> None:
    """Add the group of subcommands."""
    group = typer.Typer(
        name="hosts",
        help=(summary := "Run a command on all machines of a hostfile, and set up keys for them."),
        short_help=summary,  # otherwise it is truncated
        rich_markup_mode=None,
        no_args_is_help=True,
    )
    group.command("run", context_settings={"allow_interspersed_args": False})(run)
    group.command("setup-keys")(setup_keys)
    app.add_typer(group)


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Program and its arguments.")],
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    ssh_port: Port = None,
    launcher_args: Arguments = "",
) -> None:
    """Run COMMAND on all machines of a hostfile at once, and show its output with the machine in front.

    One argument is a command line of the remote shell, such as 'df -h | tail'; several are a program and its arguments.
    The exit code is that of the first machine in the hostfile on which the command fails; 255 if ssh does not reach it.
    """
    from shardwise.launch.everywhere import run_everywhere

    names = hosts_named(hostfile, include, exclude)
    line = command[0] if len(command) == 1 else shlex.join(command)
    raise typer.Exit(run_everywhere(names, line, ssh_port, split_arguments(launcher_args, "--launcher-args")))


def setup_keys(
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    ssh_port: Port = None,
    launcher_args: Arguments = "",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Private key. Default: id_ed25519, id_ecdsa or id_rsa of ~/.ssh, or a new id_ed25519."
        ),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Run the commands. Default: only print them.")] = False,
) -> None:
    """Install a key on all machines of a hostfile, so that jobs start without a password.

    A key without a passphrase is made if there is none. ssh asks for the passwords of the machines, and whether an
    unknown host key is right. Then each machine must accept the key without a password; exit code 1 if one does not.
    """
    from shardwise.launch.keys import set_up

    names = hosts_named(hostfile, include, exclude)
    args = split_arguments(launcher_args, "--launcher-args")
    raise typer.Exit(set_up(names, key, ssh_port, args, apply=apply))


def hosts_named(hostfile: str | None, include: str | None = None, exclude: str | None = None) -> list[str]:
    """Return the names of the machines that the options choose.

    Raises CommandLineError if there is no hostfile, or the options contradict it.
    """
    hosts = hosts_of(Resources(include=include or None, exclude=exclude or None, hostfile=hostfile))
    if hosts is None:
        raise CommandLineError(f"The machines are not known: give --hostfile, because there is no {DEFAULT_HOSTFILE}.")
    return [host.name for host in hosts]
