"""The configuration that a script's command line names."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.errors import ConfigError

CONFIG_ARGUMENTS = ("shardwise_config", "deepspeed_config", "deepscale_config")
"""Attributes of parsed arguments that name the configuration; synonyms."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the configuration-file arguments to a script's parser, and return the parser.

    Parsed arguments have `shardwise_config` and `deepspeed_config` (path or None), `shardwise` and `deepspeed` (flags),
    and the oldest spelling of both, `deepscale`.

    Example:
        >>> parser = add_config_arguments(argparse.ArgumentParser())
        >>> config_path(parser.parse_args(["--deepspeed_config", "config.json"]))
        'config.json'
    """
    group = parser.add_argument_group("shardwise", "where the training configuration comes from")
    file_help = "configuration file (JSON)"
    for name, flag, file in (
        ("shardwise", "for the script to ask whether to use shardwise", file_help),
        ("deepspeed", "the same as --shardwise", file_help),
        ("deepscale", argparse.SUPPRESS, argparse.SUPPRESS),
    ):
        group.add_argument(f"--{name}", action="store_true", help=flag)
        group.add_argument(f"--{name}_config", metavar="FILE", help=file)
    return parser


def config_arguments(args: object) -> dict[str, Any]:
    """Return the arguments that give a configuration, each with its path or dictionary."""
    return {name: value for name in CONFIG_ARGUMENTS if (value := getattr(args, name, None)) is not None}


def config_path(args: object) -> Any:
    """Return the path or dictionary in parsed arguments, or None. Raises ConfigError if two spellings differ."""
    given = config_arguments(args)
    first = next(iter(given.values()), None)
    if any(value != first for value in given.values()):
        listed = ", ".join(f"--{name} {value}" for name, value in given.items())
        raise ConfigError(f"{listed} name different files. Give one of them.")
    return first


def config_source(args: object, config: Any, config_params: Any) -> Any:
    """Return the configuration among the arguments of `initialize`. Raises ConfigError if none is given, or two are."""
    given = {"config": config, "config_params": config_params}
    named = config_path(args)
    if named is not None:
        given[f"args.{next(iter(config_arguments(args)))}"] = named
    sources = {name: value for name, value in given.items() if value is not None}
    if not sources:
        raise ConfigError(
            "initialize() needs a configuration: pass config=... (dict, path or JSON text), or --deepspeed_config on "
            "the command line together with args"
        )
    if len(sources) > 1:
        raise ConfigError(f"the configuration is given twice: {' and '.join(sources)}; keep one")
    return next(iter(sources.values()))
