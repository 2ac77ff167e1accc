"""Dtypes of computation, communication, accumulation and master weights.

Mixed precision (Micikevicius et al., 2018) computes in 16 bits and keeps fp32 master weights. By default trained fp16
and bf16 parameters have fp32 master weights, and gradients are accumulated and summed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.config import Config

_NAMES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
}

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def parse_dtype(name: str | torch.dtype, key: str = "dtype") -> torch.dtype:
    """Return the floating-point dtype of a name (as in `_NAMES`, in any case, with or without "torch.") or of a dtype.

    Raises:
        ConfigError: the name is unknown, or the type is not floating-point; the message names `key`.

    >>> parse_dtype("bf16"), parse_dtype("torch.half")
    (torch.bfloat16, torch.float16)
    """
    text = str(name).lower().removeprefix("torch.") if isinstance(name, str | torch.dtype) else ""
    if text not in _NAMES:
        raise ConfigError(f"{key}: expected one of {', '.join(_NAMES)}, found {name!r}")
    return _NAMES[text]


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a run; None: each tensor's own.

    Attributes:
        compute_dtype: dtype of parameters in forward and backward.
        wire_dtype: communication dtype of gradients.
        accumulate_dtype: dtype of gradient sums over micro-batches and ranks; fp64 gradients stay fp64.
        buffer_dtype: dtype of floating-point buffers.
        masters: True if fp16 and bf16 parameters have fp32 master weights; else the optimizer steps them directly.
    """

    compute_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    masters: bool = True

    def master_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weights that the optimizer steps; ConfigError: it cannot train such parameters.

        >>> PrecisionPolicy().master_dtype(torch.bfloat16)
        torch.float32
        """
        if param_dtype in _LOW_PRECISION:
            return torch.float32 if self.masters else param_dtype
        if param_dtype in (torch.float32, torch.float64):
            return param_dtype
        trained = ", ".join(str(dtype) for dtype in dict.fromkeys(_NAMES.values()))
        raise ConfigError(
            f"parameters of type {param_dtype} cannot be trained (only {trained}); set requires_grad=False on them or "
            "convert them"
        )

    def accumulation_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of gradient sums of a parameter of `param_dtype`.

        >>> [PrecisionPolicy().accumulation_dtype(dtype) for dtype in (torch.bfloat16, torch.float64)]
        [torch.float32, torch.float64]
        """
        return torch.float64 if param_dtype is torch.float64 else self.accumulate_dtype


def policy_from_config(config: Config) -> PrecisionPolicy:
    """Return the precision policy of a validated configuration.

    fp16.enabled or bf16.enabled sets the compute dtype, else data_types.param_dtype; without it parameters keep their
    own. DeepSpeed's keys for 16-bit master weights and gradients also set the accumulation dtype, unless it is given. A
    name of no floating-point dtype is a ConfigError.
    """
    types = config.data_types
    compute = _optional(types.param_dtype, "data_types.param_dtype")
    accumulate, masters = torch.float32, True
    if config.fp16.enabled:
        compute = torch.float16
        if config.fp16.fp16_master_weights_and_grads:
            accumulate, masters = torch.float16, False
    elif config.bf16.enabled:
        compute = torch.bfloat16
        masters = config.bf16.master_weights == "fp32" and not config.bf16.bf16_master_weights_and_grads
        if config.bf16.bf16_master_weights_and_grads:
            accumulate = torch.bfloat16
    return PrecisionPolicy(
        compute_dtype=compute,
        wire_dtype=_optional(config.communication_data_type, "communication_data_type"),
        accumulate_dtype=_optional(types.grad_accum_dtype, "data_types.grad_accum_dtype") or accumulate,
        buffer_dtype=_optional(types.buffer_dtype, "data_types.buffer_dtype"),
        masters=masters,
    )


def _optional(name: str | None, key: str) -> torch.dtype | None:
    return None if name is None else parse_dtype(name, key)
