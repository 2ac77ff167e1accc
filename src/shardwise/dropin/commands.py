"""The command `ds_report`, which is `shardwise doctor`."""

from __future__ import annotations

import argparse


def report(args: list[str] | None = None) -> int:
    """Run the command, and return its exit code.

    Args:
        args: the arguments after the program's name; None takes those of this process.
    """
    from shardwise.launch.commands.doctor import show

    parser = argparse.ArgumentParser(prog="ds_report", description="Show what is installed, by `shardwise doctor`.")
    nothing = "no effect: there are no operators to build"
    parser.add_argument("--hide_operator_status", action="store_true", help=nothing)
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help=nothing)
    parser.parse_args(args)
    return show()
