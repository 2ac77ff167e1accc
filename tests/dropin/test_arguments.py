"""The arguments that scripts declare for their configuration file."""

from __future__ import annotations

import argparse

import pytest

from shardwise.errors import ConfigError
from shardwise_deepspeed.arguments import add_config_arguments, config_path


def _parse(*args: str) -> argparse.Namespace:
    return add_config_arguments(argparse.ArgumentParser()).parse_args(args)


def test_nothing_given() -> None:
    args = _parse()
    assert (args.deepspeed, args.deepscale, args.shardwise) == (False, False, False)
    assert (args.deepspeed_config, args.deepscale_config, args.shardwise_config) == (None, None, None)
    assert config_path(args) is None
    assert config_path(argparse.Namespace()) is None


@pytest.mark.parametrize("name", ["shardwise", "deepspeed", "deepscale"])
def test_every_spelling(name: str) -> None:
    args = _parse(f"--{name}", f"--{name}_config", "c.json")
    assert getattr(args, name) is True
    assert config_path(args) == "c.json"


def test_two_files_contradict() -> None:
    assert config_path(_parse("--shardwise_config", "a", "--deepspeed_config", "a")) == "a"
    with pytest.raises(ConfigError, match=r"--shardwise_config a, --deepspeed_config b"):
        config_path(_parse("--shardwise_config", "a", "--deepspeed_config", "b"))
