"""Compact lists of ranks: their size does not grow with the size of a group of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_SHOWN = 16
"""Runs of ranks in a text, and lines of different positions in a report."""


def coded(ranks: Sequence[int]) -> list[int] | list[list[int]]:
    """Return the first rank, then stride and size of each mesh dimension; without such a grid, a list of all ranks.

    >>> coded([0, 1, 8, 9, 16, 17]), coded([5]), coded([0, 1, 5])
    ([0, 1, 2, 8, 3], [5], [[0, 1, 5]])
    """
    found, rest = [ranks[0]], list(ranks)
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        size = next((n for n in range(1, len(rest)) if rest[n] - rest[n - 1] != stride), len(rest))
        if len(rest) % size:
            return [list(ranks)]
        found += [stride, size]
        rest = rest[::size]
    return found if decoded(found) == list(ranks) else [list(ranks)]


def decoded(code: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks from `coded`.

    >>> decoded([0, 1, 2, 8, 3]), decoded([[0, 1, 5]])
    ([0, 1, 8, 9, 16, 17], [0, 1, 5])
    """
    first, *dimensions = code
    if not isinstance(first, int):
        return list(first)
    ranks = [first]
    for stride, size in zip(dimensions[::2], dimensions[1::2], strict=True):
        assert isinstance(stride, int) and isinstance(size, int)
        ranks = [rank + stride * step for step in range(size) for rank in ranks]
    return ranks


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return a short text that names ranks.

    >>> ranks_in_words([3]), ranks_in_words([0, 2]), ranks_in_words([0, 1, 2, 3, 5, 7, 8])
    ('rank 3', 'ranks 0, 2', 'ranks 0-3, 5, 7, 8')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(texts[:MOST_SHOWN]) + (f" and {len(texts) - MOST_SHOWN} more" * (len(texts) > MOST_SHOWN))
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {shown}"
