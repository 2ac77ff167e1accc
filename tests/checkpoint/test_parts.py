"""Ranks that have different parts of a model, columns or layers, each sharded by an engine of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.boxes import Box
from shardwise.checkpoint import Checkpoint, export, load, verify
from shardwise.checkpoint.collect import TrainingState
from shardwise.checkpoint.save import SaveRequest, save
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import CheckpointError
from shardwise.registry import Registry
from tests.harness import run_ranks

SHAPES = {"0.bias": (8,), "0.weight": (8, 6), "1.bias": (10,), "1.weight": (10, 8)}
LAYOUTS = ["whole", "columns", "rows", "layers"]


def part_of(layout: str, rank: int) -> dict[str, Box | None]:
    """Return the parameters that a rank of two has, with its box of each; None: all of it."""
    if layout == "whole":
        return dict.fromkeys(SHAPES)
    if layout == "layers":
        return {name: None for name in SHAPES if name.startswith(str(rank))}
    low, high = (0, 3) if rank == 0 else (3, 8)
    if layout == "columns":  # of the first layer its outputs, of the second its inputs; its bias both have
        first: dict[str, Box | None] = {"0.bias": ((low, high),), "0.weight": ((low, high), (0, 6))}
        return {**first, "1.bias": None, "1.weight": ((0, 10), (low, high))}
    return {"0.bias": None, "0.weight": ((0, 8), (rank, 1 + 5 * rank)), "1.bias": None, "1.weight": None}


class Noted(nn.Module):
    """A module with a buffer and extra state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((3,), value))
        self.note = value

    def get_extra_state(self) -> float:
        return self.note

    def set_extra_state(self, state: float) -> None:
        self.note = state


class Model(nn.Module):
    """The part of a rank: parameters by layer, and what else its layers have; the loss is of each element alone."""

    def __init__(self, layout: str, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.boxes = part_of(layout, rank)
        for name, box in self.boxes.items():
            layer, key = name.split(".")
            if not hasattr(self, layer):
                self.add_module(layer, nn.Module())
                self.get_submodule(layer).add_module("noted", Noted(float(seed + int(layer))))
            value = values[name][tuple(slice(*ends) for ends in box or ())].clone()
            self.get_submodule(layer).register_parameter(key, nn.Parameter(value))

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()


class Joined:
    """A sharded model as all ranks see it together: what an engine of model parallelism would be made of."""

    def __init__(self, engine: Any, model: Model, layout: str) -> None:
        self._own = engine.sharded.state
        self.comm = Communicator(None, Ledger(), engine.device)
        own = self._own.registry
        tensors = [replace(t, global_shape=SHAPES[t.name], box=model.boxes[t.name]) for t in own]
        self.registry = Registry(tensors, own.parameters)
        # What both ranks have, the first saves.
        others = set() if self.comm.rank == 0 else set(part_of(layout, 0))
        self._given = {t.index for t in tensors if layout != "whole" and t.box is None and t.name in others}

    def owned_ranges(self) -> dict[int, list[tuple[int, int]]]:
        return {index: own for index, own in self._own.owned_ranges().items() if index not in self._given}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def made(layout: str, seed: int, *, trained: bool) -> tuple[Any, Any]:
    """Return an engine for this rank's part, and the model that all ranks have together."""
    rank = dist.get_rank()
    model = Model(layout, rank, seed)
    alone = None
    if layout != "whole" and dist.get_world_size() > 1:
        groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
        alone = SimpleNamespace(get_data_parallel_group=lambda: groups[rank])
    # The group of the second layer comes second, also where it is the only one that has members.
    layers = [[p for n, p in model.named_parameters() if n.startswith(str(layer))] for layer in range(2)]
    settings = [{"params": some, "weight_decay": 0.1 * n} for n, some in enumerate(layers) if some or n == 0]
    engine, *_ = shardwise.initialize(
        model=model,
        mpu=alone,
        optimizer=torch.optim.AdamW(settings, lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3 if layout == "whole" else 1, "stage3_param_persistence_threshold": 0},
        },
    )
    if trained:
        engine.backward(engine())
        engine.step()
    return engine, Joined(engine, model, layout)


