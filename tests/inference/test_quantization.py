"""Weight-only quantisation by torchao."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.precision.float8 import own_linear_layers
from tests.harness import run_ranks
from tests.inference.models import answers, expected, generating

# Not in the environment of the other tests: transformers imports it wherever it is, and warns.
if importlib.util.find_spec("torchao") is None:
    pytest.skip("torchao is of the dependency group `inference`", allow_module_level=True)

# Settings, and the largest error of a layer's output relative to its norm.
SETTINGS: list[tuple[dict[str, Any], float]] = [
    ({"dtype": "int8"}, 0.02),
    ({"dtype": "fp32", "quant": {"weight": {"num_bits": 8, "q_type": "asymmetric"}}}, 0.01),
    ({"dtype": "bf16", "quant": {"weight": {"num_bits": 4}}}, 0.2),
    ({"dtype": "bf16", "quant": {"weight": {"num_bits": 4, "q_type": "asymmetric", "group_size": 16}}}, 0.2),
]


@pytest.mark.parametrize(("settings", "bound"), SETTINGS)
def test_layers_compute_with_few_bits(settings: dict[str, Any], bound: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    given = torch.randn(8, 64)
    with torch.no_grad():
        wanted = model(given)
    engine = shardwise.init_inference(model, **settings)
    found = engine(given.to(engine._inference_config.torch_dtype)).float()
    error = float((found - wanted).norm() / wanted.norm())
    assert 1e-4 < error < bound
    assert sum(getattr(layer.weight, "qdata").numel() for layer in model) == 64 * 96 + 96 * 32  # noqa: B009
    assert {layer.weight.qdata.dtype for layer in model} == {torch.int8}


def quantised(size: int) -> Any:
    model = generating("llama")
    engine = shardwise.init_inference(model, dtype="fp32", quant={"weight": {"num_bits": 8}}, mp_size=size)
    layers = own_linear_layers(model)
    weights = {f"{name}.weight": layer.weight.dequantize() for name, layer in layers.items()}
    found = answers(engine, 3, "left", 12), sum(layer.weight.qdata.nbytes for layer in layers.values()), weights
    assert type(model.lm_head.weight.data) is torch.Tensor
    engine.destroy()
    return found


def test_quantised_parts_generate() -> None:
    whole = run_ranks(quantised, 1, 1)[0][1]
    first, second = run_ranks(quantised, 2, 2)
    assert first[0] == second[0]
    assert first[1] == second[1] == whole / 2
    plain = generating("llama")
    values = plain.state_dict()
    for name, part in first[2].items():
        divided = next(dim for dim in (0, 1) if part.shape[dim] < values[name].shape[dim])
        values[name].copy_(torch.cat([part, second[2][name]], divided))
    assert first[0] == expected(plain, 3, 12)


def test_models_without_linear_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layer"):
        shardwise.init_inference(generating("gpt2"), dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"group_size: 0 has 6 inputs on this rank, which 4 does not divide"):
        section = {"weight": {"num_bits": 4, "group_size": 4}}
        shardwise.init_inference(nn.Sequential(nn.Linear(6, 8)), dtype="bf16", quant=section)
