"""Every pair of layouts, with every optimizer of the registry; see `tests.checkpoint.matrix`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.checkpoint import matrix, stages
from tests.checkpoint.job import Layout
from tests.checkpoint.matrix import STAGED, STAGED_FP16
from tests.harness import thorough


def test_the_part_has_every_pair_of_layouts_and_every_optimizer() -> None:
    plan = matrix.part()
    layouts = {Layout(*pair) for pair in itertools.product(range(4), matrix.WORLDS)}
    pairs = [pair for sources, targets in plan.values() for pair in itertools.product(sources, targets)]
    assert set(pairs) == set(itertools.product(layouts, layouts))
    assert {"adamw", "lamb", "muon", "onebitadam", "zerooneadam", "Adafactor", "Rprop"} <= {e.label for e in plan}
    assert set(plan) == set(matrix.entries())


EVERY_KIND = ("AdamW", "lamb", "adamw, bf16", "onebitadam")
"""One of torch's, one with norms of tensors, one with masters, one that compresses."""


@pytest.mark.limit(700)
@pytest.mark.parametrize("labels", [EVERY_KIND, thorough(())], ids=["part", "all"])
def test_every_pair_of_layouts_is_exact_and_goes_on_exactly(labels: tuple[str, ...], tmp_path: Path) -> None:
    plan = matrix.part()
    if labels:  # the first one into more ranks, as many and fewer, the others into fewer
        some = {entry: pair for entry, pair in plan.items() if entry.label in labels}
        plan = {entry: (saved[-1:], loaded[1:2]) for entry, (saved, loaded) in some.items()}
        plan |= {e: (saved[1:3], loaded[1:3]) for e, (saved, loaded) in some.items() if e.label == labels[0]}
    pairs, wrong = matrix.run(plan, str(tmp_path), timeout=600)
    assert pairs >= (7 if labels else 16 * 16)
    assert wrong == []


@pytest.mark.limit(700)
@pytest.mark.parametrize("every", [False, thorough(True)])
def test_every_size_of_a_mesh_is_exact_and_goes_on(every: bool, tmp_path: Path) -> None:
    """Tensors, sequences and experts that ranks share: 25 pairs of layouts, and 4 with each further optimizer."""
    (first, (saved, loaded)), *others = matrix.part_of_meshes().items()
    plan = {first: (saved, loaded), **dict(others)} if every else {first: (saved[3:4], loaded[2:4])}
    pairs, wrong = matrix.run(plan, str(tmp_path), timeout=600)
    assert pairs >= (25 + 4 + 4 if every else 2)
    assert wrong == []


FEW = [Layout(2, 2, stages=2, chunks=2), Layout(0, 1)], [Layout(3, 2, stages=2)]
"""Checkpoints of two chunks, and of one process, into two stages on two ranks."""

OFFLOADED = [Layout(2, 4, stages=2, offload="cpu"), FEW[0][1]], [FEW[0][0]._replace(offload="cpu"), FEW[0][1]]


@pytest.mark.limit(1500)
@pytest.mark.parametrize(
    ("entry", "sources", "targets"),
    [
        (STAGED_FP16, *FEW),
        thorough(STAGED, *OFFLOADED),
        thorough(STAGED, stages.of_meshes(stages.MESHES, 0), stages.of_meshes(stages.MESHES, 2)),
        thorough(STAGED_FP16, stages.of_meshes(stages.SOME, 1), stages.of_meshes(stages.SOME, 3)),
    ],
    ids=["fp16-few", "offloaded", "fp32", "fp16"],
)
def test_every_number_of_stages_is_exact_and_goes_on(
    entry: matrix.Entry, sources: list[Layout], targets: list[Layout], tmp_path: Path
) -> None:
    """Stages on 1, 2 and 4 ranks with one or two chunks, also where ranks share samples, tensors and experts."""
    pairs, wrong = matrix.run({entry: (sources, targets)}, str(tmp_path), timeout=1400)
    assert pairs == len(sources) * len(targets)
    assert wrong == []


@pytest.mark.thorough
def test_stages_of_zero_save_the_same(tmp_path: Path) -> None:
    """With two chunks on two ranks, and with tensors and data shared."""
    sources = stages.of_meshes([stages.MESHES[4], stages.MESHES[5]])
    assert matrix.run({STAGED: (sources, [])}, str(tmp_path), timeout=300) == (0, [])