def held(joined: Any) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Return what this rank has of parameters and optimizer state, with the first element of each run."""
    found = {}
    for tensor in joined.registry:
        runs = joined.value_runs().get(tensor.index, [])
        found[f"parameter {tensor.name}"] = [(start, view) for start, _, view in runs]
        for key in ("exp_avg", "exp_avg_sq"):
            pieces = joined.update.state_pieces(tensor.index, key)
            found[f"optimizer/{key} {tensor.name}"] = [(start, view) for start, _, view in pieces]
    return found


def saves(path: str) -> None:
    for layout in LAYOUTS:
        engine, joined = made(layout, 1, trained=True)
        request = SaveRequest(path, layout, config={})
        save(joined, request, TrainingState(counters={"global_steps": 1}))
        engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    run_ranks(saves, 2, str(path))
    return path


def test_what_is_saved_does_not_depend_on_who_had_which_part(saved: Path, tmp_path: Path) -> None:
    content = {}
    for layout in LAYOUTS:
        verify(str(saved / layout))
        with Checkpoint(str(saved / layout)) as one:
            found = one.manifest
            assert all(part.box is not None for part in one.find("0.weight").slices) is (layout in ("columns", "rows"))
            tensors = [(t.name, t.kind, t.shape, t.dtype, t.trainable, t.group) for t in found.tensors]
            values = [one.read(t) for t in found.tensors if t.rank is None]
            assert found.optimizer is not None
            content[layout] = (tensors, found.extra, found.optimizer["groups"], found.optimizer["values"]), values
        export(saved / layout, tmp_path / layout)
        whole = load_file(tmp_path / layout / "model.safetensors")
        assert {name: tuple(whole[name].shape) for name in SHAPES} == SHAPES
    facts, expected = content["whole"]
    for layout in ("columns", "rows", "layers"):
        others, values = content[layout]
        assert others == facts, layout
        assert all(map(torch.equal, values, expected)), layout


def loads(path: str) -> list[str]:
    """Load every layout into every other; return what is wrong."""
    wrong = []
    for layout in LAYOUTS:
        for trained in (False, True):
            engine, joined = made(layout, 2, trained=trained)
            for source in LAYOUTS:
                found = load.find(joined, path, source, load.Options())
                assert found is not None
                load.read(joined, found[0], found[1], load.Options())
                names = {name for name, _ in engine.module.named_parameters()}
                assert names <= set(found[1].report.loaded) and found[1].report.unexpected == ()
                with found[0] as opened:
                    for name, runs in held(joined).items():
                        kind, _, parameter = name.partition(" ")
                        box = engine.module.boxes[parameter]
                        values = opened.read(opened.find(parameter, kind))
                        flat = values[tuple(slice(*ends) for ends in box or ())].reshape(-1)
                        same = all(torch.equal(view, flat[at : at + view.numel()]) for at, view in runs)
                        if not same or (not runs and layout != "whole"):
                            wrong.append(f"{source} -> {layout}: {name}")
                for name, child in engine.module.named_children():
                    if (child.noted.note, child.noted.seen.tolist()) != (1.0 + int(name), [1.0 + int(name)] * 3):
                        wrong.append(f"{source} -> {layout}: {name}.noted")
            engine.destroy()
    return wrong


@pytest.mark.parametrize("world", [2])
def test_every_layout_is_loaded_into_every_other(saved: Path, world: int) -> None:
    assert run_ranks(loads, world, str(saved)) == [[]] * world


def refusals(path: str) -> dict[str, str]:
    """Load what does not fit; return the errors."""
    found = {}
    engine, joined = made("layers", 2, trained=True)
    if dist.get_rank() == 1:  # the only one that has the second layer
        first, *others = joined.registry
        joined.registry = Registry([replace(first, name="1.other"), *others], joined.registry.parameters)
    with pytest.raises(CheckpointError) as caught:
        load.find(joined, path, "whole", load.Options())
    found["renamed"] = str(caught.value)
    engine.destroy()
    engine, joined = made("columns", 2, trained=True)
    changed = [replace(t, global_shape=(9, 6)) if t.name == "0.weight" else t for t in joined.registry]
    joined.registry = Registry(changed, joined.registry.parameters)
    with pytest.raises(CheckpointError) as caught:
        load.find(joined, path, "whole", load.Options())
    found["shape"] = str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        save(joined, SaveRequest(path, "bad"), TrainingState(counters={}))
    found["hole"] = str(caught.value)
    engine.destroy()
    return found


def test_what_no_rank_asks_for_is_named(saved: Path) -> None:
    first, second = run_ranks(refusals, 2, str(saved))
    # Rank 0 names what neither has, rank 1 also what it lacks; that of the other rank is not its business.
    for found in (first, second):
        assert "not in the model: 1.bias" in found["renamed"] and "0." not in found["renamed"].split("not in")[1][:30]
        assert "0.weight (checkpoint [8, 6], model [9, 6])" in found["shape"]
        assert "'0.weight': element [8, 0] of [9, 6] is in 0 boxes" in found["hole"]
    assert "missing in the checkpoint: 1.other" in second["renamed"]
    assert not (saved / "bad").exists()
