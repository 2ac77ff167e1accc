"""Comparing what ranks pass to the collectives of `shardwise.comm`, before they begin (the key `strict_sync`).

torch does not compare: of tensors of different shapes Gloo aborts the process, and NCCL waits or returns wrong values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.ledger import user_line
from shardwise.comm.stall_report import ranks_in_words
from shardwise.compat import all_gather_single, backend_of
from shardwise.errors import DesyncError

_TEXT = 1024
"""Bytes of a call that are shown."""

_compares = False


def compare_calls(on: bool) -> None:
    """Have each collective of `shardwise.comm` compared over its group, which costs one small one more, or not."""
    global _compares
    _compares = on


def check_call(
    name: str, tensors: torch.Tensor | Sequence[torch.Tensor] | None, group: Any, rest: Mapping[str, Any]
) -> None:
    """Raise if ranks of a group have not all called the same collective with the same arguments.

    Args:
        name: of the collective.
        tensors: those that have the same shapes and dtypes on all ranks; None: none has.
        group: all its ranks call.
        rest: the other arguments that are the same on all ranks, such as the operation of a reduction.

    Raises:
        DesyncError: on every rank, with what each has called and where.
    """
    if not _compares or dist.get_world_size(group) == 1 or dist.get_rank(group) < 0:
        return
    given = [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else tensors
    said = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in given]
    said += [f"{argument}={str(value).rpartition('.')[2]}" for argument, value in rest.items()]
    call = f"{name}({', '.join(said)})"
    if len(set(_gathered(hashlib.sha256(call.encode()).digest(), group))) == 1:
        return
    texts = _gathered(f"{call} at {user_line()}".encode()[:_TEXT].ljust(_TEXT, b"\0"), group)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    alike: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        alike.setdefault(text.rstrip(b"\0").decode(errors="replace"), []).append(rank)
    table = [f"  {ranks_in_words(alike[text])}: {text}" for text in alike]
    raise DesyncError(
        "\n".join(["strict_sync: the ranks have called different collectives:", *table])
        + "\nEvery rank of the group has to call the same, in the same order, with the same arguments and tensors of "
        "the same shape and dtype."
    )


def _gathered(own: bytes, group: Any) -> list[bytes]:
    """Return the bytes of all ranks, as many from each; nothing of them is run or parsed."""
    cpu = torch.device("cpu")
    device = cpu if backend_of(group, cpu) else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    rows = torch.empty(dist.get_world_size(group) * len(own), dtype=torch.uint8, device=device)
    all_gather_single(rows, mine, group=group)
    return [bytes(row.tolist()) for row in rows.cpu().view(-1, len(own))]
