"""The commands `ds_report` (`shardwise doctor` and a list of operators) and `ds_ssh` (`shardwise hosts run`)."""

from __future__ import annotations

from typing import NoReturn

from shardwise_deepspeed.options import Parser, run


def report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> int:
    """Print operators (maybe without reasons) and what is installed; return the exit code of `shardwise doctor`."""
    from shardwise.launch.commands.doctor import show

    if not hide_operator_status:
        _operators(reasons=not hide_errors_and_warnings)
    return show()


def report_command(args: list[str] | None = None) -> NoReturn:
    """Run `ds_report` and exit with its code; `args` default to those of this process."""
    run("ds_report", lambda arguments: report(**vars(Parser("ds_report").given(arguments))), args)


def ssh(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code; `args` default to those of this process."""
    run("ds_ssh", _run_on_hosts, args)


def _run_on_hosts(arguments: list[str]) -> int:
    from shardwise.launch.commands.hosts import hosts_named
    from shardwise.launch.everywhere import run_everywhere

    parser = Parser("ds_ssh")
    given = parser.given(arguments)
    if not given.command:
        parser.error("the command is missing")
    return run_everywhere(hosts_named(given.hostfile), " ".join(given.command))


def _operators(reasons: bool) -> None:
    from shardwise_deepspeed.operators import ALL_OPS

    print("operators   none are compiled: what one is for is done in plain torch, or not built")
    for name, builder in sorted(ALL_OPS.items()):
        there = builder.is_compatible()
        why = f"  ({builder.home if there else builder.reason})" if reasons else ""
        print(f"  {name:<24}{'[OKAY]' if there else '[NO]':<8}{why}".rstrip())
