"""What the engine or a trainer knows and a configuration file does not: the input to resolving "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that "auto" values are derived from. Anything left at None is unknown.

    Attributes:
        lr: learning rate.
        betas: Adam's two decay rates.
        eps: Adam's epsilon.
        weight_decay: weight decay.
        max_grad_norm: norm to which gradients are clipped, 0 for none.
        micro_batch_size: samples per rank and forward pass.
        gradient_accumulation_steps: micro-batches per step.
        total_num_steps: optimizer steps of the whole run.
        warmup_num_steps: optimizer steps of the warm-up.
        sequence_parallel_size: ranks that share a sequence, by what is not in the configuration (arguments of
            `initialize`).
        tensor_parallel_size: ranks that have a copy of the model among them, likewise.
        precision: the type that the caller trains in.
    """

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    sequence_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    precision: Literal["fp32", "fp16", "bf16"] | None = None
