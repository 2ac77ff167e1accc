"""Bytes of a step by what they are for, read from the ledger, against closed forms."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.harness import run_ranks, thorough
from tests.parallel.tensor.test_together import Mesh, own, recomputed, started
from tests.parallel.tensor.together import ROWS, TOKENS, WIDTH, WORDS, loss_of

BLOCKS, SIZE, CHOICES = 2, 4, 2
MESHES = {
    "tensor": Mesh(2),
    "norms": Mesh(2, tokens=True),
    "sequence": Mesh(4, sequence=2),
    "experts": Mesh(4, experts=2, tokens=True),
}


def step(mesh: Mesh, stage: int, recompute: bool) -> Any:
    """Train two steps; return what the second has sent, and what the ranks' units hold."""
    engine = started(mesh, stage, 1)
    if recompute:
        for block in engine.module.blocks:
            block.forward = recomputed(block.forward)
    for number in range(2):
        engine.sharded.finish_gathers()
        since = engine.ledger.sequence
        loss, tokens = loss_of(engine, own(engine, number, 0))
        engine.backward(loss, weight=tokens)
        engine.step()
    engine.sharded.finish_gathers()
    found: Counter[tuple[str, str]] = Counter()
    for record in engine.ledger.records(since):
        shared = record.group in ("tensor_parallel", "sequence_parallel", "experts_2")
        if shared:
            if record.op in ("reduce_scatter", "all_gather", "all_to_all") and "counts" not in record.label:
                found[record.group, record.op] += record.size
        elif record.op in ("reduce_scatter", "all_gather") and record.sent:
            found["zero", record.op] += record.size
    units = {unit.index: unit for unit in engine.sharded.units if unit.domain.world > 1}
    sections = [(unit.index, section.layout) for unit in units.values() for section in unit.sections]
    first_back = next(index for index in engine.sharded.order[1] if index in units)
    held = {
        "trained": sum(layout.numel for _, layout in sections if layout.trainable),
        "all": sum(layout.numel for _, layout in sections),
        "kept": sum(layout.numel for index, layout in sections if index == first_back),
        "tokens": own(engine, 1, 0)["input_ids"].shape[1],
    }
    engine.destroy()
    return found, held


def of_tensors(mesh: Mesh, tokens: int, recompute: bool) -> dict[str, int]:
    """What ranks of one copy of the model exchange. A recomputed block needs no more the sum at its end."""
    stream, logits = ROWS * tokens * WIDTH * SIZE, ROWS * tokens * WORDS * SIZE
    divided = 2 * BLOCKS - (mesh.experts > 0)  # attention and MLPs
    if not mesh.tokens:
        # Two sums a layer forward and two backward, and those of the embedding and of the head's input.
        pairs = 2 * divided + 2 + recompute * BLOCKS
        return {"reduce_scatter": pairs * stream, "all_gather": pairs * stream + logits}
    # A gather behind each norm, a sum behind each divided layer, and the same backwards; of what is not divided the
    # gradients of each rank's tokens are put together. Ranks with fewer tokens send as many.
    most = ROWS * -(-tokens // mesh.tensor) * mesh.tensor * WIDTH * SIZE
    gathers = 2 * BLOCKS + 1 + 2 * BLOCKS + 1 + recompute * 2 * BLOCKS
    sums = 2 * divided + 1 + recompute * BLOCKS
    return {"reduce_scatter": sums * most + stream, "all_gather": gathers * most + stream + logits}


def of_zero(stage: int, held: dict[str, int]) -> dict[str, int]:
    """What the ranks of each domain exchange; the unit needed first backwards is kept since the forward pass."""
    trained = held["trained"] * SIZE
    gathered = (2 * held["all"] - held["kept"]) * SIZE if stage == 3 else trained
    return {"reduce_scatter": trained, "all_gather": gathered}


@pytest.mark.parametrize(
    ("kind", "recompute", "stage"),
    [
        ("experts", True, 3),
        ("tensor", False, 1),
        thorough("tensor", True, 0),
        thorough("norms", False, 2),
        thorough("norms", True, 1),
        thorough("sequence", True, 3),
    ],
)
def test_bytes_are_those_of_closed_forms(kind: str, recompute: bool, stage: int) -> None:
    mesh = MESHES[kind]
    told = run_ranks(step, mesh.world, mesh, stage, recompute)
    passes = 2 + recompute
    for found, held in told:
        tokens = held["tokens"]
        wanted = {("tensor_parallel", op): size for op, size in of_tensors(mesh, tokens, recompute).items()}
        wanted |= {("zero", op): size for op, size in of_zero(stage, held).items() if size}
        if mesh.sequence > 1:
            # Queries, keys and values to heads and the output back, N/P each, and the same backwards.
            here = ROWS * tokens * WIDTH // mesh.tensor * SIZE
            whole = ROWS * TOKENS * WIDTH // mesh.tensor // mesh.sequence * SIZE
            forward, backward = 3 * here + whole, here + 3 * whole
            wanted["sequence_parallel", "all_to_all"] = BLOCKS * ((passes - 1) * forward + backward)
        sizes = {key: size for key, size in found.items() if key[0] != "experts_2"}
        assert sizes == wanted
    if mesh.experts:
        # Each choice of a token to its expert and back, and the same backwards.
        sent = sum(found["experts_2", "all_to_all"] for found, _ in told)
        assert sent == 2 * passes * CHOICES * mesh.world * ROWS * TOKENS * WIDTH * SIZE
