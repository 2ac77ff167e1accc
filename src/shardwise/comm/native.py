"""The engine's collectives on backends whose own collectives are good (NCCL and torch's fake backend).

The functions mirror `shardwise.comm.gloo`. Sums are formed in the dtype of the output (fp32 as a rule). Where the wire
has another dtype, and with `ordered`, the pieces are exchanged by all-to-all as they are and added in rank order, which
is bit-identical for any number of ranks and sends no more than the wire's bytes; otherwise the backend's
reduce-scatter is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.compat import all_gather_single, launch_together, reduce_scatter_single
from shardwise.device import recording

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


def _launch(op: Callable[..., Any], pairs: Sequence[Pair], group: dist.ProcessGroup) -> list[Any]:
    """Launch `op(output, input)` for each pair; on a recorded device it is written down."""
    recorder = recording.current()
    if recorder is None or not pairs:
        return launch_together(op, pairs, group)
    name = f"{getattr(op, '__name__', 'exchange')} {[own.nbytes for _, own in pairs]}"

    def run() -> None:
        for out, own in pairs:
            # What it would be if all ranks had the same values, but for the sums, which would grow without end.
            parts = max(1, out.numel() // max(1, own.numel()))
            out.copy_(own.repeat(parts)[: out.numel()].view_as(out))

    members = recording.name_of(group.group_name, dist.get_process_group_ranks(group))
    return [recorder.collective(name, pairs, members, run)]


def all_gather(pairs: Sequence[Pair], group: dist.ProcessGroup) -> Works:
    """Gather each 1-D `shard` (S elements) into its 1-D `full` (world * S elements), rank-major."""
    return Works(_launch(all_gather_single, [pair for pair in pairs if pair[0].numel()], group))


def reduce_scatter(
    pairs: Sequence[Pair], group: dist.ProcessGroup, *, accumulate: bool = False, ordered: bool = False
) -> Works:
    """Set (or add to) each `out` (S elements) the sum over ranks of this rank's range of `full`."""
    world = dist.get_world_size(group)
    reductions: list[Pair] = []
    exchanges: list[Pair] = []
    sums: list[Callable[[], None]] = []
    for out, full in pairs:
        if not full.numel():
            continue
        if ordered or full.dtype != out.dtype:
            received = torch.empty_like(full)
            exchanges.append((received, full))
            sums.append(_adder(out, received.view(world, -1), accumulate))
        elif accumulate:
            total = torch.empty_like(out)
            reductions.append((total, full))
            sums.append(_adder(out, total.view(1, -1), accumulate))
        else:
            reductions.append((out, full))

    def finish() -> None:
        for add_up in sums:
            add_up()

    works = _launch(reduce_scatter_single, reductions, group)
    works += _launch(dist.all_to_all_single, exchanges, group)
    made = [received for received, _ in exchanges] + ([total for total, _ in reductions] if accumulate else [])
    return Works(works, finish, made)


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
    works = _launch(all_gather_single, [(gathered, tensor.reshape(-1))], group)

    def add_up() -> None:
        # One kernel for any number of ranks. Its order of summation depends on the shape only: all ranks get the same.
        tensor.copy_(gathered.view(world, -1).sum(0, dtype=tensor.dtype).view_as(tensor))

    return Works(works, add_up)


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Works:
    """Copy a tensor from group rank `src` to all ranks."""
    return Works(_launch(lambda out, _, **how: dist.broadcast(out, group_src=src, **how), [(tensor, tensor)], group))


def all_to_all(
    output: torch.Tensor,
    given: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Works:
    """Send the r-th part of `given` to rank r and receive the r-th part of `output` from it; sizes may be zero."""
    sizes = list(output_sizes), list(input_sizes)

    def exchange(out: torch.Tensor, own: torch.Tensor, **how: Any) -> Any:
        return dist.all_to_all_single(out, own, *sizes, **how)

    return Works(_launch(exchange, [(output, given)], group))
