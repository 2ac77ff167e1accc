"""Settings of `zero_optimization` that exclude one another are refused by the key, with what is in the way."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError

QW, QG, HP = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2}
PAIRS = {"mics_shard_size": 2}
LEVELS = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
INT8 = {"compression": {"type": "int8"}}


@pytest.mark.parametrize(
    ("zero", "more", "words"),
    [
        ({"stage": 3, "mics_shard_size": 3}, {}, ["mics_shard_size", "is 3", "ranks, 4"]),
        ({"stage": 3, "mics_shard_size": 8}, {}, ["mics_shard_size", "is 8", "ranks, 4"]),
        ({"stage": 3, **PAIRS, **HP}, {}, ["zero_hpz_partition_size", "mics_shard_size"]),
        ({"stage": 3, **PAIRS, **QG}, {}, ["zero_quantized_gradients"]),
        ({"stage": 1, **PAIRS}, INT8, ["compression.type", "mics_shard_size"]),
        ({"stage": 1, **PAIRS}, {"optimizer": {"type": "OneBitAdam"}}, ["optimizer.type", "mics_shard_size"]),
        ({"stage": 3, **LEVELS, **QW}, {}, ["zero_quantized_weights"]),
        ({"stage": 3, **LEVELS, **HP}, {}, ["zero_hpz_partition_size"]),
        ({"stage": 2, **LEVELS}, INT8, ["compression.type"]),
        ({"stage": 2, **QW}, {}, ["zero_quantized_weights", "stage", "found 2"]),
        ({"stage": 2, **QG}, {}, ["zero_quantized_gradients", "found 2"]),
        ({"stage": 1, **HP}, {}, ["zero_hpz_partition_size", "found 1"]),
        ({"stage": 3, "zero_hpz_partition_size": 3}, {}, ["zero_hpz_partition_size", "is 3", "ranks, 4"]),
        ({"stage": 3, **QG, "zero_node_size": 3}, {}, ["zero_node_size", "is 3", "ranks, 4"]),
        ({"stage": 3, "zeropp_loco_param": {}}, {}, ["zeropp_loco_param"]),
        ({"stage": 3, "zero_node_size": 2}, {}, ["zero_node_size"]),
        ({"stage": 3, **QG}, INT8, ["compression.type", "zero_quantized_gradients"]),
    ],
)
def test_settings_that_exclude_one_another(zero: dict[str, Any], more: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConflictError) as caught:
        resolve({"train_batch_size": 4, "zero_optimization": zero, **more}, world_size=4)
    assert all(word in str(caught.value) for word in words), caught.value


def test_groups_in_levels() -> None:
    assert not resolve({"train_batch_size": 4, "zero_optimization": {"stage": 3, **LEVELS}}, world_size=4).no_effect
    zero = {"stage": 3, **LEVELS, "mics_shard_size": 6, "zero_node_size": 4}
    with pytest.raises(ConflictError, match=r"mics_shard_size: is 6.*zero_node_size` = 4"):
        resolve({"train_batch_size": 12, "zero_optimization": zero}, world_size=12)


@pytest.mark.parametrize("size", [0, -5])
def test_sizes_that_are_no_number_of_ranks(size: int) -> None:
    with pytest.raises(ConfigError, match=f"mics_shard_size.*is {size}"):
        resolve({"train_batch_size": 4, "zero_optimization": {"stage": 3, "mics_shard_size": size}}, world_size=4)


def test_blocks_of_codes() -> None:
    with pytest.raises(ConfigError, match=r"block_size.*multiple of 2.*found 7"):
        resolve({"train_batch_size": 4, "compression": {"type": "int4", "params": {"block_size": 7}}}, world_size=4)


def test_one_rank_has_nothing_to_send() -> None:
    found = resolve({"train_batch_size": 4, "zero_optimization": {"stage": 3, **QW}}, world_size=1)
    assert [note.path for note in found.no_effect] == ["zero_optimization.zero_quantized_weights"]
