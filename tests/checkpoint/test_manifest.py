"""Tensors that lie in boxes and flat ranges of these: written by ranks of one layout, read by those of another."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise import boxes
from shardwise.boxes import Box, Region
from shardwise.checkpoint import Checkpoint, Manifest, Slice, StoredTensor, manifest, manifestfile, weights_reader
from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.collect import RankSavePlan
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from shardwise.registry import cut
from tests.checkpoint import hostile
from tests.harness.training import SGD, engine_of

Piece = tuple[Region, int, int]
"""A region, and a range of its elements."""


def divided(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box into boxes, each again and again."""
    if not box or not depth or not draw(st.booleans()):
        return [box]
    along = draw(st.integers(0, len(box) - 1))
    first, end = box[along]
    cut = draw(st.integers(first, end))
    parts = ((first, cut), (cut, end))
    return [found for part in parts for found in divided(draw, (*box[:along], part, *box[along + 1 :]), depth - 1)]


def interleaved(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Give the indices of each dimension to some owners in turn, by chance; a region is what a choice of owners has."""
    dimensions: list[list[list[tuple[int, int]]]] = []
    for size in shape:
        owners = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)) if draw(st.booleans()) else [0] * size
        dimensions.append([[(i, i + 1) for i, own in enumerate(owners) if own == one] for one in range(3)])
    return [boxes.region(choice) for choice in itertools.product(*dimensions)]


def layout(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Piece]:
    """Cut a tensor into boxes or regions, and each of them into ranges."""
    found: list[Piece] = []
    parts = interleaved(draw, shape) if draw(st.booleans()) else divided(draw, boxes.whole(shape), 4)
    for box in parts:
        count = math.prod(boxes.sizes(box))
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        found += [(box, start, stop) for start, stop in itertools.pairwise(edges)]
    return found


def of(values: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return what a rank that has a piece of a tensor has in memory."""
    box, start, stop = piece
    return cut(values, box).reshape(-1)[start:stop].clone()


def write(path: Path, tensors: dict[str, tuple[torch.Tensor, list[Piece]]], world: int) -> None:
    """Save tensors as several ranks would, each piece by the next one."""
    path.mkdir(exist_ok=True)
    parts = [RankSavePlan(f"rank{rank}.safetensors") for rank in range(world)]
    for name, (values, pieces) in tensors.items():
        dtype = manifest.name_of(values.dtype)
        described = StoredTensor(name, "parameter", tuple(values.shape), dtype, (), trainable=True, group=0)
        for number, piece in enumerate(pieces):
            box, start, stop = piece
            kept = None if box == boxes.whole(values.shape) else box
            parts[number % world].add_runs(described, [(start, stop, of(values, piece))], kept)
        if not pieces:
            parts[0].add_runs(described, [])
    files = {part.file: write_tensors(str(path / part.file), part.tensors) for part in parts}
    stored = manifest.combine(tensor for part in parts for tensor in part.stored)
    made = Manifest(
        "a", 0.0, {"shardwise": "0"}, {"world": world}, {}, files, manifest.in_order(stored, [list(tensors)])
    )
    (path / "manifest.json").write_bytes(manifestfile.to_bytes(made))


@given(st.data())
def test_any_layout_is_read_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw
    path = tmp_path_factory.mktemp("saved")
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    values = torch.randperm(math.prod(shape)).view(shape).to(draw(st.sampled_from([torch.float32, torch.int16])))
    write(path, {"w": (values, layout(draw, shape))}, draw(st.integers(1, 3)))
    wanted = layout(draw, shape)
    reads: list[int] = []
    fill = TensorFile._fill

    def counting(self: Any, out: memoryview, offset: int) -> None:
        reads.append(len(out))
        fill(self, out, offset)

    with pytest.MonkeyPatch.context() as patch, Checkpoint(str(path)) as saved:
        stored = saved.find("w")
        assert torch.equal(saved.read(stored), values)
        patch.setattr(weights_reader, "GAP", draw(st.sampled_from([0, 8, 4096])))
        patch.setattr(weights_reader, "LIMIT", draw(st.sampled_from([4, 64, 8 << 20])))
        patch.setattr(TensorFile, "_fill", counting)
        for piece in wanted:
            box, start, stop = piece
            expected = of(values, piece)
            out = torch.zeros(2, stop - start, dtype=torch.float64).T[:, 0]  # of another dtype, with gaps
            reads.clear()
            saved.read_into(stored.part(box), start, out)
            assert torch.equal(out, expected.double())
            if weights_reader.GAP == 0:
                assert sum(reads) == expected.nbytes
        # The way of a load: what lies in one piece is taken while files are verified, the rest is read.
        outs = [torch.zeros(stop - start, dtype=values.dtype) for _, start, stop in wanted]
        runs = [(stored.part(box), start, out) for (box, start, _), out in zip(wanted, outs, strict=True)]
        places, rest = saved.places(runs)
        saved.verify(saved.blocks(), places)
        saved.read_all(rest)
        assert all(torch.equal(out, of(values, piece)) for out, piece in zip(outs, wanted, strict=True))
    with open_source(str(path)) as source:
        for piece in wanted:
            out = torch.zeros(piece[2] - piece[1], dtype=values.dtype)
            source.read_into(source.tensors()["w"].part(piece[0]), piece[1], out)
            assert torch.equal(out, of(values, piece))


# -- manifests that nobody has written ---------------------------------------------------------------------------------

_SHAPE = [4, 6]


def piece(box: Any, start: Any, stop: Any, file: str = "f") -> dict[str, Any]:
    return {"file": file, "key": f"{box}{start}", "start": start, "stop": stop, "box": box}


LEFT, RIGHT = piece([[0, 4], [0, 2]], 0, 8), piece([[0, 4], [2, 6]], 0, 16, "g")
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "overlap": ([LEFT, piece([[0, 4], [1, 6]], 0, 20, "g")], r"element \[0, 1\] of \[4, 6\] is in 2 boxes, of f, g"),
    "hole": ([LEFT, piece([[0, 4], [3, 6]], 0, 12, "g")], r"element \[0, 2\] of \[4, 6\] is in 0 boxes"),
    "same size": ([piece([[0, 2], [0, 6]], 0, 12), piece([[1, 3], [0, 6]], 0, 12)], r"element \[1, 0\] .* in 2 boxes"),
    "box twice": ([LEFT, RIGHT, LEFT | {"key": "x"}], r"element \[0, 0\] of \[4, 6\] is in 2 boxes, of f\)$"),
    "whole and box": (
        [piece(None, 0, 24), piece([[0, 4], [0, 2]], 0, 8, "g")],
        r"element \[0, 0\] .* 2 boxes, of f, g",
    ),
    "nothing": ([], r"element \[0, 0\] of \[4, 6\] is in 0 boxes"),
    "half a box": ([LEFT, RIGHT | {"stop": 12}], r"12 of 16 elements of the box \[\[0, 4\], \[2, 6\]\] are stored"),
    "gap in a box": (
        [LEFT, RIGHT | {"stop": 4}, RIGHT | {"start": 5, "key": "x"}],
        r"a run from element 4 of the box .*, found \[5, 16\) of 16 elements \(in g\)",
    ),
    "range beyond": ([LEFT, RIGHT | {"stop": 17}], r"found \[0, 17\) of 16 elements \(in g\)"),
    "negative": ([LEFT, RIGHT | {"box": [[0, 4], [-2, 2]]}], r"a box of \[4, 6\], found .*-2.* \(in g\)"),
    "reversed": ([LEFT, RIGHT | {"box": [[0, 4], [6, 2]]}], r"a box of \[4, 6\], found"),
    "huge": ([LEFT, RIGHT | {"box": [[0, 10**30], [2, 6]]}], r"a box of \[4, 6\], found"),
    "no dimension": ([LEFT, RIGHT | {"box": []}], r"a box of \[4, 6\], found"),
    "text": ([LEFT, RIGHT | {"box": [["0", "4"], [2, 6]]}], "not as shardwise writes it"),
    "two ranges": ([LEFT, piece([[0, 4], [[2, 3], [4, 6]]], 0, 12, "g")], r"element \[0, 3\] .* is in 0 boxes"),
    "ranges that touch": ([LEFT, RIGHT | {"box": [[0, 4], [[2, 3], [3, 6]]]}], r"a box of \[4, 6\], found"),
    "ranges that descend": ([LEFT, RIGHT | {"box": [[0, 4], [[4, 6], [2, 3]]]}], r"a box of \[4, 6\], found"),
    "a number": ([LEFT, RIGHT | {"box": 3}], "not as shardwise writes it"),
}


