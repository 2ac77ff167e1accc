"""The methods of gradient compression by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.compression.base import Compressor
from shardwise.comm.compression.powersgd import PowerSGD
from shardwise.comm.compression.quantized import in_blocks
from shardwise.comm.compression.sparse import DGC, TopK
from shardwise.config.gradient_compression import method_parameters

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config

METHODS: dict[str, Callable[[Any, Communicator, Callable[[torch.Tensor], None]], Compressor]] = {
    "powerSGD": PowerSGD,
    "topk": TopK,
    "dgc": DGC,
    "int8": partial(in_blocks, 8),
    "int4": partial(in_blocks, 4),
}
"""By `compression.type`; `shardwise.config.schema.gradients.METHODS` has the parameters."""


def build(config: Config, comm: Communicator, hold: Callable[[torch.Tensor], None]) -> Compressor | None:
    """Return the configured method, or None for exact reduction; `hold` counts a buffer until it is released."""
    name, parameters = config.compression.method, method_parameters(config)
    return None if name is None or comm.world == 1 else METHODS[name](parameters, comm, hold)
