"""What a load reads, how often and into which memory; damage in every kind of block, in shards of many blocks."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint, Manifest, Slice, StoredTensor, manifestfile, safetensors_reader
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from tests.harness import run_ranks, thorough

WIDTH = 3400
SIZE = 12 * (WIDTH * WIDTH + WIDTH)
"""Bytes of weights and AdamW's state; half of them, and more than 64 MiB, on each of two ranks."""


def make(seed: int, *, trained: bool) -> Any:
    torch.manual_seed(seed)
    engine, *_ = shardwise.initialize(
        model=nn.Linear(WIDTH, WIDTH),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    if trained:
        engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
        engine.step()
    return engine


def save(path: str) -> None:
    engine = make(1, trained=True)
    engine.save_checkpoint(path, tag="a", client_state={"values": torch.arange(1 << 20)})
    engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(path))
    return str(path)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that are read from files of tensors, by any thread."""
    counts: list[int] = []
    fill = safetensors_reader.TensorFile._fill

    def counting(self: Any, out: memoryview, offset: int) -> None:
        counts.append(len(out))
        fill(self, out, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader.TensorFile, "_fill", counting)
        yield counts


def state_of(engine: Any) -> list[torch.Tensor]:
    """Return the optimizer's tensors of one value per element on this rank."""
    return [t for state in engine.optimizer.state.values() for t in state.values() if t.dim()]


def held(engine: Any) -> list[torch.Tensor]:
    """Return copies of the values and the optimizer's state on this rank."""
    values = [view for runs in engine.sharded.state.value_runs().values() for _, _, view in runs]
    return [tensor.clone() for tensor in [*values, *state_of(engine)]]


def load(path: str, trained: bool) -> dict[str, Any]:
    """Load into an engine with other values; count bytes, and compare every value with the file."""
    engine = make(2, trained=trained)
    before = state_of(engine)
    with counted() as counts:
        engine.load_checkpoint(path, "a")
    wrong = []
    with Checkpoint(f"{path}/a") as whole:
        tensors = [(t.index, t.name) for t in engine.sharded.registry]
        for kind in ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            for index, name in tensors:
                values = whole.read(whole.find(name, kind)).view(-1)
                key = kind.partition("/")[2]
                update = engine.sharded.update
                pieces = update.state_pieces(index, key) if key else engine.sharded.state.value_runs()[index]
                wrong += [(kind, name) for first, end, view in pieces if not torch.equal(view, values[first:end])]
    # What was there is still referred to here: other tensors would lie elsewhere.
    kept = bool(before) and [t.data_ptr() for t in before] == [t.data_ptr() for t in state_of(engine)]
    engine.destroy()
    return {"read": sum(counts), "wrong": wrong, "kept": kept}


@pytest.mark.parametrize("world", [thorough(1), 2, 3])
def test_a_resuming_job_reads_optimizer_state_once(saved: str, world: int) -> None:
    """With other cuts than those of the files it is read again, from the page cache."""
    found = run_ranks(load, world, saved, False)
    assert [one["wrong"] for one in found] == [[]] * world
    files = sum(os.path.getsize(f"{saved}/a/{n}") for n in os.listdir(f"{saved}/a") if n.endswith("tensors"))
    trees = world * (files - SIZE)  # client_state, and each rank's random numbers
    read_later = SIZE // 3 if world < 3 else SIZE  # values, and state that the files have in other pieces
    assert files + SIZE // 3 <= sum(one["read"] for one in found) <= 1.05 * (files + read_later) + trees


def test_state_that_is_there_is_overwritten_in_its_place(saved: str) -> None:
    for one in run_ranks(load, 2, saved, True):
        assert one["wrong"] == [] and one["kept"]


