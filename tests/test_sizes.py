"""One parser of sizes: the same text is the same number everywhere."""

from __future__ import annotations

import pytest

from shardwise.checkpoint.sharded_weights import parse_size
from shardwise.launch.commands.bench import parse_bytes
from shardwise.sizes import LARGEST, size_in_bytes

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
def test_all_parsers_agree_and_are_exact(text: str) -> None:
    assert size_in_bytes(text) == parse_size(text) == parse_bytes(text, "--size") == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "4 i", "4iB", "8X", "\uff11", "1e3", "1.", str(LARGEST + 1), "9" * 5000]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        size_in_bytes(text)
