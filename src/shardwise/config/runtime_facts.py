"""Facts of the engine or a trainer that a configuration file lacks: the input to resolving "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts for "auto" values; None is unknown.

    Attributes:
        lr, betas, eps, weight_decay: arguments of Adam.
        max_grad_norm: norm to which gradients are clipped, 0 for none.
        micro_batch_size: samples per rank and forward pass.
        gradient_accumulation_steps: micro-batches per step.
        total_num_steps: optimizer steps of the training.
        warmup_num_steps: optimizer steps of the warm-up.
        sequence_parallel_size: from the arguments of `initialize`.
        tensor_parallel_size: from the arguments of `initialize`.
        pipeline_stages: ranks of a pipeline, from the model.
        precision: dtype in which the caller trains.
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
    pipeline_stages: int | None = None
    precision: Literal["fp32", "fp16", "bf16"] | None = None
