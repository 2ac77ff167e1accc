"""Values by rank, sums of them in rank order, and a backend of a process group, for tests of collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.groups import Groups
from shardwise.comm.ledger import Record
from shardwise.comm.native import TorchBackend

RECORD = Record(0, "test", "group", 0, 0, "", "", 0.0, kind="explicit")


def on_group(
    group: dist.ProcessGroup | None = None, *, ordered: bool = False, per_node: int | None = None
) -> TorchBackend:
    """A backend all of whose collectives use one group; None: the default group."""
    used = group if group is not None else dist.group.WORLD
    assert used is not None
    return TorchBackend(Groups(lambda _: used), dist.get_world_size(used), ordered=ordered, per_node=per_node)


COPIED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
OTHERS = [torch.int16, torch.uint32, torch.float8_e4m3fn]
"""Dtypes that neither Gloo nor NCCL, or not every version of it, can send."""
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 3, 17, 1023, 40_001]


def values(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The same random numbers for a (rank, size, dtype, salt) in every process."""
    generator = torch.Generator().manual_seed(1000 * salt + 10 * rank + 1)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def ordered_sum(terms: list[torch.Tensor], dtype: torch.dtype, before: torch.Tensor | None = None) -> torch.Tensor:
    """The sum formed in rank order, rounded to the dtype of the result after each addition, then added to `before`."""
    total = terms[0].to(dtype)
    for term in terms[1:]:
        total = (total + term).to(dtype)
    return total if before is None else before + total
