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
    "checkpoint/",
    "comm/",
    "data/",
    "device/",
    "docs/test_snippets.py",
    "dropin/",
    "hf/",
    "launch/test_run.py",
    "offload/",
    "optim/test_muon.py",
    "optim/test_onebit.py",
    "parallel/",
    "recompute/",
)
"""Where a case takes long enough for this to matter; below `tests/`."""

SLOW = (
    "checkpoint/test_export.py",
    "checkpoint/test_import.py",
    "checkpoint/test_layouts.py",
    "checkpoint/test_meshes.py",
    "checkpoint/test_nonfinite.py",
    "checkpoint/test_reading.py",
    "checkpoint/test_resume.py",
    "checkpoint/test_staging.py",
    "comm/test_quantize.py",
    "comm/test_stragglers.py",
    "device/test_recording.py",
    "docs/test_snippets.py",
    "dropin/test_programs.py",
    "dropin/test_trainer_options.py",
    "hf/test_families.py",
    "launch/test_run.py",
    "offload/test_activations.py",
    "offload/test_devices.py",
    "offload/test_faults.py",
    "offload/test_given.py",
    "offload/test_interrupted.py",
    "offload/test_places.py",
    "offload/test_states.py",
    "offload/test_streams.py",
    "offload/test_training.py",
    "optim/test_onebit.py",
    "parallel/tensor/test_entry.py",
    "parallel/tensor/test_huggingface.py",
    "parallel/tensor/test_memory.py",
    "parallel/tensor/test_random.py",
    "parallel/tensor/test_together.py",
    "parallel/tensor/test_tokens.py",
    "parallel/tensor/test_training.py",
    "parallel/tensor/test_wire.py",
    "parallel/test_setups.py",
    "parallel/test_training.py",
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
