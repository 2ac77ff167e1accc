"""Layouts against their definitions, block by block; random blocks; wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    layout_of,
)
from shardwise.config import resolve
from shardwise.config.schema.attention import KEYS
from shardwise.errors import ConfigError
from tests.harness import run_ranks

BLOCK = 4

# Whether queries of block `i` see keys of block `j`, of `n` blocks, in head `h`.
Sees = Callable[[int, int, int, int], bool]

LAYOUTS: list[tuple[SparsityConfig, Sees]] = [
    (DenseSparsityConfig(2, BLOCK), lambda i, j, n, h: True),
    (  # windows of 4; the last block of each is global; that of the incomplete window is its last one
        FixedSparsityConfig(2, BLOCK),
        lambda i, j, n, h: i // 4 == j // 4 or j % 4 == 3 or j == n - 1,
    ),
    (
        FixedSparsityConfig(2, BLOCK, attention="unidirectional"),
        lambda i, j, n, h: j <= i and (i // 4 == j // 4 or j % 4 == 3 or j == n - 1),
    ),
    (
        FixedSparsityConfig(2, BLOCK, horizontal_global_attention=True),
        lambda i, j, n, h: i // 4 == j // 4 or 3 in (i % 4, j % 4) or n - 1 in (i, j),
    ),
    (  # heads take turns in the position of the global blocks: 2-3, then 0-1
        FixedSparsityConfig(3, BLOCK, True, num_global_blocks=2, num_different_global_patterns=2),
        lambda i, j, n, h: i // 4 == j // 4 or j % 4 in ((2, 3), (0, 1))[h % 2] or (h % 2 == 0 and j >= n - 2 >= 0),
    ),
    (
        VariableSparsityConfig(2, BLOCK, local_window_blocks=[1, 2, 3], global_block_indices=[1, 90]),
        lambda i, j, n, h: j == 1 or window(i) == window(j),
    ),
    (
        VariableSparsityConfig(
            2,
            BLOCK,
            global_block_indices=[0, 5],
            global_block_end_indices=[2, 6],
            horizontal_global_attention=True,
        ),
        lambda i, j, n, h: i // 4 == j // 4 or bool({i, j} & {0, 1, 5}),
    ),
    (
        BigBirdSparsityConfig(2, BLOCK, num_random_blocks=0, num_sliding_window_blocks=5, num_global_blocks=2),
        lambda i, j, n, h: abs(i - j) <= 2 or min(i, j) < 2,
    ),
    (
        BSLongformerSparsityConfig(2, BLOCK, global_block_indices=[2], attention="unidirectional"),
        lambda i, j, n, h: j <= i and (i - j <= 1 or 2 in (i, j)),
    ),
    (BSLongformerSparsityConfig(2, BLOCK), lambda i, j, n, h: abs(i - j) <= 1 or min(i, j) == 0),
    (LocalSlidingWindowSparsityConfig(2, BLOCK), lambda i, j, n, h: 0 <= i - j <= 1),
    (
        LocalSlidingWindowSparsityConfig(2, BLOCK, 1, attention="bidirectional"),
        lambda i, j, n, h: i == j,
    ),
]


def window(block: int) -> int:
    """Windows of 1, 2, 3, 3, ... blocks."""
    return 0 if block < 1 else 1 if block < 3 else 2 + (block - 3) // 3


@pytest.mark.parametrize(("config", "sees"), LAYOUTS, ids=lambda value: type(value).__name__)
def test_a_layout_is_its_definition(config: SparsityConfig, sees: Sees) -> None:
    for tokens in (1, 4, 16, 32, 42):
        layout, blocks = config.make_layout(tokens), -(-tokens // BLOCK)
        assert layout.dtype == torch.int64
        expected = torch.tensor(
            [[[sees(i, j, blocks, h) for j in range(blocks)] for i in range(blocks)] for h in range(config.num_heads)],
            dtype=torch.int64,
        )
        assert torch.equal(layout, expected), (tokens, layout, expected)


def random_layouts(*_: Any) -> list[torch.Tensor]:
    both = BigBirdSparsityConfig(2, BLOCK, True, 2, num_sliding_window_blocks=1, num_global_blocks=0)
    past = VariableSparsityConfig(2, BLOCK, True, 2, [1], [], attention="unidirectional")
    again = BigBirdSparsityConfig(2, BLOCK, True, 2, num_sliding_window_blocks=1, num_global_blocks=0, seed=1)
    return [config.make_layout(64) for config in (both, past, again)]


def test_random_blocks_are_equal_on_all_ranks_and_as_many_as_written() -> None:
    both, past, again = random_layouts()
    for ranks in run_ranks(random_layouts, 2):
        assert all(torch.equal(one, other) for one, other in zip(ranks, (both, past, again), strict=True))
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both, again)
    assert set((both - torch.eye(16, dtype=torch.int64)).clamp(min=0).sum(-1).flatten().tolist()) <= {1, 2}
    assert int(past.triu(1).sum()) == 0
    same = BigBirdSparsityConfig(2, BLOCK, False, 2).make_layout(64)
    assert torch.equal(same[0], same[1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FixedSparsityConfig(2, num_global_blocks=3), "must divide"),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), "needs different_layout_per_head"),
        (lambda: FixedSparsityConfig(2, 16, True, num_different_global_patterns=5), "has 4 positions"),
        (lambda: FixedSparsityConfig(2, attention="causal"), "write 'unidirectional'"),
        (
            lambda: FixedSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
            "write attention='bidirectional'",
        ),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[]), "one or more numbers"),
        (lambda: VariableSparsityConfig(2, global_block_end_indices=[1, 2]), "one for each"),
        (lambda: BSLongformerSparsityConfig(2, global_block_end_indices=[0]), "the range is empty"),
        (lambda: BigBirdSparsityConfig(2, num_random_blocks=-1), "num_random_blocks=-1"),
        (lambda: LocalSlidingWindowSparsityConfig(0), "num_heads=0"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize("mode", list(KEYS))
def test_a_section_is_the_class_of_its_mode(mode: str) -> None:
    section = {"mode": mode, "block": BLOCK, "attention": "bidirectional", "num_random_blocks": 1}
    layout = layout_of(resolve({"train_batch_size": 1, "sparse_attention": section}).config.sparse_attention, 2)  # type: ignore[arg-type]
    kinds = {
        "dense": DenseSparsityConfig,
        "fixed": FixedSparsityConfig,
        "variable": VariableSparsityConfig,
        "bigbird": BigBirdSparsityConfig,
        "bslongformer": BSLongformerSparsityConfig,
        "local_sliding_window": LocalSlidingWindowSparsityConfig,
    }
    assert type(layout) is kinds[mode]
    extra = {"num_random_blocks": 1} if mode in ("variable", "bigbird") else {}
    extra |= {"attention": "bidirectional"} if mode == "local_sliding_window" else {}  # type: ignore[dict-item]
    assert torch.equal(layout.make_layout(64), kinds[mode](2, BLOCK, **extra).make_layout(64))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "path", "text"),
    [
        ({"mode": "strided"}, "sparse_attention.mode", "local_sliding_window"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "sparse_attention.num_global_blocks", "must divide"),
        ({"num_different_global_patterns": 4}, "sparse_attention.num_different_global_patterns", "different_layout"),
        (
            {"different_layout_per_head": True, "num_different_global_patterns": 5},
            "sparse_attention.num_different_global_patterns",
            "4 positions",
        ),
        (
            {"attention": "unidirectional", "horizontal_global_attention": True},
            "sparse_attention.horizontal_global_attention",
            "bidirectional",
        ),
        ({"mode": "variable", "local_window_blocks": [0]}, "sparse_attention.local_window_blocks", "at least 1"),
        ({"mode": "variable", "global_block_indices": [-1]}, "sparse_attention.global_block_indices", "below 0"),
        (
            {"mode": "bslongformer", "global_block_end_indices": [1, 2]},
            "sparse_attention.global_block_end_indices",
            "an end for each",
        ),
    ],
)
def test_a_wrong_section_is_refused_by_key(section: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"train_batch_size": 1, "sparse_attention": section})
    assert [problem.path for problem in caught.value.problems] == [path]
    assert text in str(caught.value)


def test_keys_of_other_modes_are_listed_without_effect() -> None:
    section = {"mode": "bigbird", "num_local_blocks": 8, "num_random_blocks": 1}
    found = resolve({"train_batch_size": 1, "sparse_attention": section})
    assert [note.path for note in found.no_effect] == ["sparse_attention.num_local_blocks"]
