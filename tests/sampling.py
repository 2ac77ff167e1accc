"""Which cases of large products `make test` runs.

Some tests try a product of lists: models x ranks, stages x precisions x optimizers. Each list is one `parametrize`.
`make test` runs so many cases that every entry of every list occurs, which is as many as the longest list has; most of
the rest would find the same mistakes. Long lists are thinned out further where `EVERY` says so. What is marked
`thorough` is left out. `make exhaustive` runs all; so does naming a case on the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

Case = tuple[Hashable, ...]
"""The entry of each list of a product that a case has."""

PRODUCTS = (
    "checkpoint/",
    "comm/",
    "data/",
    "device/",
    "dropin/",
    "engine/",
    "hf/",
    "memory/",
    "offload/",
    "optim/test_muon.py",
    "optim/test_onebit.py",
    "parallel/",
    "recompute/",
    "zero/",
)
"""Where a case takes long enough for this to matter; below `tests/`."""

EVERY = {
    "checkpoint/test_deepspeed.py": 3,
    "checkpoint/test_layouts.py": 2,
    "checkpoint/test_resume.py": 2,
    "checkpoint/test_staging.py": 2,
    "comm/compression/test_methods.py": 2,
    "device/test_recording.py": 2,
    "hf/test_families.py": 3,
    "memory/test_exhausted.py": 2,
    "memory/test_plans.py": 2,
    "memory/test_report.py": 2,
    "offload/test_devices.py": 2,
    "offload/test_early.py": 2,
    "offload/test_training.py": 2,
    "optim/test_muon.py": 2,
    "optim/test_onebit.py": 3,
    "parallel/tensor/test_entry.py": 2,
    "parallel/tensor/test_huggingface.py": 2,
    "parallel/tensor/test_together.py": 2,
    "parallel/tensor/test_wire.py": 2,
    "zero/test_compression.py": 2,
    "zero/test_costs.py": 2,
    "zero/test_cut_short.py": 2,
    "zero/test_gathered.py": 2,
    "zero/test_graphs.py": 2,
    "zero/test_growth.py": 2,
    "zero/test_init.py": 2,
    "zero/test_layerwise.py": 2,
    "zero/test_loops.py": 3,
    "zero/test_masters.py": 2,
    "zero/test_mesh.py": 2,
    "zero/test_mixed_precision.py": 3,
    "zero/test_numerics.py": 2,
    "zero/test_one_rank.py": 2,
    "zero/test_optimizers.py": 3,
    "zero/test_sparse.py": 2,
    "zero/test_transports.py": 3,
    "zero/test_whole.py": 2,
    "zero/test_zeropp.py": 2,
}
"""File below `tests/` -> of its lists of more than `SHORT` entries, which are alike, one in so many is run."""

SHORT = 3


def covering(cases: Sequence[Case]) -> list[int]:
    """Return the places of few cases in which every entry of every list occurs, in order; always the same.

    Greedy: the next case is the one with most entries that have not occurred, and of those the one whose entries have
    occurred least often, so that what is left over is spread.

    >>> covering([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
    [0, 3, 4]
    """
    missing = {(place, entry) for case in cases for place, entry in enumerate(case)}
    often: Counter[tuple[int, Hashable]] = Counter()
    left = list(range(len(cases)))
    chosen = []
    while missing:
        found = min(
            left,
            key=lambda number: (
                -sum(pair in missing for pair in enumerate(cases[number])),
                sum(often[pair] for pair in enumerate(cases[number])),
                number,
            ),
        )
        left.remove(found)
        chosen.append(found)
        often.update(enumerate(cases[found]))
        missing.difference_update(enumerate(cases[found]))
    return sorted(chosen) or [0]


def sample(file: str, cases: Sequence[Case]) -> list[int]:
    """Return the places of the cases of a test function that `make test` runs; `file` is below `tests/`."""
    if not file.startswith(PRODUCTS):
        return list(range(len(cases)))
    chosen = covering(cases)
    # From the end: of four stages the last is among them.
    return chosen[:: -EVERY.get(file, 1)][::-1] if len(chosen) > SHORT else chosen
