"""Layers that ranks divide among them (`tests.zero.divided`) train as in one process, and are saved as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint, verify
from shardwise.errors import CheckpointError, UsageError
from shardwise.registry import declare_part
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from shardwise.zero import GatheredParameters
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, config_of, make_optimizer
from tests.zero import divided

CLIP, LR, STAGES = 0.5, 0.02, (0, 1, 2, 3)


def config(stage: int, rows: int = divided.BATCH, **more: Any) -> dict[str, Any]:
    return config_of(stage, rows=rows, gradient_clipping=CLIP, **more)


def made(size: int, stage: int, seed: int = 3, *, fused: bool = False, kind: str = "AdamW", **more: Any) -> Any:
    model = divided.build(size, seed, fused=fused)
    given = {"optimizer": make_optimizer(kind, model.parameters(), LR), "config": config(stage, **more)}
    return shardwise.initialize(model=model, **given)[0]


def steps(engine: Any, size: int, first: int, last: int) -> list[tuple[float, float]]:
    told = []
    for step in range(first, last):
        loss = engine(divided.rows(step, dist.get_rank() // size))
        engine.backward(loss)
        engine.step()
        told.append((float(loss.detach()), float(engine.last_step.grad_norm)))
    return told


def plain(replicas: int, count: int, kind: str = "AdamW") -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train in one process; return the mean loss and the norm of each step, and the parameters."""
    model = divided.Tower()
    optimizer = make_optimizer(kind, model.parameters(), LR)
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


def trained(path: str, size: int, kind: str, stages: tuple[int, ...]) -> list[list[tuple[float, float]]]:
    found = []
    for stage in stages:
        engine = made(size, stage, kind=kind)
        found.append(steps(engine, size, 0, 3))
        engine.save_checkpoint(path, tag=f"stage{stage}")
        engine.destroy()
    return found


def stored(path: Path) -> dict[str, torch.Tensor]:
    verify(str(path))
    with Checkpoint(str(path)) as saved:
        return {f"{tensor.kind} {tensor.name}": saved.read(tensor) for tensor in saved.manifest.tensors}


@pytest.mark.parametrize(
    ("size", "kind", "tolerance", "stages"),
    [
        (4, "AdamW", 1e-5, (1, 2)),
        thorough(4, "AdamW", 1e-5, STAGES),
        thorough(2, "AdamW", 1e-5, STAGES),
        # Optimizers that look at whole tensors, of which no rank has all, or at their norms.
        (2, "norms", 1e-5, (0, 3)),
        thorough(4, "Adafactor", 1e-5, STAGES),
        thorough(4, "Lamb", 1e-5, STAGES),
        thorough(2, "Muon", 1e-3, STAGES),  # its iteration amplifies rounding of small singular values
    ],
)
def test_divided_layers_train_as_in_one_process(
    size: int, kind: str, tolerance: float, stages: tuple[int, ...], tmp_path: Path
) -> None:
    told, expected = plain(4 // size, 3, kind)
    ranks = run_ranks(trained, 4, str(tmp_path), size, kind, stages)
    for stage in range(len(stages)):
        for step, (loss, norm) in enumerate(told):
            # Replicas have losses of their own.
            mine = sum(rank[stage][step][0] for rank in ranks) / 4
            assert mine == pytest.approx(loss, rel=tolerance), (stage, step)
            assert {rank[stage][step][1] for rank in ranks} == {ranks[0][stage][step][1]}
            assert ranks[0][stage][step][1] == pytest.approx(norm, rel=tolerance), (stage, step)
    found = [stored(tmp_path / f"stage{stage}") for stage in stages]
    for name, value in expected.items():
        assert torch.allclose(found[0][f"parameter {name}"], value, rtol=10 * tolerance, atol=2 * tolerance), name
    for stage, other in zip(stages, found, strict=True):
        assert other.keys() == found[0].keys()
        assert all(torch.equal(value, found[0][name]) for name, value in other.items()), stage


def apart(path: str, size: int, stage: int, source: str | None) -> Any:
    """Queries and keys are parts of one tensor: train, or load what others have saved; save."""
    engine = made(size, stage, seed=3 if source is None else 9, fused=True)
    told = []
    if source is None:
        told = steps(engine, size, 0, 2)
    else:
        engine.load_checkpoint(path, tag=source)
    engine.save_checkpoint(path, tag=f"{size} {stage}")
    whole = engine.module_state_dict()
    first = engine.module.layers[0]
    for parameter, numel in ((first.query, 120), (first.keys, 60)):
        with pytest.raises(UsageError, match=f"'layers.0.attention': .* at this place has {numel} of 180 elements"):
            safe_get_full_fp32_param(parameter)
    return told, whole


def test_parameters_of_one_rank_may_be_parts_of_one_tensor(tmp_path: Path) -> None:
    told, expected = plain(2, 2)
    ranks = run_ranks(apart, 4, str(tmp_path), 2, 3, None)
    assert [norm for _, norm in ranks[0][0]] == pytest.approx([norm for _, norm in told], rel=1e-5)
    others = run_ranks(apart, 4, str(tmp_path), 4, 1, "2 3")
    saved, again = stored(tmp_path / "2 3"), stored(tmp_path / "4 1")
    assert saved.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in saved.items())
    attention = saved["parameter layers.0.attention"]
    joined = torch.cat([expected["layers.0.query"], expected["layers.0.keys"]])
    assert attention.shape == (30, divided.WIDTH) and torch.allclose(attention, joined, rtol=1e-4, atol=2e-5)
    assert all(torch.equal(whole["layers.0.attention"], attention) for _, whole in (*ranks, *others))


