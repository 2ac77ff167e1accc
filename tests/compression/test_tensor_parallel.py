"""Compression of layers that tensor parallelism divides, against an engine that has them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise.utils import safe_get_full_fp32_param
from tests.compression.test_training import method
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.training import SGD, config_of, each
from tests.parallel.tensor.models import ROWS, data, decoder
from tests.parallel.tensor.together import RULES

STEPS = 3


def weights(bits: dict[int, list[str]], **shared: Any) -> dict[str, Any]:
    groups = {str(n): (names, {"start_bits": n, "target_bits": n}) for n, names in bits.items()}
    return {"weight_quantization": method(groups, quantize_groups=4, **shared)}


def pruning(kind: str, names: list[str], **shared: Any) -> dict[str, Any]:
    return {f"{kind}_pruning": method({"some": (names, {"dense_ratio": 0.5})}, schedule_offset=1, **shared)}


SECTIONS = {
    "symmetric": weights({4: ["q", "up"], 2: ["down"], 1: ["o$", "head"]}),
    "asymmetric": weights(
        {3: ["q", "o$", "up", "down", "head"]}, quantization_type="asymmetric", rounding="stochastic"
    ),
    "pruned": {
        **pruning("sparse", ["q", "down", "head"]),
        **pruning("row", ["up"]),
        **pruning("head", ["o$"], method="l1", num_heads=4),
        "activation_quantization": method(
            {"some": (["up", "down"], {"bits": 8})}, schedule_offset=1, range_calibration="static"
        ),
    },
}


def trained(section: dict[str, Any], stage: int, size: int) -> dict[str, torch.Tensor]:
    more = {"tensor_parallel": {"autotp_size": size, "partition_config": RULES}} if size > 1 else {}
    source = config_of(stage, SGD, rows=ROWS, compression_training=section, **more)
    engine = shardwise.initialize(model=decoder(), config=source)[0]
    for step in range(STEPS):
        engine.backward(engine(data(step, ROWS)))
        engine.step()
    found = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def as_whole(name: str, stage: int, expected: dict[str, torch.Tensor]) -> None:
    found = trained(SECTIONS[name], stage, 2)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-5), (name, stage, key)


@pytest.mark.parametrize("stage", [3, thorough(0), thorough(1), thorough(2)])
def test_divided_layers_train_as_whole_ones(stage: int) -> None:
    wholes = {name: trained(section, 0, 1) for name, section in SECTIONS.items()}
    run_ranks(each, 2, as_whole, [(name, stage, whole) for name, whole in wholes.items()])


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (pruning("row", ["up"], method="topk"), 'scores of the method "topk" are not; write "l1"'),
        (
            {"activation_quantization": method({"some": (["down"], {"bits": 8})})},
            "tensor parallelism divides the inputs of 'blocks.0.down'",
        ),
    ],
)
def test_what_would_differ_is_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(trained, 2, section, 0, 2)