def flip(path: str, place: int) -> None:
    """Change a bit of a file, on one rank."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))
    torch.distributed.barrier()


def refusals(path: str, trained: bool) -> list[tuple[str, str, bool]]:
    """Damage a block of each kind, one after the other; return the kind, the error and whether anything changed."""
    engine = make(2, trained=trained)
    before, found = held(engine), []
    names = sorted(name for name in os.listdir(f"{path}/a") if name.endswith("tensors"))
    with safetensors_reader.TensorFile(f"{path}/a/{names[0]}") as file:
        places = {name: sum(file.span(name)) // 2 for name in file.specs}
        places["the end"] = file.span(max(file.specs, key=lambda name: file.span(name)[1]))[1] - 1
    for kind, place in places.items():
        flip(f"{path}/a/{names[0]}", place)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(path, "a")
        flip(f"{path}/a/{names[0]}", place)
        after = held(engine)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert names[0] in str(caught.value)
        found.append((kind, str(caught.value), same))
    engine.load_checkpoint(path, "a")
    engine.destroy()
    return found


@pytest.mark.parametrize("trained", [thorough(True), False])
def test_damage_in_any_kind_of_block_is_refused_and_changes_nothing(saved: str, trained: bool) -> None:
    for found in run_ranks(refusals, 2, saved, trained):
        kinds = {kind.partition("/")[0] for kind, _, _ in found}
        assert {"parameter", "optimizer", "client_state['values']", "the end"} <= kinds, kinds
        for kind, error, same in found:
            assert "damaged: the checksum of bytes" in error, (kind, error)
            assert same, (kind, error)


def test_runs_of_entire_stored_tensors_are_filled_while_they_are_verified(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(300), "y": torch.randn(100), "z": torch.randn(50)}
    facts = write_tensors(str(tmp_path / "f"), tensors)
    x, y, z = (
        StoredTensor(name, "parameter", (values.numel(),), "float32", (Slice("f", name, 0, values.numel()),))
        for name, values in tensors.items()
    )
    (tmp_path / "manifest.json").write_bytes(
        manifestfile.to_bytes(Manifest("a", 0.0, {}, {}, {}, {"f": facts}, [x, y, z]))
    )
    outs = [torch.zeros(300), torch.zeros(7), torch.zeros(100, dtype=torch.float64), torch.zeros(50)]
    with Checkpoint(str(tmp_path)) as opened:
        places, rest = opened.places([(x, 0, outs[0]), (x, 5, outs[1]), (y, 0, outs[2]), (z, 0, outs[3])])
        assert {block: run[0].name for block, run in places.items()} == {("f", 1): "x", ("f", 3): "z"}
        assert [(run[0].name, run[1]) for run in rest] == [("x", 5), ("y", 0)]  # a part; another dtype
        opened.verify([("f", 0), ("f", 1), ("f", 2)], places)
        assert torch.equal(outs[0], tensors["x"]) and not outs[3].any()
        opened.read_all(rest)
    assert torch.equal(outs[1], tensors["x"][5:12]) and torch.equal(outs[2], tensors["y"].double())


def test_blocks_of_format_1_are_verified(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(300), "y": torch.randn(100)}
    size = write_tensors(str(tmp_path / "f"), tensors).size
    data, block = bytearray((tmp_path / "f").read_bytes()), 1024
    sums = [f"{zlib.crc32(data[at : at + block]):08x}" for at in range(0, size, block)]
    stored = [
        StoredTensor(n, "parameter", (v.numel(),), "float32", (Slice("f", n, 0, v.numel()),))
        for n, v in tensors.items()
    ]
    made = Manifest("a", 0.0, {}, {}, {}, {"f": safetensors_reader.FileFacts(size, tuple(sums))}, stored)
    fields = json.loads(manifestfile.to_bytes(made))
    fields["format"].update(version=1, block=block)
    del fields["blake2b"]
    body = (json.dumps(fields)[1:] + "\n").encode()
    (tmp_path / "manifest.json").write_bytes(b'{"blake2b": "' + manifestfile._digest(body).encode() + b'",\n' + body)
    with Checkpoint(str(tmp_path)) as opened:
        assert opened.blocks(opened.manifest.tensors[:1]) == [("f", 0), ("f", 1)]
        assert opened.places([(opened.manifest.tensors[0], 0, torch.zeros(300))])[0] == {}
        opened.verify(opened.blocks())
        assert torch.equal(opened.read(opened.find("y")), tensors["y"])
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    with Checkpoint(str(tmp_path)) as opened:
        opened.verify([("f", 0)])
        with pytest.raises(CheckpointError, match=r"bytes \[1024, 1\d+\) is wrong \(they hold x, y\)"):
            opened.verify(opened.blocks())
