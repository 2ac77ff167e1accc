"""The engine's collectives on backends whose own collectives are good (NCCL and torch's fake backend).

The functions mirror `shardwise.comm.gloo`. Sums are formed in the dtype of the output (fp32 as a rule), in one of two
ways:

* exchange: the pieces go to their owner by all-to-all as they are, and it adds them in rank order, which is
  bit-identical for any number of ranks;
* the backend's reduce-scatter, for which a narrower wire is widened first.

Where the dtypes are the same the backend's is used, unless the order is asked for. Of 16-bit gradients and fp32 sums
the exchange sends half the bytes of each rank, and within a node that decides. Between nodes it is bytes of a node that
count: in an exchange each of its ranks sends all other nodes their parts, while the backend adds up within the node
and sends each sum about once. So the exchange is left where it would send more; see `exchanges`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.compat import all_gather_single, launch_together, reduce_scatter_single
from shardwise.device import recording
from shardwise.device.summing import sum_rows

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


_thread = threading.local()


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Launch the collectives of this thread on the current stream inside of the block; the caller waits for each."""
    before, _thread.in_order = getattr(_thread, "in_order", False), True
    try:
        yield
    finally:
        _thread.in_order = before


def _launch(op: Callable[..., Any], pairs: Sequence[Pair], group: dist.ProcessGroup) -> list[Any]:
    """Launch `op(output, input)` for each pair; on a recorded device it is written down."""
    recorder = recording.current()
    if recorder is None or not pairs:
        return launch_together(op, pairs, group, async_op=not getattr(_thread, "in_order", False))
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


def exchanges(wire: torch.dtype, total: torch.dtype, world: int, per_node: int) -> bool:
    """Whether pieces are exchanged, by the bytes that leave a node, rather than widened and reduced by the backend.

    With M elements, W ranks, G of them on each node: an exchange sends G * M * (W - G) / W of the wire's dtype, the
    backend about M of the sum's. For bf16, fp32 and 8 ranks a node the exchange sends twice as much between 2 nodes and
    nearly four times between many; with up to 2 ranks a node, and within one node, it never sends more.

    Args:
        wire: dtype of what is reduced.
        total: dtype of the sums.
        world: number of ranks.
        per_node: ranks of the group on a node.
    """
    if wire is total:
        return False
    # The backend would round what is wider than its sum before it is added.
    fewer = per_node * (world - per_node) * wire.itemsize <= world * total.itemsize
    return fewer or wire.itemsize >= total.itemsize


def reduce_scatter(
    pairs: Sequence[Pair],
    group: dist.ProcessGroup,
    *,
    accumulate: bool = False,
    ordered: bool = False,
    per_node: int | None = None,
) -> Works:
    """Set (or add to) each `out` (S elements) the sum over ranks of this rank's range of `full`.

    Args:
        pairs: 1-D `out` and `full`.
        group: the ranks.
        accumulate: add to `out` instead of replacing it.
        ordered: add in rank order, whatever it costs.
        per_node: how many ranks of the group share a node; None: all.
    """
    world = dist.get_world_size(group)
    reductions: list[Pair] = []
    received: list[Pair] = []
    sums: list[Callable[[], Any]] = []
    pairs = [pair for pair in pairs if pair[1].numel()]
    buffers = buffers_for(pairs, world, accumulate=accumulate, ordered=ordered, per_node=per_node or world)
    for (out, full), (rows, given, total) in zip(pairs, buffers, strict=True):
        if rows is not None:
            received.append((rows, full))
            sums.append(functools.partial(sum_rows, out, rows.view(world, -1), accumulate=accumulate))
            continue
        if total is not None:
            sums.append(functools.partial(out.add_, total))
        reductions.append((out if total is None else total, full if given is None else given))

    def finish() -> None:
        for add_up in sums:
            add_up()

    works = _launch(reduce_scatter_single, reductions, group)
    works += _launch(dist.all_to_all_single, received, group)
    return Works(works, finish, [buffer for made in buffers for buffer in made if buffer is not None])


Buffers = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of one reduction: rows that arrive from all ranks; what is given in the dtype of the sum; the sum to be added."""


def buffers_for(pairs: Sequence[Pair], world: int, *, accumulate: bool, ordered: bool, per_node: int) -> list[Buffers]:
    """Return what each reduction takes for itself; None: nothing is needed. Arguments as of `reduce_scatter`."""
    made: list[Buffers] = []
    for out, full in pairs:
        if ordered or exchanges(full.dtype, out.dtype, world, per_node):
            made.append((torch.empty_like(full), None, None))
        else:
            given = None if full.dtype is out.dtype else full.to(out.dtype)
            made.append((None, given, torch.empty_like(out) if accumulate else None))
    return made


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum a small tensor over ranks, in place: the same bits on every rank."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    works = _launch(all_gather_single, [(gathered, tensor.reshape(-1))], group)

    def add_up() -> None:
        # One kernel for any number of ranks. Its order of summation depends on the shape only: all ranks get the same.
        tensor.copy_(gathered.view(world, -1).sum(0, dtype=tensor.dtype).view_as(tensor))

    return Works(works, add_up)


def sum_in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum a tensor over ranks with the backend's own all-reduce: the same bits on every rank."""
    return Works(_launch(lambda out, _, **how: dist.all_reduce(out, **how), [(tensor, tensor)], group))


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
