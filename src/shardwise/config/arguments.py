"""Which configuration file the parsed arguments of a script name."""

from __future__ import annotations

from shardwise.errors import ConfigError

CONFIG_ARGUMENTS = ("shardwise_config", "deepspeed_config", "deepscale_config")
"""Attributes by which a namespace of parsed arguments names the file; they mean the same."""


def config_arguments(args: object) -> dict[str, str]:
    """Return the arguments that name a configuration file, with the file."""
    return {name: value for name in CONFIG_ARGUMENTS if (value := getattr(args, name, None)) is not None}


def config_path(args: object) -> str | None:
    """The configuration file named by parsed arguments, whichever of the three spellings was used.

    Args:
        args: what `parse_args` returned; attributes that it lacks count as not given.

    Returns:
        The path, or None if no argument names one.

    Raises:
        ConfigError: two spellings name different files.
    """
    given = config_arguments(args)
    if len(set(given.values())) > 1:
        listed = ", ".join(f"--{name} {value}" for name, value in given.items())
        raise ConfigError(f"{listed} name different files. Give one of them.")
    return next(iter(given.values()), None)
