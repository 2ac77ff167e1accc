"""Which cases of large products `make test` runs.

Some tests try a product of lists: models x ranks, stages x precisions x optimizers. Each list is one `parametrize`.
`make test` runs so many cases that every entry of every list occurs, which is as many as the longest list has; most of
the rest would find the same mistakes. In files whose cases take seconds it runs one (`SLOW`), the last. What is marked
`thorough` is left out. `make exhaustive` runs all; so does naming a case on the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

Case = tuple[Hashable, ...]
"""The entry of each list of a product that a case has."""

PRODUCTS = (
    "engine/",
    "memory/",
    "zero/",
)
"""Where a case takes long enough for this to matter; below `tests/`."""

SLOW = (
    "engine/test_anomalies.py",
    "engine/test_engine.py",
    "engine/test_signals.py",
    "engine/test_tracing.py",
    "memory/test_preflight.py",
    "memory/test_oom.py",
    "memory/test_monotone.py",
    "memory/test_plans.py",
    "memory/test_report.py",
    "memory/test_watchdog.py",
    "zero/test_autocast.py",
    "zero/test_compression.py",
    "zero/test_costs.py",
    "zero/test_cut.py",
    "zero/test_device.py",
    "zero/test_device_steps.py",
    "zero/test_domains.py",
    "zero/test_graphs.py",
    "zero/test_growth.py",
    "zero/test_init.py",
    "zero/test_layerwise.py",
    "zero/test_loops.py",
    "zero/test_mesh.py",
    "zero/test_mixed_precision.py",
    "zero/test_numerics.py",
    "zero/test_one_pass.py",
    "zero/test_one_rank.py",
    "zero/test_optimizers.py",
    "zero/test_places.py",
    "zero/test_sidechannel.py",
    "zero/test_transports.py",
    "zero/test_whole.py",
    "zero/test_zeropp.py",
)
"""Files below `tests/` of which one case of a product is run."""


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
    return chosen[-1:] if file in SLOW else chosen
