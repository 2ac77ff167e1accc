"""Layers that ranks divide among them (`tests.zero.divided`) train as in one process, and are saved as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint import Checkpoint, verify
from tests.harness import run_ranks
from tests.zero import divided

CLIP = 0.5


def config(stage: int, micro: int = divided.BATCH, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def made(size: int, stage: int, seed: int = 3, **more: Any) -> Any:
    engine, *_ = shardwise.initialize(model=divided.build(size, seed), config=config(stage, **more))
    return engine


def steps(engine: Any, size: int, first: int, last: int) -> list[tuple[float, float]]:
    told = []
    for step in range(first, last):
        loss = engine(divided.rows(step, dist.get_rank() // size))
        engine.backward(loss)
        engine.step()
        told.append((float(loss.detach()), float(engine.last_step.grad_norm)))
    return told


def plain(replicas: int, count: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train in one process; return the mean loss and the norm of each step, and the parameters."""
    model = divided.Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    told = []
    for step in range(count):
        losses = [model(divided.rows(step, replica)) for replica in range(replicas)]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        told.append((float(loss.detach()), float(norm)))
    return told, {name: value.detach() for name, value in model.named_parameters()}


def trained(path: str, size: int) -> list[list[tuple[float, float]]]:
    found = []
    for stage in range(4):
        engine = made(size, stage)
        found.append(steps(engine, size, 0, 3))
        engine.save_checkpoint(path, tag=f"stage{stage}")
        engine.destroy()
    return found


def stored(path: Path) -> dict[str, torch.Tensor]:
    verify(str(path))
    with Checkpoint(str(path)) as saved:
        return {f"{tensor.kind} {tensor.name}": saved.read(tensor) for tensor in saved.manifest.tensors}


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
def test_divided_layers_train_as_in_one_process(world: int, size: int, tmp_path: Path) -> None:
    told, expected = plain(world // size, 3)
    ranks = run_ranks(trained, world, str(tmp_path), size)
    for stage in range(4):
        for step, (loss, norm) in enumerate(told):
            # Replicas have losses of their own.
            mine = sum(rank[stage][step][0] for rank in ranks) / world
            assert mine == pytest.approx(loss, rel=1e-5), (stage, step)
            assert {rank[stage][step][1] for rank in ranks} == {ranks[0][stage][step][1]}
            assert ranks[0][stage][step][1] == pytest.approx(norm, rel=1e-5), (stage, step)
    found = [stored(tmp_path / f"stage{stage}") for stage in range(4)]
    for name, value in expected.items():
        assert torch.allclose(found[0][f"parameter {name}"], value, rtol=1e-4, atol=2e-5), name
    for stage in range(1, 4):
        assert found[stage].keys() == found[0].keys()
        assert all(torch.equal(value, found[0][name]) for name, value in found[stage].items()), stage


LAYOUTS = [(2, 1, 3), (2, 2, 1), (4, 2, 2), (4, 4, 3)]
"""Ranks, how many of them divide the layers, and the stage."""


def saves(path: str, size: int, stage: int, tag: str) -> None:
    engine = made(size, stage)
    steps(engine, size, 0, 2)
    engine.save_checkpoint(path, tag=tag)
    engine.destroy()


def loads(path: str, size: int, stage: int, tags: list[str], again: str) -> None:
    engine = made(size, stage, seed=7)
    for tag in tags:
        engine.load_checkpoint(path, tag=tag)
        engine.save_checkpoint(again, tag=tag)
    engine.destroy()


def test_every_layout_is_loaded_into_every_other(tmp_path: Path) -> None:
    tags = [f"{world}.{size}.{stage}" for world, size, stage in LAYOUTS]
    for tag, (world, size, stage) in zip(tags, LAYOUTS, strict=True):
        run_ranks(saves, world, str(tmp_path / "a"), size, stage, tag)
    expected = {tag: stored(tmp_path / "a" / tag) for tag in tags}
    assert len({tuple(sorted(content)) for content in expected.values()}) == 1
    for tag, (world, size, stage) in zip(tags, LAYOUTS, strict=True):
        again = tmp_path / f"from {tag}"
        run_ranks(loads, world, str(tmp_path / "a"), size, stage, tags, str(again))
        for source in tags:
            found = stored(again / source)
            assert found.keys() == expected[source].keys()
            wrong = sum(int((value != found[name]).sum()) for name, value in expected[source].items())
            assert wrong == 0, f"{source} -> {tag}"
