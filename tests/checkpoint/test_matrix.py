"""Every pair of layouts, with every optimizer of the registry; see `tests.checkpoint.matrix`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.checkpoint import matrix
from tests.harness import thorough


def test_the_part_has_every_pair_of_layouts_and_every_optimizer() -> None:
    plan = matrix.part()
    layouts = {matrix.Layout(*pair) for pair in itertools.product(range(4), matrix.WORLDS)}
    pairs = [pair for sources, targets in plan.values() for pair in itertools.product(sources, targets)]
    assert set(pairs) == set(itertools.product(layouts, layouts))
    assert {"adamw", "lamb", "muon", "onebitadam", "zerooneadam", "Adafactor", "Rprop"} <= {e.label for e in plan}
    assert set(plan) == set(matrix.entries())


EVERY_KIND = ("AdamW", "Rprop", "lamb", "muon", "adamw, bf16", "onebitadam")
"""One of torch's, one with other state, one of whole tensors, ... in 16 pairs of layouts (`AdamW`) or 4."""


@pytest.mark.limit(700)
@pytest.mark.parametrize("labels", [EVERY_KIND, thorough(())], ids=["part", "all"])
def test_every_pair_of_layouts_is_exact_and_goes_on_exactly(labels: tuple[str, ...], tmp_path: Path) -> None:
    plan = {
        entry: (saved, loaded) if entry.label == "AdamW" or not labels else (saved[-2:], loaded[:2])
        for entry, (saved, loaded) in matrix.part().items()
        if not labels or entry.label in labels
    }
    pairs, wrong = matrix.run(plan, str(tmp_path), timeout=600)
    assert pairs >= (16 + 5 * 4 if labels else 16 * 16)
    assert wrong == []


@pytest.mark.thorough
@pytest.mark.limit(700)
def test_every_size_of_a_mesh_is_exact_and_goes_on(tmp_path: Path) -> None:
    """Tensors, sequences and experts that ranks share: 25 pairs of layouts, and 4 with each further optimizer."""
    plan = matrix.part_of_meshes()
    for number, sizes in enumerate([range(4), (1, 2, 4), (1, 2), (1, 2), (1, 2)]):
        for pair in plan.values():
            assert {layout[number] for layout in pair[0]} | {layout[number] for layout in pair[1]} <= set(sizes)
        assert all({layout[number] for layout in some} == set(sizes) for some in next(iter(plan.values())))
    pairs, wrong = matrix.run(plan, str(tmp_path), timeout=600)
    assert pairs >= 25 + 4 + 4
    assert wrong == []
