"""Damaged, incomplete and strange checkpoints are found before anything is changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpoint, Manifest, Slice, StoredTensor, manifestfile, verify
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from tests.checkpoint.job import Run, config, differences, on_ranks


def make(path: str, tags: tuple[str, ...]) -> None:
    run = Run(config(2, "bf16"), seed=1)
    for tag in tags:
        run.step()
        run.engine.save_checkpoint(path, tag=tag, client_state={"tag": tag, "values": torch.arange(5.0)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one run, of one, two and three steps; `latest` names the third."""
    path = tmp_path_factory.mktemp("saved")
    on_ranks(make, 2, str(path), ("one", "two", "three"))
    return path


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 16
    path.write_bytes(data)


def data_file(directory: Path) -> Path:
    return sorted(directory.glob("rank00001*"))[0]


def test_an_undamaged_checkpoint_passes(saved: Path) -> None:
    assert verify(str(saved / "one")).tag == "one"


def test_every_flipped_bit_of_every_file_is_found(runs: Path) -> None:
    generator = random.Random(3)
    files = sorted((runs / "one").iterdir())
    assert len(files) == 3
    for path in files:
        original = path.read_bytes()
        places = [0, 7, 8, len(original) - 1, *(generator.randrange(len(original)) for _ in range(150))]
        for place in places:
            changed = bytearray(original)
            changed[place] ^= 1 << generator.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=path.name):
                verify(str(runs / "one"))
        path.write_bytes(original)
    verify(str(runs / "one"))


