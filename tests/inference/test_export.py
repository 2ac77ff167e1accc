"""Exported models compute what the model computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.inference.export import export
from tests.harness import thorough
from tests.inference.models import generating


class Logits(nn.Module):
    """Logits of a model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch and onnxscript
@pytest.mark.parametrize("format", [thorough("torch"), thorough("onnx")])
def test_files_compute_the_model(format: Any, tmp_path: Path) -> None:
    if format == "onnx":
        lacking = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if lacking:
            pytest.skip(f"{lacking} are of the dependency group `inference`")
    model = Logits(generating("llama")).eval()
    path = tmp_path / {"torch": "model.pt2", "onnx": "model.onnx"}[format]
    shapes = {"ids": {0: torch.export.Dim("rows", min=1, max=8)}}
    ids = torch.arange(3, 15).view(2, 6)
    assert export(model, path, (ids,), format=format, dynamic_shapes=shapes) < 1e-4
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    if format == "torch":
        more = torch.arange(3, 21).view(3, 6)
        found = torch.export.load(path).module()(more)
        assert torch.allclose(found, model(more), atol=1e-4)


def test_a_small_model_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    given = torch.randn(4, 3)
    assert export(model, tmp_path / "a.pt2", (given,)) < 1e-6
    assert torch.allclose(torch.export.load(tmp_path / "a.pt2").module()(given), model(given))


class Changing(nn.Module):
    """Computes another value in each pass."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x * self.passes


def test_files_that_compute_something_else_are_not_left(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"differs from the model by 1.00e\+00 of the largest output"):
        export(Changing().eval(), tmp_path / "a.pt2", (torch.ones(2),))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "name", "format", "message"),
    [
        (nn.Linear(2, 2), "a.pt2", "torch", "training mode"),
        (nn.Linear(2, 2, device="meta").eval(), "a.pt2", "torch", "on the meta device"),
        (nn.Linear(2, 2).eval(), "a.onnx", "torch", "ends in .pt2"),
        (nn.Linear(2, 2).eval(), "a.xml", "xml", "one of torch, onnx, tensorrt"),
    ],
)
def test_refusals(model: nn.Module, name: str, format: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        export(model, tmp_path / name, (torch.ones(1, 2),), format=format)


@pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is not None, reason="TensorRT is installed")
def test_tensorrt_is_refused_where_it_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch_tensorrt.*Install torch-tensorrt.*format 'onnx'"):
        engine = shardwise.init_inference(nn.Linear(2, 2), dtype="fp32")
        export(engine, tmp_path / "a.ts", (torch.ones(1, 2),), format="tensorrt")
