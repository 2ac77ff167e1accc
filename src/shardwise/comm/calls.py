"""Comparing what ranks pass to the collectives of `shardwise.comm`, before they begin (the key `strict_sync`).

torch does not compare: of tensors of different shapes Gloo aborts the process, and NCCL waits or returns wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.ledger import user_line
from shardwise.errors import DesyncError

_compares = False


def compare_calls(on: bool) -> None:
    """Have each collective of `shardwise.comm` compared over its group, which costs two small ones more, or not."""
    global _compares
    _compares = on


def check_call(name: str, tensors: torch.Tensor | Sequence[torch.Tensor] | None, group: Any) -> None:
    """Raise if ranks of a group have not all called the same collective with tensors of the same shapes and dtypes.

    Args:
        name: of the collective.
        tensors: what is alike on all ranks; None: nothing is.
        group: all its ranks call.

    Raises:
        DesyncError: on every rank, with what each has called and where.
    """
    if not _compares or dist.get_world_size(group) == 1 or dist.get_rank(group) < 0:
        return
    given = [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else tensors
    shapes = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in given)
    own = [f"{name}({shapes})", user_line()]
    calls: list[Any] = [own] * dist.get_world_size(group)
    dist.all_gather_object(calls, own, group)
    if len({call for call, _ in calls}) == 1:
        return
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    table = [f"  rank {rank}: {call} at {line}" for rank, (call, line) in zip(ranks, calls, strict=True)]
    raise DesyncError(
        "\n".join(["strict_sync: the ranks have called different collectives:", *table])
        + "\nEvery rank of the group has to call the same, in the same order, with tensors of the same shape and dtype."
    )
