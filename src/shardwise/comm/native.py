"""The engine's collectives on backends whose own collectives are good (NCCL and torch's fake backend).

The functions mirror `shardwise.comm.gloo`. Sums are formed in the dtype of the output (fp32 as a rule). Where the wire
has another dtype, and with `ordered`, the pieces are exchanged by all-to-all as they are and added in rank order, which
is bit-identical for any number of ranks and sends no more than the wire's bytes; otherwise the backend's
reduce-scatter is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.compat import all_gather_single, launch_together, reduce_scatter_single

Pair = tuple[torch.Tensor, torch.Tensor]


class Works:
    """Several `torch.distributed.Work` objects and what is to be done after them, behind one `wait()`.

    Attributes:
        scratch: buffers made for the collective; `wait()` gives them back.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], None] | None = None,
        scratch: Sequence[torch.Tensor] = (),
    ) -> None:
        self.scratch = scratch
        self._works = [work for work in works if work is not None]
        self._finish = finish

    def wait(self) -> None:
        """Wait (on CUDA: make the current stream wait) and do the local rest; later calls do nothing."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self.scratch = [], None, ()


def all_gather(pairs: Sequence[Pair], group: dist.ProcessGroup) -> Works:
    """Gather each 1-D `shard` (S elements) into its 1-D `full` (world * S elements), rank-major."""
    return Works(launch_together(all_gather_single, [pair for pair in pairs if pair[0].numel()], group))


def reduce_scatter(
    pairs: Sequence[Pair], group: dist.ProcessGroup, *, accumulate: bool = False, ordered: bool = False
) -> Works:
    """Set (or add to) each `out` (S elements) the sum over ranks of this rank's range of `full`."""
    world = dist.get_world_size(group)
    reductions: list[Pair] = []
    exchanges: list[Pair] = []
    sums: list[Callable[[], None]] = []
    pairs = [pair for pair in pairs if pair[1].numel()]
    buffers = buffers_for(pairs, accumulate, ordered)
    for (out, full), made in zip(pairs, buffers, strict=True):
        if made is None:
            reductions.append((out, full))
        elif _exchanged(out, full, ordered):
            exchanges.append((made, full))
            sums.append(_adder(out, made.view(world, -1), accumulate))
        else:
            reductions.append((made, full))
            sums.append(_adder(out, made.view(1, -1), accumulate))

    def finish() -> None:
        for add_up in sums:
            add_up()

    works = launch_together(reduce_scatter_single, reductions, group)
    works += launch_together(dist.all_to_all_single, exchanges, group)
    return Works(works, finish, [made for made in buffers if made is not None])


def buffers_for(pairs: Sequence[Pair], accumulate: bool, ordered: bool) -> list[torch.Tensor | None]:
    """Return memory for the pieces or the sum that each reduction receives; None: it is received where it belongs."""
    return [
        torch.empty_like(full) if _exchanged(out, full, ordered) else torch.empty_like(out) if accumulate else None
        for out, full in pairs
    ]


def _exchanged(out: torch.Tensor, full: torch.Tensor, ordered: bool) -> bool:
    """Whether pieces are exchanged, and added up here."""
    return ordered or full.dtype != out.dtype


def _adder(out: torch.Tensor, pieces: torch.Tensor, accumulate: bool) -> Callable[[], None]:
    """Return what sets (or adds to) `out` the sum of the rows, formed in order and in the dtype of `out`."""

    def add_up() -> None:
        first, *others = pieces.unbind()
        if not accumulate:
            total = out.copy_(first)
        elif others or first.dtype != out.dtype:
            total = first.to(out.dtype, copy=True)
        else:
            total = first
        for piece in others:
            total.add_(piece)
        if accumulate:
            out.add_(total)

    return add_up


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum a small tensor over ranks, in place: the same bits on every rank."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = all_gather_single(gathered, tensor.reshape(-1), group=group, async_op=True)

    def add_up() -> None:
        # One kernel for any number of ranks. Its order of summation depends on the shape only: all ranks get the same.
        tensor.copy_(gathered.view(world, -1).sum(0, dtype=tensor.dtype).view_as(tensor))

    return Works([work], add_up)


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Works:
    """Copy a tensor from group rank `src` to all ranks."""
    return Works([dist.broadcast(tensor, group_src=src, group=group, async_op=True)])


def all_to_all(
    output: torch.Tensor,
    given: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Works:
    """Send the r-th part of `given` to rank r and receive the r-th part of `output` from it; sizes may be zero."""
    work = dist.all_to_all_single(output, given, list(output_sizes), list(input_sizes), group=group, async_op=True)
    return Works([work])
