"""Configuration of `init_inference`: every documented key, its other spellings, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import ConfigError, ConflictError
from shardwise.inference.config import InferenceConfig, read_config, rows_of

DOCUMENTED: dict[str, Any] = {
    "kernel_inject": True,
    "dtype": torch.bfloat16,
    "tp": {"enabled": True, "tp_size": 2, "tp_grain_size": 64, "mpu": None, "tp_group": None},
    "enable_cuda_graph": False,
    "use_triton": False,
    "triton_autotune": False,
    "zero": {},
    "tm": True,
    "moe": {
        "enabled": True,
        "ep_size": 1,
        "num_experts": [1],
        "type": "standard",
        "ep_mp_group": None,
        "ep_group": None,
    },
    "keep_module_on_host": False,
    "quant": {
        "enabled": True,
        "activation": {"enabled": False, "num_bits": 8, "q_type": "symmetric", "q_groups": 1},
        "weight": {"enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1},
        "qkv": {"enabled": True},
    },
    "checkpoint": None,
    "base_dir": "",
    "set_empty_params": False,
    "save_mp_checkpoint_path": None,
    "ckpt_config": {"checkpoint_dir": None, "save_mp_checkpoint_path": None, "base_dir": ""},
    "return_tuple": True,
    "training_mp_size": 1,
    "replace_method": "auto",
    "injection_dict": None,
    "injection_policy_tuple": None,
    "args": None,
    "max_tokens": 64,
    "min_tokens": 1,
    "transposed_mode": False,
}


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
        ({"dtype": "fp16"}, {"dtype": "bf16"}, ConflictError, "dtype: has two values, 'fp16' and 'bf16'"),
        ({"tp": {"tp_size": 2}}, {"mp_size": 4}, ConflictError, "tensor_parallel.tp_size: has two values, 2 and 4"),
        ({"max_tokens": 4, "max_out_tokens": 5}, {}, ConflictError, "max_out_tokens: has two values"),
        ({"dtpye": "fp16"}, {}, ConfigError, "dtpye: unknown key; did you mean 'dtype'"),
        ({"tensor_parallel": {"tp_sise": 2}}, {}, ConfigError, "tensor_parallel.tp_sise: unknown key; .*'tp_size'"),
        ({"dtype": "fp8"}, {}, ConfigError, "dtype: .*'fp32', 'fp16', 'bf16' or 'int8', found 'fp8'"),
        ({"max_out_tokens": "many"}, {}, ConfigError, "max_out_tokens: .*found 'many'"),
        ({"enable_cuda_graph": True}, {}, ConfigError, 'enable_cuda_graph: .*mode="reduce-overhead"'),
        ({"quant": {"activation": {"enabled": True}}}, {}, ConfigError, "quant.activation.enabled: only weights"),
        ({"save_mp_checkpoint_path": "here"}, {}, ConfigError, "each rank reads its part"),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}, {}, ConflictError, "num_bits is 4, and dtype int8"),
        ({"dtype": "int8", "quant": {"enabled": False}}, {}, ConflictError, 'quant has "enabled": false'),
        ({"dtype": "int8", "zero": {"stage": 3}}, {}, ConflictError, "streamed weights cannot be quantised"),
        ({"zero": {"offload_param": {}}}, {}, ConfigError, 'zero: without "stage": 3, offload_param would do nothing'),
        ({"zero": {"stage": 0, "stgae": 3}}, {}, ConfigError, "zero: without .*stage, stgae would do nothing"),
        ({"aio": {"block_size": 4096}}, {}, ConfigError, 'aio: .*Add zero with "stage": 3'),
        ({"checkpoint": "a", "ckpt_config": {"checkpoint_dir": "b"}}, {}, ConflictError, "checkpoint: has two values"),
        ({"injection_policy": {int: object}}, {}, ConfigError, "expected names of layers"),
    ],
)
def test_refusals(given: Any, kwargs: Any, error: type[ConfigError], message: str) -> None:
    with pytest.raises(error, match=message):
        rows_of(read_config(given, **kwargs))


def test_stages_that_divide_state_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero.stage is 2: .*Write 3"):
        shardwise.init_inference(torch.nn.Linear(2, 2), zero={"stage": 2})