def sealed(slices: list[dict[str, Any]], shape: list[int]) -> bytes:
    facts = FileFacts(1 << 20, ("00000000",))
    tensor = StoredTensor("w", "parameter", tuple(shape), "float32", ())
    made = Manifest("a", 0.0, {"shardwise": "0"}, {}, {}, {"f": facts, "g": facts}, [tensor])
    fields = hostile.fields_of(manifestfile.to_bytes(made))
    fields["tensors"][0]["slices"] = slices
    return hostile.sealed(fields)


@pytest.mark.parametrize("name", WRONG)
def test_slices_that_do_not_make_up_the_tensor_are_refused(name: str) -> None:
    slices, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        manifestfile.from_bytes(sealed(slices, _SHAPE), "m.json")
    assert "m.json" in str(caught.value) and ("'w'" in str(caught.value) or "writes it" in message)
    assert len(str(caught.value)) < 1000
    assert manifestfile.from_bytes(sealed([LEFT, RIGHT], _SHAPE), "m.json").tensors[0].numel == 24


def deep() -> tuple[list[dict[str, Any]], list[int]]:
    """Boxes that cut along so many dimensions that they have more corners than fit into memory."""
    shape = [2] * 40
    return [piece([[0, 1]] * 40, 0, 1), piece([[1, 2]] * 40, 0, 1)], shape


