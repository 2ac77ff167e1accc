"""`shardwise export` and `shardwise inspect`: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.job import Run, config
from tests.checkpoint.weights import save_by_hand
from tests.harness import run_ranks
from tests.launch.conftest import Call


def make(path: str) -> None:
    run = Run(config(2, "bf16"), seed=1)
    for tag in ("one", "two"):
        run.step()
        run.engine.save_checkpoint(path, tag=tag, client_state={"epoch": 3, "best": 0.5})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    run_ranks(make, 2, str(path))
    return path


def test_a_checkpoint_is_described(call: Call, made: Path) -> None:
    code, shown, error = call("inspect", made / "two")
    assert (code, error) == (0, "")
    for part in (
        "stage 2",
        "global_steps 2",
        "exp_avg_sq",
        "embedding.weight = head.weight",
        "33 frozen",
        "best, epoch",
    ):
        assert part in shown, part
    found = json.loads(call("inspect", made, "--tag", "two", "--json", "--tensors", "--verify")[1])
    assert found["ok"] and found["verified"] and found["counters"]["global_steps"] == 2
    assert found["optimizer"]["groups"][1]["settings"]["betas"] == [0.9, 0.999]
    by_kind = {row["kind"]: row for row in found["kinds"]}
    listed = [tensor for tensor in found["tensors"] if tensor["kind"] == "parameter"]
    assert by_kind["parameter"]["tensors"] == len(listed)
    assert by_kind["parameter"]["dtypes"] == ["bfloat16", "float32"]
    weight = next(tensor for tensor in listed if tensor["name"] == "embedding.weight")
    assert (weight["shape"], weight["dtype"], weight["aliases"]) == ([13, 11], "float32", ["head.weight"])
    assert sum(part["stop"] - part["start"] for part in weight["slices"]) == 13 * 11
    code, shown, _ = call("inspect", made / "two", "--tensors")
    assert "13 x 11" in shown and "tied with head.weight" in shown and "frozen" in shown and "scalar" in shown


def test_a_run_is_listed(call: Call, made: Path, tmp_path: Path) -> None:
    code, shown, _ = call("inspect", made)
    lines = [line.strip() for line in shown.splitlines()]
    assert code == 0
    assert [line.split()[0] for line in lines if line.startswith(("one", "two"))] == ["one", "two"]
    assert next(line for line in lines if line.startswith("two")).endswith("latest")
    save_by_hand(str(tmp_path / "a"), {"w": torch.zeros(3)})
    save_by_hand(str(tmp_path / "b"), {"w": torch.zeros(3)})
    (tmp_path / "b" / "manifest.json").unlink()
    (tmp_path / "latest").write_text("c")
    (tmp_path / ".d.0123.partial").mkdir()
    code, shown, error = call("inspect", tmp_path)
    assert code == 1
    assert "not complete" in shown and ".d.0123.partial: a save that was interrupted" in shown
    assert "'latest' names 'c', which is not there" in error and "b: has no manifest.json" in error
    found = json.loads(call("inspect", tmp_path, "--json")[1])
    assert not found["ok"] and [entry["complete"] for entry in found["checkpoints"]] == [False, True]


def test_damage_gives_exit_code_1(call: Call, tmp_path: Path) -> None:
    save_by_hand(str(tmp_path / "a"), {"w": torch.zeros(300)}, cuts=2)
    assert call("inspect", tmp_path / "a", "--verify")[:1] == (0,)
    file = tmp_path / "a" / "rank00001of00002-01234561.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert call("inspect", tmp_path / "a")[0] == 0  # without --verify nothing is read
    for path in (tmp_path / "a", tmp_path):
        code, shown, error = call("inspect", path, "--verify")
        assert code == 1
        assert "the checksum of bytes" in error and "every checksum is right" not in shown
    found = call("inspect", tmp_path / "a", "--verify", "--json")
    assert found[0] == 1 and "checksum" in json.loads(found[1])["errors"][0]
    file.write_bytes(data[:-5])
    code, _, error = call("inspect", tmp_path / "a")
    assert code == 1 and "truncated" in error
    assert json.loads(call("inspect", tmp_path / "a", "--json")[1])["ok"] is False
    code, _, error = call("inspect", tmp_path / "never")
    assert code == 1 and "no such file or directory" in error


def test_weights_are_exported_and_described(call: Call, made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"model_type": "gpt2"}')
    code, shown, error = call(
        "export", made, tmp_path / "out", "--dtype", "bfloat16", "--tag", "one", "--config", tmp_path / "mine.json"
    )
    assert (code, error) == (0, "") and "tensors" in shown
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert values["embedding.weight"].dtype == torch.bfloat16
    code, shown, _ = call("inspect", tmp_path / "out")
    assert code == 0 and "safetensors" in shown and "bfloat16" in shown
    code, _, error = call("inspect", tmp_path / "out", "--verify")
    assert code == 1 and "have no checksums" in error
    # Weights in one form are exported in another.
    code, _, error = call("export", tmp_path / "out", tmp_path / "pt", "--format", "pt", "--dtype", "float32")
    assert (code, error) == (0, "")
    back = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
    assert back.keys() == values.keys() and all(
        torch.equal(back[k], v.float()) for k, v in values.items() if v.is_floating_point()
    )
    code, _, error = call("export", made, tmp_path / "out")
    assert code == 1 and "--overwrite" in error
    assert call("export", made, tmp_path / "out", "--overwrite", "--max-shard-size", "2KB")[0] == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
