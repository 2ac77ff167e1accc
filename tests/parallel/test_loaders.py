"""Loaders of ranks that share sequences, and of ranks that share none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import UsageError
from shardwise.parallel import RingAttention, RoundRobinLoader, SequenceLoader
from tests.harness import run_ranks
from tests.harness.training import SGD
from tests.parallel.models import MODELS, ROWS


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(9) + 100 * index, "labels": torch.arange(9) + 100 * index}


def made(size: int, **more: Any) -> Any:
    """Return an engine of ranks that share sequences, and its loader."""
    how = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2, "sequence_parallel_size": size}
    engine, _, loader, _ = shardwise.initialize(
        model=MODELS["gpt"](shared=True), config={**how, "optimizer": SGD, **more}, training_data=Rows()
    )
    return engine, loader


def not_shared() -> Any:
    """Loaders, and an engine that nobody destroys."""
    engine, loader = made(1)
    assert engine.get_sequence_parallel_group() is None and engine.sequence_parallel_size == 1
    parts = list(SequenceLoader(loader))
    handed = RoundRobinLoader(loader)
    assert len(handed) == len(loader)
    q = torch.randn(2, 1, 8, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(RingAttention()(q, q, q), expected)
    rounds = list(handed)
    engine.destroy()
    with pytest.raises(UsageError, match="there is no group of ranks"):
        list(SequenceLoader(loader))
    return [[batch["input_ids"].tolist() for batch in batches] for batches in (parts, rounds)], parts


def test_loaders_of_ranks_that_share_no_sequence_give_whole_ones() -> None:
    seen = []
    for (parts, rounds), batches in run_ranks(not_shared, 2):
        for batch in batches:
            assert batch.keys() == {"input_ids", "shift_labels", "position_ids"}
            assert batch["input_ids"].shape == batch["shift_labels"].shape == (ROWS, 9)
        assert len(parts) == len(rounds) == 2
        seen += [row[0] // 100 for rows in parts for row in rows]
    assert sorted(seen) == list(range(8))


def loaded() -> Any:
    """The parts that come from the engine's loader, and who this rank is."""
    engine, loader = made(2, data_parallel_size=2)
    wrapped = SequenceLoader(loader)
    assert len(wrapped) == len(loader) == 2
    assert wrapped.state_dict() == loader.state_dict()
    parts = list(wrapped)
    ranks = dist.get_process_group_ranks(engine.get_sequence_parallel_group())
    found = (
        ranks,
        dist.get_process_group_ranks(engine.data_parallel_group),
        [engine.world_size, engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size],
        [engine.get_data_parallel_rank(), engine.train_batch_size()],
    )
    engine.destroy()
    return parts, found


def test_ranks_of_a_sequence_get_parts_of_the_same_samples() -> None:
    told = run_ranks(loaded, 4)
    assert [found for _, found in told] == [
        ([first, first + 1], [rank % 2, rank % 2 + 2], [4, 2, 4, 2], [rank // 2, 8])
        for rank, first in enumerate([0, 0, 2, 2])
    ]
    seen = []
    for first in (0, 2):
        for left, right in zip(told[first][0], told[first + 1][0], strict=True):
            whole = {name: torch.cat([left[name], right[name]], dim=1) for name in left}
            assert left["input_ids"].shape[1] == 5 and right["input_ids"].shape[1] == 4
            assert whole["position_ids"].tolist() == [list(range(9))]
            assert torch.equal(whole["shift_labels"][:, :-1], whole["input_ids"][:, 1:])
            assert bool((whole["shift_labels"][:, -1] == -100).all()) and "labels" not in whole
            seen += (whole["input_ids"][:, 0] // 100).tolist()
    assert sorted(seen) == list(range(8))