def combed() -> tuple[list[dict[str, Any]], list[int]]:
    """Two regions of ten thousand million boxes each."""
    side = 100_000
    combs = [[[i, i + 1] for i in range(first, side * 2, 2)] for first in (0, 1)]
    parts = [[combs[0], combs[0]], [combs[1], combs[1]]]
    return [piece(part, 0, side * side) | {"key": str(n)} for n, part in enumerate(parts)], [side * 2, side * 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deep, "40 dimensions"),
        (combed, "100000 x 100000 ranges"),
    ],
)
def test_many_boxes_and_many_dimensions_take_little_time_and_memory(
    make: Callable[[], tuple[list[dict[str, Any]], list[int]]], message: str, tmp_path: Path
) -> None:
    data = sealed(*make())
    begun = time.process_time()
    with hostile.watched(tmp_path), pytest.raises(CheckpointError, match=message):
        manifestfile.from_bytes(data, "m.json")
    assert time.process_time() - begun < 5


# -- the file ----------------------------------------------------------------------------------------------------------


MANIFEST = Manifest(
    tag="a",
    created=1.5,
    versions={"shardwise": "9.9", "torch": "2", "python": "3"},
    layout={"world": 2, "stage": 3, "dtype": "bfloat16"},
    config={"zero_optimization": {"stage": 3}},
    files={"f": FileFacts(60, ("0a0b0c0d", "01234567"))},
    tensors=[
        StoredTensor("w", "parameter", (2, 3), "float32", (Slice("f", "k", 0, 6),), ("v",), True, 0, "bfloat16"),
        StoredTensor("w", "optimizer/m", (2, 3), "float32", (Slice("f", "l", 0, 6, ((0, 2), (0, 3))),)),
        StoredTensor("b", "buffer", (), "int64", (Slice("f", "b", 0, 1),), rank=1),
    ],
    counters={"global_steps": 3},
    ranks=[{"rng": None}],
)