# -- whole weights of a live engine ------------------------------------------------------------------------------------


@on_ranks(4)
def test_whole_weights_are_gathered(tmp_path: Path) -> None:
    """Take whole weights out in every way, and put them into an engine of other values."""
    path, rank = str(tmp_path), dist.get_rank()
    engine = made(4, 3, bf16={"enabled": True})
    expected = dict(divided.Tower().to(torch.bfloat16).state_dict())
    engine.save_16bit_model(f"{path}/16bit", "model.safetensors")
    engine.export(f"{path}/exported")
    everywhere, first = engine.module_state_dict(), engine._consolidated_16bit_state_dict()
    assert (first is None) is (rank != 0) and list(everywhere) == list(expected)
    exported = {k: v.bfloat16() for k, v in load_file(f"{path}/exported/model.safetensors").items()}
    for found in (everywhere, first or expected, load_file(f"{path}/16bit/model.safetensors"), exported):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine.destroy()
    engine = made(4, 3, seed=8)
    for seed, how in ((5, None), (6, lambda src, dst: dst.load_state_dict(src))):
        values = divided.Tower(seed=seed).state_dict()
        engine.load_module_state_dict(values, custom_load_fn=how)
        found = engine.module_state_dict()
        assert all(torch.equal(value, found[name]) for name, value in values.items())
    engine.load_weights(f"{path}/exported")
    found = engine.module_state_dict()
    assert all(torch.equal(value, found[name].bfloat16()) for name, value in expected.items())
    with pytest.raises(CheckpointError, match=r"not in the model: layers.9.down"):
        engine.load_module_state_dict({**values, "layers.9.down": values["layers.0.down"]})


@on_ranks(4)
def test_parts_are_sent_to_those_who_want_them(tmp_path: Path) -> None:
    engine, values = made(4, 0), divided.Tower().state_dict()
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("broadcast", engine.module_state_dict),
        ("all_to_all", lambda: engine.save_16bit_model(str(tmp_path))),
        ("all_to_all", engine._consolidated_16bit_state_dict),
    ]
    for op, take in ways:
        before = len(list(engine.ledger.records()))
        take()
        records = [record for record in list(engine.ledger.records())[before:] if record.label in values]
        assert {record.op for record in records} <= {op}
        sent = of_all_ranks(sum(record.sent for record in records))
        assert sum(sent) > 0
        if op == "all_to_all":
            assert sent[0] == 0  # it has its parts
            assert sum(sent) < sum(value.nbytes for value in values.values())


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


@on_ranks(2)
def test_buffers_begin_as_those_of_the_first_rank_and_not_in_parts() -> None:
    model, rank = Owned(), dist.get_rank()
    for module in (model, model.first, model.own):
        module.register_buffer("value", torch.full((2,), rank + 1.0).t())
    model.register_buffer("expanded", torch.tensor(float(rank)).expand(3))
    model.register_buffer("longer", torch.full((2 + rank,), float(rank)))
    shardwise.initialize(model=model, config=config(2, 1, optimizer=ADAMW))
    assert [module.value.tolist() for module in (model, model.first)] == [[1.0, 1.0]] * 2
    assert model.own.value[0] == rank + 1 and model.own.get_buffer(f"seen{rank}")[0] == rank
    assert model.expanded[0] == model.longer[0] == rank  # memory of one element, and other shapes


