"""Names of number types and the policy that a configuration describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.precision import PrecisionPolicy, parse_dtype


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
