"""Command-line arguments of a script for its configuration file, as DeepSpeed's; see `config.config_path`."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the configuration-file arguments to a script's parser, and return the parser.

    Parsed arguments have `shardwise_config` and `deepspeed_config` (path or None), `shardwise` and `deepspeed` (flags),
    and the oldest spelling of both, `deepscale`.

    Example:
        >>> from shardwise.config import config_path
        >>> parser = add_config_arguments(argparse.ArgumentParser())
        >>> config_path(parser.parse_args(["--deepspeed_config", "config.json"]))
        'config.json'
    """
    group = parser.add_argument_group("shardwise", "where the training configuration comes from")
    flag_help = "for the script to ask whether to use shardwise"
    file_help = "configuration file (JSON)"
    group.add_argument("--shardwise", action="store_true", help=flag_help)
    group.add_argument("--shardwise_config", default=None, type=str, metavar="FILE", help=file_help)
    group.add_argument("--deepspeed", action="store_true", help="the same as --shardwise")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="FILE", help=file_help)
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
