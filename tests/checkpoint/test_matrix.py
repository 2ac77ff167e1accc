"""Every pair of layouts, with every optimizer of the registry; see `tests.checkpoint.matrix`."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.checkpoint import matrix


def test_the_part_has_every_pair_of_layouts_and_every_optimizer() -> None:
    plan = matrix.part()
    layouts = set(itertools.product(range(4), matrix.WORLDS))
    pairs = [pair for sources, targets in plan.values() for pair in itertools.product(sources, targets)]
    assert set(pairs) == set(itertools.product(layouts, layouts))
    assert {"adamw", "lamb", "muon", "onebitadam", "zerooneadam", "Adafactor", "Rprop"} <= {e.label for e in plan}
    assert set(plan) == set(matrix.entries())


def test_every_pair_of_layouts_is_exact_and_goes_on_exactly(tmp_path: Path) -> None:
    pairs, wrong = matrix.run(matrix.part(), str(tmp_path), timeout=600)
    assert pairs >= 16 * 16
    assert wrong == []
