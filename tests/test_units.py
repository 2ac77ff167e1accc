"""One parser of sizes: the same text is the same number in options, keys and arguments."""

from __future__ import annotations

import pytest

from shardwise.checkpoint.formats.weight_files import shard_bytes
from shardwise.config import resolve
from shardwise.launch.console import parse_bytes
from shardwise.units import LARGEST, format_size, parse_size

SIZES = {
    "4096": 4096,
    "12 b": 12,
    "4G": 4 << 30,
    "4g": 4 << 30,
    "4Gi": 4 << 30,
    "4GiB": 4 << 30,
    "4GB": 4 * 10**9,
    "1.5 kb": 1500,
    "0.1TB": 10**11,
    "9007199254740993": 9007199254740993,
    str(LARGEST): LARGEST,
}


@pytest.mark.parametrize("text", SIZES)
def test_options_keys_and_arguments_agree_and_are_exact(text: str) -> None:
    key = resolve({"train_batch_size": 1, "memory_limits": {"host": text}}).config.memory_limits.host
    assert parse_size(text) == shard_bytes(text) == parse_bytes(text, "--size") == key == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "4 i", "4iB", "8X", "\uff11", "1e3", "1.", str(LARGEST + 1), "9" * 5000, True, -1]
)
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1536, 5 << 20, 3 << 40])
def test_a_formatted_size_is_read_as_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size