def test_truncated_and_missing_files_are_found(runs: Path) -> None:
    for path in sorted((runs / "one").iterdir()):
        original = path.read_bytes()
        for length in (0, 5, len(original) // 2, len(original) - 1):
            path.write_bytes(original[:length])
            with pytest.raises(CheckpointError, match=path.name):
                verify(str(runs / "one"))
        path.unlink()
        with pytest.raises(CheckpointError, match=path.name):
            verify(str(runs / "one"))
        path.write_bytes(original + b"x")
        with pytest.raises(CheckpointError, match=path.name):
            verify(str(runs / "one"))
        path.write_bytes(original)
    verify(str(runs / "one"))


def attempt(path: str, tag: str | None, trained: bool = True, **options: Any) -> dict[str, Any]:
    """Try to load, with or without optimizer state before; tell what came of it and whether the engine was changed."""
    run = Run(config(3, "bf16"), seed=2)
    if trained:
        run.step()
    before = run.fingerprint()
    try:
        loaded = run.load(path, tag, **options)
        error = None
    except CheckpointError as caught:
        loaded, error = None, str(caught)
    result = {"loaded": loaded, "error": error, "changed": bool(differences(before, run.fingerprint()))}
    run.step()
    return result


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_damaged_checkpoint_named_by_its_tag_is_an_error_on_all_ranks(runs: Path, world: int) -> None:
    flip(data_file(runs / "three"))
    for result in on_ranks(attempt, world, str(runs), "three"):
        assert result["loaded"] is None
        assert "the checksum of bytes [" in result["error"]
        assert data_file(runs / "three").name in result["error"]
        assert not result["changed"]


def test_only_the_blocks_of_wanted_tensors_are_verified(tmp_path: Path) -> None:
    tensors = {"p": torch.randn(1 << 20), "m": torch.randn(3 << 20)}
    facts = write_tensors(str(tmp_path / "f"), tensors)
    stored = [
        StoredTensor("w", "parameter", (1 << 20,), "float32", (Slice("f", "p", 0, 1 << 20),)),
        StoredTensor("w", "optimizer/m", (3 << 20,), "float32", (Slice("f", "m", 0, 3 << 20),)),
    ]
    made = Manifest("a", 0.0, {}, {}, {}, {"f": facts}, stored)
    (tmp_path / "manifest.json").write_bytes(manifestfile.to_bytes(made))
    verify(str(tmp_path))
    flip(tmp_path / "f", facts.size - 5)
    with Checkpoint(str(tmp_path)) as damaged:
        wanted = damaged.blocks(damaged.manifest.of_module())
        assert wanted == [("f", 0), ("f", 1)] and len(damaged.blocks()) == 3
        damaged.verify(wanted)
        assert torch.equal(damaged.read(damaged.find("w")), tensors["p"])
        with pytest.raises(CheckpointError, match=r"bytes \[\d+, \d+\) is wrong \(they hold m\)"):
            damaged.verify(damaged.blocks())


def break_data(runs: Path) -> None:
    flip(data_file(runs / "three"))


def break_manifest(runs: Path) -> None:
    flip(runs / "three" / "manifest.json")


def remove_manifest(runs: Path) -> None:
    (runs / "three" / "manifest.json").unlink()


def remove_file(runs: Path) -> None:
    data_file(runs / "three").unlink()


def truncate_file(runs: Path) -> None:
    path = data_file(runs / "three")
    path.write_bytes(path.read_bytes()[:-3])


def remove_directory(runs: Path) -> None:
    shutil.rmtree(runs / "three")


def empty_latest(runs: Path) -> None:
    (runs / "latest").write_bytes(b"")


@pytest.mark.parametrize(
    ("fault", "trained"),
    [
        (break_data, True),
        (break_manifest, False),
        (remove_manifest, True),
        (remove_file, False),
        (truncate_file, True),
        (remove_directory, False),
    ],
)
def test_without_a_tag_the_newest_complete_one_is_loaded(runs: Path, fault: Any, trained: bool) -> None:
    fault(runs)
    for result in on_ranks(attempt, 2, str(runs), None, trained):
        assert result["error"] is None
        path, client = result["loaded"]
        assert path == str(runs / "two")
        assert client["tag"] == "two"
    for result in on_ranks(attempt, 2, str(runs), "three", trained):
        assert "three" in result["error"] and not result["changed"]


def test_a_damaged_latest_file_leads_to_the_newest_complete_one(runs: Path) -> None:
    empty_latest(runs)
    flip(runs / "two" / "manifest.json")
    for result in on_ranks(attempt, 2, str(runs), None):
        assert result["loaded"][0] == str(runs / "three")


def test_if_all_are_damaged_the_error_lists_all(runs: Path) -> None:
    for tag in ("one", "two", "three"):
        flip(data_file(runs / tag))
    for result in on_ranks(attempt, 2, str(runs), None):
        assert "no checkpoint can be loaded" in result["error"]
        assert all(data_file(runs / tag).name in result["error"] for tag in ("one", "two", "three"))
        assert not result["changed"]


def skipped_log(path: str) -> list[str]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    try:
        run = Run(config(1), seed=2)
        run.load(path)
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    return lines


def test_what_was_skipped_and_why_is_logged_once(runs: Path) -> None:
    flip(data_file(runs / "three"))
    first, second = on_ranks(skipped_log, 2, str(runs))
    assert any("checkpoint three is skipped" in line and "is wrong" in line for line in first)
    assert any("two is loaded instead" in line for line in first)
    assert not any("skipped" in line for line in second)


def rewrite(directory: Path, change: Any) -> None:
    """Change a manifest and give it the checksum of what it then holds."""
    path = directory / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["blake2b"]
    change(fields)
    body = (json.dumps(fields)[1:] + "\n").encode()
    path.write_bytes(b'{"blake2b": "' + manifestfile._digest(body).encode() + b'",\n' + body)


def test_another_format_number_is_refused(runs: Path) -> None:
    rewrite(runs / "three", lambda fields: fields["format"].update(version=7))
    for result in on_ranks(attempt, 2, str(runs), "three"):
        assert "expected format shardwise.checkpoint 2" in result["error"]
        assert "found shardwise.checkpoint 7" in result["error"]
        assert not result["changed"]


def test_a_manifest_cannot_reach_outside_its_directory(runs: Path) -> None:
    outside = runs / "secret.safetensors"
    shutil.copy(data_file(runs / "three"), outside)

    def point_outside(fields: dict[str, Any]) -> None:
        name = data_file(runs / "three").name
        fields["files"]["../secret.safetensors"] = fields["files"].pop(name)
        for tensor in fields["tensors"]:
            for run in tensor["slices"]:
                if run["file"] == name:
                    run["file"] = "../secret.safetensors"

    rewrite(runs / "three", point_outside)
    with pytest.raises(CheckpointError, match=r"the name of a file: .*'\.\./secret"):
        verify(str(runs / "three"))


class Other(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.extra = nn.Linear(width, width)


def other_model(path: str, width: int, strict: bool, optimizer: str, groups: int) -> str:
    import shardwise

    model = Other(width)
    parameters: Any = list(model.parameters())
    engine, *_ = shardwise.initialize(
        model=model,
        model_parameters=[{"params": parameters[n::groups]} for n in range(groups)],
        config=config(2, "bf16", optimizer),
    )
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path, "one", load_module_strict=strict)
    after = engine.module_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(caught.value)


def test_another_model_is_refused_by_names_and_shapes(saved: Path) -> None:
    for message in on_ranks(other_model, 2, str(saved), 12, True, "AdamW", 2):
        assert "missing in the checkpoint: extra.weight, extra.bias" in message
        assert "not in the model: temperature, nothing, blocks.0.inner.weight, " in message and "in all)" in message
        assert "of another shape: embedding.weight (checkpoint [13, 11], model [13, 12])" in message
    for message in on_ranks(other_model, 2, str(saved), 12, False, "AdamW", 2):
        assert "missing" not in message
        assert "of another shape: embedding.weight" in message


@pytest.mark.parametrize(
    ("optimizer", "groups", "expected"),
    [
        ("SGD", 2, "holds state of the optimizer AdamW, this engine has SGD"),
        ("AdamW", 1, "its optimizer has 2 parameter groups, this engine's has 1"),
        ("AdamW", 2, "has no optimizer state for trained parameters: extra.weight, extra.bias"),
    ],
)
def test_another_optimizer_is_refused(saved: Path, optimizer: str, groups: int, expected: str) -> None:
    for message in on_ranks(other_model, 2, str(saved), 11, False, optimizer, groups):
        assert expected in message
        assert "load_optimizer_states=False" in message


def no_scheduler(path: str) -> str:
    settings = config(1)
    del settings["scheduler"]
    source = Run(settings, seed=1)
    source.step()
    source.engine.save_checkpoint(path)
    target = Run(config(1), seed=2)
    before = target.fingerprint()
    with pytest.raises(CheckpointError) as caught:
        target.load(path)
    assert differences(before, target.fingerprint()) == []
    assert target.load(path, load_lr_scheduler_states=False)[0] is not None
    return str(caught.value)


def test_a_schedule_that_would_begin_anew_is_an_error(tmp_path: Path) -> None:
    for message in on_ranks(no_scheduler, 2, str(tmp_path)):
        assert "saved without a learning-rate scheduler" in message


def test_the_files_say_what_they_hold_to_other_tools(saved: Path) -> None:
    from safetensors.torch import load_file

    found = manifestfile.load(str(saved / "one"))
    stored = next(t for t in found.tensors if t.name == "embedding.weight" and t.kind == "parameter")
    parts = [load_file(os.path.join(saved, "one", run.file))[run.key] for run in stored.slices]
    whole = torch.cat(parts).view(stored.shape)
    assert whole.dtype == torch.float32
    assert whole.shape == (13, 11)
    assert stored.aliases == ("head.weight",)
