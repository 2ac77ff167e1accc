"""Configuration of `init_inference`: every documented key, its other spellings, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise import errors
from shardwise.errors import ConfigError
from shardwise.inference.config import InferenceConfig, read_config, rows_of
from tests.harness.tables import tables

TABLES = tables(__file__)
DOCUMENTED = {**TABLES["documented"], "dtype": torch.bfloat16}


def test_every_documented_key_is_read() -> None:
    found = read_config(DOCUMENTED)
    assert found.replace_with_kernel_inject and found.tensor_parallel.tp_size == 2 and found.max_out_tokens == 64
    assert found.dtype == "bf16" and found.bits is not None and found.bits.num_bits == 8
    assert read_config(found, dtype="bf16") == found
    assert shardwise.default_inference_config() == InferenceConfig().model_dump()


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("half", "fp16"), (torch.half, "fp16"), ("torch.bfloat16", "bf16"), (torch.int8, "int8"), ("fp32", "fp32")],
)
def test_dtypes(spelling: Any, dtype: str) -> None:
    assert read_config(dtype=spelling).dtype == dtype


def test_old_keys_and_booleans_stand_for_sections() -> None:
    found = read_config({"moe": True}, mp_size=4, ep_size=2, moe_experts=8)
    assert (found.tensor_parallel.tp_size, found.moe.ep_size, found.moe.moe_experts) == (4, 2, [8])
    assert read_config(mp_size=2, tensor_parallel={"tp_size": 2}).tensor_parallel.tp_size == 2
    policy = {torch.nn.Linear: ("self_attn.o_proj", "mlp.down_proj"), torch.nn.Embedding: "fc2"}
    assert rows_of(read_config(injection_policy=policy)) == ["self_attn.o_proj", "mlp.down_proj", "fc2"]


@pytest.mark.parametrize(
    ("given", "kwargs", "error", "message"),
    [
        *TABLES["refused"],
        ({"injection_policy": {int: object}}, {}, "ConfigError", "expected names of layers"),
    ],
)
def test_refusals(given: Any, kwargs: Any, error: str, message: str) -> None:
    with pytest.raises(getattr(errors, error), match=message):
        rows_of(read_config(given, **kwargs))


def test_stages_that_divide_state_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero.stage is 2: .*Write 3"):
        shardwise.init_inference(torch.nn.Linear(2, 2), zero={"stage": 2})
