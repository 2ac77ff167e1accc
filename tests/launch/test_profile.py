"""`shardwise profile`: what models compute that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from torch import nn

from shardwise.plan.architectures import SHAPES, Shape


def own() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))


def of_pictures() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def test_a_decoder_by_its_closed_form(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, length = Shape(2, 64, 4, 128, inner=172, llama=True), 64
    monkeypatch.setitem(SHAPES, "llama-7b", shape)
    found = json.loads(shown("profile", "llama-7b", "--length", str(length), "--json"))["llama-7b"]
    inner = shape.inner or 0
    layer = 2 * length * (4 * shape.width**2 + 3 * shape.width * inner)
    attention, head = 4 * length**2 * shape.width, 2 * length * shape.width * shape.vocabulary
    assert found["forward"] == shape.layers * (layer + attention) + head
    assert found["backward"] == shape.layers * (2 * layer + 5 * attention // 2) + 2 * head
    assert found["recompute"] == found["seconds"] == 0


def test_the_table(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown("profile", f"{__name__}:own", "--micro-batch", "2", "--length", "8")
    assert "2 sequences of 8 tokens" in text and "1 (Linear)" in text and "time" not in text
    assert "backward" not in shown("profile", f"{__name__}:own", "--forward-only")
    monkeypatch.setitem(SHAPES, "bloom-560m", Shape(2, 64, 4, 128))
    assert "recomputed:" in shown("profile", "bloom-560m", "--length", "16", "--recompute", "--depth", "0")
