"""Layers that ranks divide among them (`tests.zero.divided`) train as in one process, and are saved as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint, verify
from shardwise.errors import CheckpointError
from shardwise.registry import declare_part
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


# -- whole weights of a live engine ------------------------------------------------------------------------------------


def whole_weights(path: str, size: int, stage: int) -> list[str]:
    """Take whole weights out in every way, and put them into an engine of other values; return what is wrong."""
    rank, wrong = dist.get_rank(), []
    engine = made(size, stage, bf16={"enabled": True})
    expected = dict(divided.Tower().to(torch.bfloat16).state_dict())
    engine.save_16bit_model(f"{path}/16bit", "model.safetensors")
    engine.export(f"{path}/exported")
    everywhere, first = engine.module_state_dict(), engine._consolidated_16bit_state_dict()
    assert (first is None) is (rank != 0)
    found = {
        "everywhere": everywhere,
        "first": first or expected,
        "16bit": load_file(f"{path}/16bit/model.safetensors"),
    }
    found["exported"] = {k: v.bfloat16() for k, v in load_file(f"{path}/exported/model.safetensors").items()}
    for way, values in found.items():
        same = values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in expected)
        wrong += [] if same else [f"{size}, stage {stage}: {way}"]
    assert list(everywhere) == list(expected)
    engine.destroy()
    engine = made(size, stage, seed=8)
    values = divided.Tower(seed=5).state_dict()
    engine.load_module_state_dict(values)
    found = engine.module_state_dict()
    wrong += [name for name, value in values.items() if not torch.equal(value, found[name])]
    engine.load_weights(f"{path}/exported")
    found = engine.module_state_dict()
    wrong += [name for name, value in expected.items() if not torch.equal(value, found[name].bfloat16())]
    with pytest.raises(CheckpointError, match=r"not in the model: layers.9.down"):
        engine.load_module_state_dict({**values, "layers.9.down": values["layers.0.down"]})
    engine.destroy()
    return wrong


@pytest.mark.parametrize(("world", "size", "stage"), [(2, 2, 3), (4, 2, 1), (4, 4, 3)])
def test_whole_weights_are_gathered(world: int, size: int, stage: int, tmp_path: Path) -> None:
    for wrong in run_ranks(whole_weights, world, str(tmp_path), size, stage):
        assert wrong == []


class Owned(nn.Module):
    """A layer that all ranks have, and one that each has for itself, with a buffer that the rank names."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.first = nn.Linear(3, 3)
        self.own = nn.Linear(3, 3)
        nn.init.constant_(self.own.weight, rank + 1.0)
        for name, parameter in self.own.named_parameters():
            declare_part(parameter, ranks=[rank], name=f"own.{rank}.{name}")
        self.own.register_buffer(f"seen{rank}", torch.full((2,), float(rank)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.own(self.first(values)).sum()


def owned(path: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    engine, *_ = shardwise.initialize(model=Owned(), config=config(2, 1))
    engine.save_16bit_model(path, "model.safetensors")
    found = engine.module_state_dict(exclude_frozen_parameters=True)
    engine.load_module_state_dict({name: value * 2 for name, value in found.items()})
    assert torch.equal(engine.module.own.weight, torch.full((3, 3), 2 * dist.get_rank() + 2.0))
    told = engine.load_weights(path)
    assert not told.missing and not told.unexpected
    assert torch.equal(engine.module.own.weight, torch.full((3, 3), dist.get_rank() + 1.0))
    engine.module.own.bias.requires_grad_(dist.get_rank() == 0)
    assert ("own.1.bias" in engine.module_state_dict(exclude_frozen_parameters=True)) is False
    engine.destroy()
    return found


def test_whole_weights_have_what_only_other_ranks_have(tmp_path: Path) -> None:
    first, second = run_ranks(owned, 2, str(tmp_path))
    names = {f"own.{rank}.{key}" for rank in range(2) for key in ("weight", "bias")}
    assert first.keys() == second.keys() == {"first.weight", "first.bias", "own.seen0", "own.seen1", *names}
    assert list(first)[:4] == ["first.weight", "first.bias", "own.0.weight", "own.1.weight"]
    written = load_file(tmp_path / "model.safetensors")
    for found in (first, second, written):
        assert found.keys() == first.keys() and all(torch.equal(found[name], first[name]) for name in first)
        for rank in range(2):
            assert torch.equal(found[f"own.{rank}.weight"], torch.full((3, 3), rank + 1.0))
            assert torch.equal(found[f"own.seen{rank}"], torch.full((2,), float(rank)))


def holed() -> None:
    model = nn.Linear(3, 4)
    first = 4 * dist.get_rank()
    declare_part(model.weight, ranks=[dist.get_rank()], shape=(12, 3), box=[(first, first + 4), (0, 3)])
    engine, *_ = shardwise.initialize(model=model, config=config(1, 1))
    with pytest.raises(CheckpointError, match=r"'weight': element \[8, 0\] of \[12, 3\] is on 0 ranks"):
        engine.module_state_dict()
    engine.destroy()


def test_a_tensor_of_which_some_is_nowhere_is_named() -> None:
    run_ranks(holed, 2)
