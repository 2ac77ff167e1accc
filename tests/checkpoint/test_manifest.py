from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwise.checkpoint import manifest, manifestfile
from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor
from shardwise.errors import CheckpointError
from tests.checkpoint import hostile
from tests.harness.training import SGD, engine_of

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
    for cut in range(1, 5):
        assert listed(names[cut:], names[:cut]) == ["h.1.b", "h.2.w", "h.10.w", "head", "wte"]


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
