"""`shardwise profile`: what models compute that are not there."""

from __future__ import annotations

import json

import pytest
from torch import nn

from shardwise.launch.architectures import SHAPES
from shardwise.launch.cli import main


def own() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))


def of_pictures() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    assert not ended.value.code, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_published_model_by_its_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    shape, length = SHAPES["llama-7b"], 64
    found = json.loads(run(capsys, "llama-7b", "--length", str(length), "--json"))["llama-7b"]
    assert found["parameters"] == 6_738_415_616
    inner = shape.inner or 0
    layer = 2 * length * (4 * shape.width**2 + 3 * shape.width * inner)
    attention, head = 4 * length**2 * shape.width, 2 * length * shape.width * shape.vocabulary
    assert found["forward"] == shape.layers * (layer + attention) + head
    assert found["backward"] == shape.layers * (2 * layer + 5 * attention // 2) + 2 * head
    assert found["recompute"] == found["seconds"] == 0


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, f"{__name__}:own", "--micro-batch", "2", "--length", "8")
    assert "2 sequences of 8 tokens" in text and "1 (Linear)" in text and "time" not in text
    assert "backward" not in run(capsys, f"{__name__}:own", "--forward-only")
    assert "recomputed:" in run(capsys, "bloom-560m", "--length", "16", "--recompute", "--depth", "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "nonsense is not known"),
        ([f"{__name__}:of_pictures"], "Conv2d raises RuntimeError on token ids of shape [1, 512]"),
        ([f"{__name__}:own", "--length", "0"], "--length"),
        ([f"{__name__}:own", "--depth", "-2"], "--depth"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
