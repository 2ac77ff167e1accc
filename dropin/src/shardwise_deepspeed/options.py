"""Command lines of DeepSpeed's commands, whose options are in options.toml."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from shardwise.errors import CommandLineError, NotBuiltError, ShardwiseError
from shardwise_deepspeed.entries import read

USAGE_ERROR = 2
_TYPES = {"int": int, "lower": str.lower}


class Parser(argparse.ArgumentParser):
    """Parser of one command. A wrong command line is a CommandLineError."""

    def __init__(self, name: str) -> None:
        self._options = read("options.toml")[name]
        super().__init__(prog=name, description=self._options["description"], allow_abbrev=False)
        self._add(self, "options")
        if "several" in self._options:
            self._add(self.add_argument_group("for several machines", "no effect on one machine"), "several")
        values, lists = (self._options.get(kind, "").split() for kind in ("values", "lists"))
        for kind in ("without_effect", "refused"):
            group = self.add_argument_group(kind.replace("_", " "))
            for option, reason in self._options.get(kind, {}).items():
                form: dict[str, Any] = {"nargs": "+"} if option in lists else {}
                if option not in values + lists:
                    form = {"action": "store_true", "default": None}
                group.add_argument(f"--{option}", help=reason, **form)

    def _add(self, group: Any, section: str) -> None:
        for names, row in self._options[section].items():
            form = {key: _TYPES[value] if key == "type" else value for key, value in row.items()}
            form.setdefault("help", argparse.SUPPRESS)
            if form.pop("flag", False):
                form["action"] = "store_true"
            group.add_argument(*names.split(), **form)

    def error(self, message: str) -> NoReturn:
        """Raise CommandLineError."""
        raise CommandLineError(f"{message}. `{self.prog} --help` shows the options.")

    def given(self, arguments: list[str]) -> argparse.Namespace:
        """Parse a command line. Raises NotBuiltError for a refused option."""
        given = self.parse_args(arguments)
        for option, reason in self._options.get("refused", {}).items():
            # "-1" is the default of the real command, which scripts spell out.
            if getattr(given, option) not in (None, "-1"):
                raise NotBuiltError(f"--{option}: {reason}.")
        for option, reason in self._options.get("without_effect", {}).items():
            if getattr(given, option.replace("-", "_")) is not None:
                print(f"--{option} changes nothing: {reason}")
        return given


def run(name: str, command: Callable[[list[str]], int | None], args: list[str] | None) -> NoReturn:
    """Run a command and exit with its code; `args` default to those of this process."""
    try:
        code = command(sys.argv[1:] if args is None else args)
    except ShardwiseError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        code = USAGE_ERROR if isinstance(error, CommandLineError) else 1
    sys.exit(code or 0)
