"""Names of number types and the policy that a configuration describes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.precision import PrecisionPolicy, parse_dtype, policy_from_config


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (["fp16", "float16", "half", "torch.half", "FP16", torch.float16], torch.float16),
        (["bf16", "bfloat16", "BFloat16", torch.bfloat16], torch.bfloat16),
        (["fp32", "float32", "float", "torch.float32", torch.float32], torch.float32),
        (["fp64", "float64", "double", torch.float64], torch.float64),
    ],
)
def test_names(names: list[Any], dtype: torch.dtype) -> None:
    assert {parse_dtype(name) for name in names} == {dtype}


@pytest.mark.parametrize("name", ["int8", "fp8", "", None, 16, torch.int64])
def test_unknown_names(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"data_types\.param_dtype: expected one of fp16, .* found"):
        parse_dtype(name, "data_types.param_dtype")


def config(**changes: Any) -> Any:
    types = {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None}
    return SimpleNamespace(
        fp16=SimpleNamespace(
            enabled=changes.pop("fp16", False), fp16_master_weights_and_grads=changes.pop("narrow16", False)
        ),
        bf16=SimpleNamespace(
            enabled=changes.pop("bf16", False),
            master_weights=changes.pop("master_weights", "fp32"),
            bf16_master_weights_and_grads=changes.pop("narrow", False),
        ),
        communication_data_type=changes.pop("wire", None),
        data_types=SimpleNamespace(**{**types, **changes}),
    )


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, PrecisionPolicy(None, None, torch.float32, None)),
        ({"fp16": True}, PrecisionPolicy(compute_dtype=torch.float16)),
        ({"bf16": True, "param_dtype": "bf16"}, PrecisionPolicy(compute_dtype=torch.bfloat16)),
        ({"param_dtype": "fp32"}, PrecisionPolicy(compute_dtype=torch.float32)),
        ({"narrow": True, "narrow16": True, "master_weights": "none"}, PrecisionPolicy()),  # switched off
        ({"bf16": True, "master_weights": "none"}, PrecisionPolicy(compute_dtype=torch.bfloat16, masters=False)),
        (
            {"bf16": True, "narrow": True},
            PrecisionPolicy(torch.bfloat16, accumulate_dtype=torch.bfloat16, masters=False),
        ),
        (
            {"fp16": True, "narrow16": True, "grad_accum_dtype": "fp32"},
            PrecisionPolicy(compute_dtype=torch.float16, masters=False),
        ),
        (
            {"bf16": True, "wire": "fp32", "grad_accum_dtype": "bf16", "buffer_dtype": "fp16"},
            PrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16, torch.float16),
        ),
    ],
)
def test_policy_of_a_configuration(changes: dict[str, Any], policy: PrecisionPolicy) -> None:
    assert policy_from_config(config(**changes)) == policy


def test_master_weights() -> None:
    policy = PrecisionPolicy()
    assert policy.master_dtype(torch.float16) is torch.float32
    assert policy.master_dtype(torch.bfloat16) is torch.float32
    assert policy.master_dtype(torch.float32) is torch.float32
    assert policy.master_dtype(torch.float64) is torch.float64
    with pytest.raises(ConfigError, match=r"torch\.float8_e4m3fn cannot be trained"):
        policy.master_dtype(torch.float8_e4m3fn)


def test_accumulation_never_narrows_fp64() -> None:
    policy = PrecisionPolicy(accumulate_dtype=torch.bfloat16)
    assert policy.accumulation_dtype(torch.float16) is torch.bfloat16
    assert policy.accumulation_dtype(torch.float64) is torch.float64
