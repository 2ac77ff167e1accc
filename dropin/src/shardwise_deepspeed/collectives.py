"""Collectives of `deepspeed.comm` under their names there, which differ in `shardwise.comm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shardwise.comm import api
from shardwise.comm.api import Group
from shardwise.comm.api import is_initialized as is_initialized
from shardwise.comm.logger import bandwidths
from shardwise.units import format_size


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    """Gather equally shaped tensors of all ranks into one, rank-major (`all_gather_into_tensor`)."""
    return api.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Reduce a tensor over ranks; rank r keeps its r-th part (`reduce_scatter_tensor`)."""
    return api.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof=prof)


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str | None = None,
    debug: Any = None,
) -> Any:
    """Reduce a tensor over ranks, in place (`all_reduce`)."""
    return api.all_reduce(tensor, op, group, async_op, prof=prof, log_name=log_name or "inference_all_reduce")


def has_all_gather_into_tensor() -> bool:
    """Return True."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Return False: the engine coalesces its collectives itself."""
    return False


class _All:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:  # else this rank is outside the group
                work.wait()


def _all(works: list[Any], async_op: bool) -> _All | None:
    together = _All(works)
    if async_op:
        return together
    together.wait()
    return None


def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Group = None, async_op: bool = False
) -> Any:
    """Gather each of several tensors of all ranks into one, rank-major."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _all([api.all_gather_into_tensor(output, given, group, True) for output, given in pairs], async_op)


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce each of several tensors over ranks, in place."""
    return _all([api.all_reduce(tensor, op, group, True) for tensor in tensors], async_op)


batch_isend_irecv = dist.batch_isend_irecv  # which the communication log does not record


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[int, float, float]:
    """Return (message bytes, algorithm bandwidth, bus bandwidth in Gbit/s) of a collective on all ranks. `size` is in
    bytes, of one rank's shard for all-gather and reduce-scatter; `duration` in milliseconds.
    """
    world = api.get_world_size()
    if comm_op.startswith(("all_gather", "reduce_scatter")):
        size *= world
    return (size, *bandwidths(comm_op, size, duration / 1e3, world))


def convert_size(size_bytes: int) -> str:
    """Return a number of bytes as text.

    >>> convert_size(4096)
    '4.00 KB'
    """
    return format_size(size_bytes).replace("iB", "B")  # as DeepSpeed names units of 1024
