"""`shardwise plan`: tables of models on ranks that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.launch.architectures import SHAPES, Decoder
from shardwise.launch.cli import main
from tests.harness import thorough


def own() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert not ended.value.code, capsys.readouterr().err
    return capsys.readouterr().out


def test_published_sizes() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Decoder(shape).parameters()) for name, shape in SHAPES.items()}
    assert sizes["bloom-560m"] == 559_214_592
    assert sizes["bloom-1b1"] == 1_065_314_304
    assert sizes["bloom-7b1"] == 7_069_016_064
    assert sizes["llama-7b"] == 6_738_415_616
    assert sizes["llama-13b"] == 13_015_864_320
    assert sizes["llama-70b"] == 68_976_648_192


def documented(title: str) -> dict[str, list[str]]:
    """Rows of the table behind a title of docs/memory.md, by their first cell."""
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text().partition(title)[2]
    rows = [line.strip("|").split("|") for line in text.partition("|---")[2].partition("\n\n")[0].splitlines()[1:]]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in rows}


@pytest.mark.parametrize("stages", ["1", thorough("0,2,3")])
def test_the_documented_table_of_a_published_case(capsys: pytest.CaptureFixture[str], stages: str) -> None:
    lines = run(capsys, "bloom-560m", "--ranks", "8", "--stages", stages).splitlines()
    assert lines[0] == (
        "bloom-560m: 559,214,592 parameters, 8 ranks, fp32, micro-batch of 1 x 512 tokens, accumulation 1"
    )
    table = {row.split()[0]: row.split()[1:] for row in lines[2 : 3 + stages.count(",")]}
    assert list(table) == stages.split(",")
    shown = documented("**BLOOM-560M, fp32, AdamW")
    assert list(shown) == ["0", "1", "2", "3"]
    for stage, row in table.items():
        assert [row[-1], row[4]] == shown[stage][-2:]
        assert row[:3] == (["2.24", "2.24", "4.47"] if stage == "0" else [row[0], "0.28", "0.56"])


def test_bytes_of_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 64, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    name = f"{__name__}:own"
    text = run(capsys, name, "--config", str(config), "--ranks", "4", "--stages", "0,2", "--length", "16", "--json")
    found = json.loads(text)[name]
    assert found["parameters"] == 64 * 32 + 32 * 64 + 64
    assert [plan["stage"] for plan in found["plans"]] == [0, 2]
    assert all(plan["peaks"]["activations"] > 0 and not plan["note"] for plan in found["plans"])
    assert found["plans"][0]["peaks"]["optimizer state"] == 0
    without = json.loads(run(capsys, name, "--length", "0", "--stages", "1", "--json"))[name]["plans"][0]
    assert "activations" not in without["peaks"] and without["total"]


OFFLOADED = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"},
        "offload_param": {"device": "cpu"},
    },
}


def test_state_elsewhere_and_what_it_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(OFFLOADED))
    given = [f"{__name__}:own", "--config", str(config), "--stages", "3", "--length", "0"]
    limits = ["--device-limit", "1MB", "--host-limit", "1MB", "--disk-limit", "100KB", "--local-ranks", "2"]
    plan = json.loads(run(capsys, *given, *limits, "--json"))[f"{__name__}:own"]["plans"][0]
    assert plan["fits"] is True and plan["elsewhere"]["disk"] > 0
    assert plan["moved"]["disk"]["read"] >= plan["elsewhere"]["disk"] * 0.9
    text = run(capsys, *given, *limits[:-1], "8", "--disk-speed", "2,0.5")
    assert "fits" in text.splitlines()[1] and text.splitlines()[2].endswith(" no")  # the disk is shared by more
    assert "kB on host: a step reads " in text
    assert "kB on disk: a step reads " in text and "at 2.00 and 0.50 GB/s" in text
    unknown = run(capsys, *given, "--device-limit", "1MB", "--host-limit", "1MB")
    assert unknown.splitlines()[2].endswith(" ?") and "--disk-limit" in unknown  # the column says why
    assert unknown.splitlines()[1].split()[-2] == "kB"
    without = run(capsys, *given)
    assert "fits" not in without and "kB on disk: a step reads " in without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-9"], "gpt-9 is not known; give bloom-560m"),
        (["nowhere:model"], "nowhere:model: No module named"),
        (["builtins:dict"], "has returned dict; it must return a torch.nn.Module"),
        (["torch.nn:Linear"], "torch.nn:Linear() has raised TypeError: Linear.__init__() missing 2 required"),
        (["bloom-560m", "--stages", "4"], "--stages 4: give some of"),
        (["bloom-560m", "--precision", "int8"], "--precision int8: give fp32"),
        (["bloom-560m", "--host-limit", "much"], "--host-limit much: expected bytes or a size such as"),
        (["bloom-560m", "--disk-speed", "3"], "--disk-speed 3: give two numbers above 0"),
        (["bloom-560m", "--ranks", "0"], "--ranks, --micro-batch and --accumulation are 1 or more"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