def test_the_file_gives_the_manifest_back(tmp_path: Path) -> None:
    data = manifestfile.to_bytes(MANIFEST)
    (tmp_path / "manifest.json").write_bytes(data)
    assert manifestfile.load(str(tmp_path)) == MANIFEST
    plain = json.loads(data)
    assert plain["tensors"][0]["slices"] == [{"file": "f", "key": "k", "start": 0, "stop": 6, "box": None}]


def test_another_format_is_refused_with_the_version_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifestfile, "FORMAT", 3)
    data = manifestfile.to_bytes(MANIFEST)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"expected format shardwise.checkpoint 2.* found .* 3.*shardwise 9\.9"):
        manifestfile.from_bytes(data, "m.json")


def test_absent_manifests_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        manifestfile.load(str(tmp_path / "x"))
    with pytest.raises(CheckpointError, match="incomplete"):
        manifestfile.load(str(tmp_path))


def test_a_run_that_never_reports_is_saved(tmp_path: Path) -> None:
    # Accelerate says "never" by infinity, which JSON does not have.
    engine = engine_of(nn.Linear(2, 2), 0, SGD, steps_per_print=float("inf"))
    assert engine.save_checkpoint(str(tmp_path), tag="one")
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["config"]["steps_per_print"] is None
    engine.destroy()


def test_tensors_are_listed_in_one_order_whichever_ranks_had_them() -> None:
    names = ["wte", "h.2.w", "h.10.w", "h.1.b", "head"]
    tensors = [StoredTensor(name, "parameter", (0,), "float32", ()) for name in sorted(names)]

    def listed(*orders: list[str]) -> list[str]:
        return [tensor.name for tensor in manifest.in_order(tensors, orders)]

    assert listed(names) == listed(names, names) == names
    for at in range(1, 5):
        assert listed(names[at:], names[:at]) == ["h.1.b", "h.2.w", "h.10.w", "head", "wte"]


def test_parts_of_ranks_are_joined_and_checked() -> None:
    def part(start: int, stop: int, **other: Any) -> StoredTensor:
        return replace(StoredTensor("w", "parameter", (6,), "float32", (Slice("f", "k", start, stop),)), **other)

    (joined,) = manifest.combine([part(4, 6, aliases=("v",)), part(0, 4, aliases=("u", "v"))])
    assert [run.start for run in joined.slices] == [0, 4] and set(joined.aliases) == {"u", "v"}
    for second in (part(5, 6), part(3, 6), part(4, 6, dtype="float16"), part(4, 6, group=1)):
        with pytest.raises(CheckpointError, match="'w'"):
            manifest.combine([part(0, 4), second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slices: slices[0].update(start="0"), r"tensors\.0\.slices: .*start: expected int, found str"),
        (lambda slices: slices[0].update(stop=True), "stop: expected int, found bool"),
        (lambda slices: slices[0].update(key=None), "key: expected str, found NoneType"),
        (lambda slices: slices[0].update(file=["f"]), "file: expected str, found list"),
        (lambda slices: slices[0].update(box=[[0, 1.5], [0, 3]]), r"slices: .*box\.0"),
        (lambda slices: slices[0].update(more=1), "fields file, key, start, stop, box"),
        (lambda slices: slices[0].pop("box"), "fields file, key, start, stop, box"),
        (lambda slices: slices.append(None), "fields file, key, start, stop, box"),
        (lambda slices: slices[0].update(file="g"), "a file of 'w'"),
    ],
)
def test_fields_of_slices_are_checked(change: Any, message: str) -> None:
    fields = hostile.fields_of(manifestfile.to_bytes(MANIFEST))
    change(fields["tensors"][0]["slices"])
    with pytest.raises(CheckpointError, match=message):
        manifestfile.from_bytes(hostile.sealed(fields), "m.json")


def test_text_and_numbers_beyond_those_of_other_readers_are_kept() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    for value in ("\ud800", 10**400, deep, 0.1 + 0.2, 5e-324, -0.0, "\x00"):
        held = replace(MANIFEST, client={"value": value})
        found = manifestfile.from_bytes(manifestfile.to_bytes(held), "m.json")
        assert found == held and repr(found.client) == repr(held.client)