@on_ranks(2)
def test_whole_weights_have_what_only_other_ranks_have(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rank = dist.get_rank()
    engine, *_ = shardwise.initialize(model=Owned(), config=config(2, 1, optimizer=ADAMW))
    weight = engine.module.own.weight
    engine.save_16bit_model(str(tmp_path), "model.safetensors")
    found = engine.module_state_dict(exclude_frozen_parameters=True)
    assert list(found)[:4] == ["first.weight", "first.bias", "own.0.weight", "own.1.weight"]
    names = {f"own.{other}.{key}" for other in range(2) for key in ("weight", "bias")}
    assert found.keys() == {"first.weight", "first.bias", "own.seen0", "own.seen1", *names}
    for values in (found, load_file(tmp_path / "model.safetensors")):
        assert values.keys() == found.keys() and all(torch.equal(values[name], found[name]) for name in found)
        for other in range(2):
            assert torch.equal(values[f"own.{other}.weight"], torch.full((3, 3), other + 1.0))
            assert torch.equal(values[f"own.seen{other}"], torch.full((2,), float(other)))
    engine.load_module_state_dict({name: value * 2 for name, value in found.items()})
    assert torch.equal(weight, torch.full((3, 3), 2 * rank + 2.0))
    told = engine.load_weights(str(tmp_path))
    assert not told.missing and not told.unexpected
    assert torch.equal(weight, torch.full((3, 3), rank + 1.0))
    engine.module.own.bias.requires_grad_(rank == 0)
    assert "own.1.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)


@on_ranks(2)
def test_a_tensor_of_which_some_is_nowhere_is_named() -> None:
    model = nn.Linear(3, 4)
    first = 4 * dist.get_rank()
    declare_part(model.weight, ranks=[dist.get_rank()], shape=(12, 3), box=[(first, first + 4), (0, 3)])
    engine, *_ = shardwise.initialize(model=model, config=config(1, 1, optimizer=ADAMW))
    with pytest.raises(CheckpointError, match=r"'weight': element \[8, 0\] of \[12, 3\] is on 0 ranks"):
        engine.module_state_dict()


# -- single parameters -------------------------------------------------------------------------------------------------


def assert_close(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("world", "size", "stage", "kind"), [(2, 2, 3, "AdamW"), (4, 4, 2, "subclass")])
@on_ranks("world")
def test_single_parameters_are_whole_tensors(world: int, size: int, stage: int, kind: str) -> None:
    engine = made(size, stage, kind=kind)
    plain_model = divided.Tower()
    optimizer = make_optimizer(kind, plain_model.parameters(), LR)
    named, expected = dict(engine.module.named_parameters()), dict(plain_model.named_parameters())
    shapes = {name: (parameter.shape, type(parameter)) for name, parameter in named.items()}
    torch.stack([plain_model(divided.rows(0, replica)) for replica in range(world // size)]).mean().backward()
    engine.backward(engine(divided.rows(0, dist.get_rank() // size)))
    assert_close({name: safe_get_full_grad(p) for name, p in named.items()}, {n: p.grad for n, p in expected.items()})
    # Both are given other gradients, values and, after the step, states.
    generator = torch.Generator().manual_seed(4)
    for name, parameter in named.items():
        gradient, value = (torch.randn(expected[name].shape, generator=generator) / 40 for _ in range(2))
        safe_set_full_grad(parameter, gradient)
        safe_set_full_fp32_param(parameter, value)
        expected[name].grad = gradient
        expected[name].data.copy_(value)
    torch.nn.utils.clip_grad_norm_(plain_model.parameters(), CLIP)
    optimizer.step()
    engine.step()
    assert_close({name: safe_get_full_fp32_param(p) for name, p in named.items()}, expected)
    states = {name: optimizer.state[p]["exp_avg_sq"] for name, p in expected.items()}
    assert_close({name: safe_get_full_optimizer_state(p, "exp_avg_sq") for name, p in named.items()}, states)
    for name, parameter in named.items():
        state = torch.rand(expected[name].shape, generator=generator)
        safe_set_full_optimizer_state(parameter, state, "exp_avg")
        assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), state), name
    gathered(engine, expected)
    assert {name: (parameter.shape, type(parameter)) for name, parameter in named.items()} == shapes
    with pytest.raises(
        UsageError, match=r"'layers.0.down' has shape .*6, 8.*the given value \(6, \d\) .*this rank has"
    ):
        safe_set_full_fp32_param(named["layers.0.down"], torch.zeros(shapes["layers.0.down"][0]))
    if stage == 3:
        local = safe_get_local_fp32_param(named["layers.0.down"])
        assert local is not None and local.numel() <= named["layers.0.down"].numel()


def gathered(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    """Read and write parameters in blocks."""
    last = dist.get_world_size() - 1
    named = dict(engine.module.named_parameters())
    changed = ("layers.0.keys", "layers.1.both", "layers.1.scale", "head.weight")
    with GatheredParameters(list(named.values())), torch.no_grad():
        assert_close(named, expected)
        named["layers.1.both"].fill_(9.0)  # lost
    with GatheredParameters(list(named.values()), modifier_rank=last), torch.no_grad():
        assert_close(named, expected)
        for name in changed:
            more = torch.arange(named[name].numel()).view(named[name].shape)
            named[name].add_(more if dist.get_rank() == last else 0)
            expected[name].add_(more)
    assert_close({name: safe_get_full_fp32_param(parameter) for name, parameter in named.items()}, expected)
    assert_close(engine.module_state_dict(), expected)
    with pytest.raises(RuntimeError, match="stop"), GatheredParameters(named["layers.0.down"], modifier_rank=0):
        named["layers.0.down"].data.zero_()
        raise RuntimeError("stop")
    with GatheredParameters(named["layers.0.down"]):
        assert_close({"down": named["layers.0.down"]}, {"down": expected["layers.0.down"]})
    engine(divided.rows(5, 0))  # the layers compute with their parts again
