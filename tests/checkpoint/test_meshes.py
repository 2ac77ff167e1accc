"""Weights, copies in memory and earlier state of ranks that share tensors, sequences and experts.

`test_matrix.py` has the checkpoints of every mesh, each loaded into every other.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import shardwise
from shardwise.checkpoint import export
from shardwise.optim import build
from shardwise.parallel.data import complete
from tests.checkpoint.job import Layout, rank
from tests.checkpoint.matrix import AFTER, BEFORE, ROWS, Entry, settings, start, train
from tests.checkpoint.test_copies import as_node
from tests.harness import run_ranks, thorough
from tests.parallel.tensor import together

ADAMW, NARROW, MUON = (
    Entry("adamw, meshes", "adamw", meshes=True),
    Entry("adamw, bf16, meshes", "adamw", "bf16", meshes=True),
    Entry("muon, meshes", "muon", meshes=True),
)
ALONE = Layout(0, 1)
SHARED = Layout(3, 4, tensor=2, experts=2)
"""Two ranks have a copy of the model, and two have the experts."""

SHARD = 3000
"""Bytes of weights in a file."""


def exports(root: str, entry: Entry, layout: Layout, *, name: str) -> None:
    """Save and export from the engine, or export alone what has been saved."""
    engine = start(entry, layout, seed=1)
    if name == "engine":
        train(engine, 0, BEFORE)
        engine.save_checkpoint(f"{root}/saved", tag="a")
    else:
        engine.load_checkpoint(f"{root}/saved", tag="a")
    engine.export(f"{root}/{name}", max_shard_size=SHARD)
    engine.save_16bit_model(f"{root}/{name}16", max_shard_size=SHARD)


def tensors(directory: Path) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """Return all weights of a directory; which file each is in follows from the order of units, and may differ."""
    found = {}
    for file in directory.glob("*.safetensors"):
        assert file.stat().st_size < SHARD + 4096
        found.update(load_file(file))
    return {
        name: (value.dtype, list(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, value in found.items()
    }


@pytest.mark.parametrize("entry", [thorough(ADAMW), NARROW], ids=str)
def test_whole_weights_are_those_of_one_process(entry: Entry, tmp_path: Path) -> None:
    """From the engine, and from its checkpoint; masters, and what modules compute with."""
    run_ranks(exports, SHARED.world, str(tmp_path), entry, SHARED, name="engine")
    run_ranks(exports, ALONE.world, str(tmp_path), entry, ALONE, name="alone")
    export(tmp_path / "saved", tmp_path / "checkpoint", max_shard_size=SHARD)
    expected = tensors(tmp_path / "alone")
    plain = together.decoder(experts=1).state_dict()
    assert {name: list(value.shape) for name, value in plain.items() if name != "head.weight"} == {
        name: shape for name, (_, shape, _) in expected.items()
    }
    assert tensors(tmp_path / "engine") == expected
    assert tensors(tmp_path / "checkpoint") == expected
    assert tensors(tmp_path / "engine16") == tensors(tmp_path / "alone16")
    assert tensors(tmp_path / "engine16").keys() == plain.keys()


COPIES = {"checkpoint": {"memory_copies": {"every": BEFORE}}}
FOUR = (Layout(3, 4, tensor=4),)


def go_on(root: str, node: str, layout: Layout, first: int) -> tuple[list[float], str]:
    """Take what there is in the memory of a node, train and leave; the state stays there."""
    with as_node(f"{root}/{node}"):
        engine = start(ADAMW, layout, seed=1 + first, **COPIES)
    found = engine.resume(f"{root}/runs")
    assert (found is None) == (first == 0) and engine.global_steps == first
    source = "nothing" if found is None else engine.resumed.source
    losses = train(engine, first, BEFORE)
    if dist.is_initialized():
        dist.barrier()
    return losses, source


@pytest.mark.parametrize("layouts", [FOUR, thorough((*FOUR, ALONE))], ids=["four", "four and one"])
def test_a_job_goes_on_with_other_ranks_in_a_copy_of_the_model(tmp_path: Path, layouts: tuple[Layout, ...]) -> None:
    """Two copies on two ranks each, then one on four, from memory; as on one rank from there on."""
    root = str(tmp_path)
    run_ranks(go_on, 4, root, "elastic", Layout(1, 4, tensor=2), 0)
    shutil.copytree(tmp_path / "elastic", tmp_path / "alone")
    losses: list[float] = []
    expected: list[float] = []
    for number, layout in enumerate(layouts, start=1):
        answers = run_ranks(go_on, layout.world, root, "elastic", layout, number * BEFORE)
        assert {source for _, source in answers} == {"memory"}
        losses += answers[0][0]
        expected += run_ranks(go_on, 1, root, "alone", ALONE, number * BEFORE)[0][0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == len(losses)


def draws() -> list[Any]:
    return [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def seeded(first: int) -> list[Any]:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(first + rank())
    return draws()


def save_generators(root: str) -> list[Any]:
    engine = start(ADAMW, Layout(1, 4), seed=1)
    drawn = seeded(10)
    engine.save_checkpoint(root, tag="a")
    return drawn


def load_generators(root: str, layout: Layout) -> list[Any]:
    engine = start(ADAMW, layout, seed=2)
    train(engine, 0, 1)
    before = seeded(20)
    engine.load_checkpoint(root, tag="a")
    after = draws()
    return [before, after]


def test_ranks_of_a_copy_of_the_model_draw_alike_after_a_load_from_another_mesh(tmp_path: Path) -> None:
    """Ranks that share a sequence have torch's numbers of their own, for their tokens."""
    saved = run_ranks(save_generators, 4, str(tmp_path))
    for layout in (Layout(1, 4, tensor=2), Layout(1, 4, sequence=2)):
        for number, (before, after) in enumerate(run_ranks(load_generators, 4, str(tmp_path), layout)):
            own = layout.sequence > 1 and number % 2 == 1
            assert after[:2] == saved[number // 2][:2]
            assert after[2] == (before if own else saved[number // 2])[2]


def divided_later(entry: Entry, layout: Layout) -> list[float]:
    """Train plainly, the same on every rank, give an engine the model and the optimizer, and go on."""
    model = together.decoder(experts=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build(entry.name, trained, entry.options, device="cpu", named=model.named_parameters())
    for step in range(BEFORE):
        loss, _ = together.loss_of(model, complete(together.data(step, 0, ROWS // together.ROWS)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del loss  # its graph knows the shapes of whole tensors
    engine = shardwise.initialize(model=model, optimizer=optimizer, config=settings(entry, layout))[0]
    losses = train(engine, BEFORE, AFTER)
    return losses


@pytest.mark.parametrize(("stage", "entry"), [thorough(0, ADAMW), thorough(0, MUON), (3, MUON)], ids=str)
def test_an_optimizer_goes_on_with_its_state_where_tensors_are_divided(entry: Entry, stage: int) -> None:
    (expected,) = run_ranks(divided_later, 1, entry, ALONE)
    for losses in run_ranks(divided_later, 2, entry, Layout(stage, 2, tensor=2)):
        assert losses == pytest.approx(expected, rel=1e-5)
