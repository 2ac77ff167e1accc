"""The engine's collectives on backends whose own collectives are good (NCCL and torch's fake backend).

The functions mirror `shardwise.comm.gloo`. Sums are formed in the dtype of the output (fp32 as a rule): with `ordered`
the pieces are exchanged by all-to-all and added in rank order, which is bit-identical for any number of ranks;
otherwise the backend's reduce-scatter is used, on a wire that is first widened to the output's dtype where it is
narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.compat import all_gather_single, reduce_scatter_single


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
        self._done = False

    def is_completed(self) -> bool:
        """Whether `wait()` would not block on communication."""
        return self._done or all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait (on CUDA: make the current stream wait) and do the local rest; later calls do nothing."""
        if self._done:
            return
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self._done, self.scratch = [], None, True, ()


def all_gather(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup) -> Works:
    """Gather each 1-D `shard` (S elements) into its 1-D `full` (world * S elements), rank-major."""
    return Works([all_gather_single(full, shard, group=group, async_op=True) for full, shard in pairs if full.numel()])


def reduce_scatter(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    group: dist.ProcessGroup,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    ordered: bool = False,
) -> Works:
    """Set (or add to) each `out` (S elements) `scale` times the sum over ranks of this rank's range of `full`."""
    world = dist.get_world_size(group)
    works: list[dist.Work | None] = []
    ends: list[Callable[[], None]] = []
    scratch: list[torch.Tensor] = []
    for out, full in pairs:
        if not full.numel():
            continue
        if ordered:
            received = torch.empty_like(full)
            scratch.append(received)
            works.append(dist.all_to_all_single(received, full, group=group, async_op=True))

            def add_up(out: torch.Tensor = out, received: torch.Tensor = received) -> None:
                pieces = received.view(world, -1)
                total = pieces[0].to(out.dtype, copy=True)
                for piece in pieces[1:]:
                    total.add_(piece)
                _store(out, total, scale, accumulate)

            ends.append(add_up)
        else:
            wire = full.to(out.dtype)
            total = torch.empty_like(out)
            scratch.extend([total] if wire is full else [total, wire])
            works.append(reduce_scatter_single(total, wire, group=group, async_op=True))

            def store(out: torch.Tensor = out, total: torch.Tensor = total, wire: torch.Tensor = wire) -> None:
                _store(out, total, scale, accumulate)

            ends.append(store)

    def finish() -> None:
        for end in ends:
            end()

    return Works(works, finish, scratch)


def _store(out: torch.Tensor, total: torch.Tensor, scale: float, accumulate: bool) -> None:
    if scale != 1.0:
        total.mul_(scale)
    if accumulate:
        out.add_(total)
    else:
        out.copy_(total)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Sum a small tensor over ranks, in place and in rank order."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = all_gather_single(gathered, tensor.reshape(-1), group=group, async_op=True)

    def add_up() -> None:
        pieces = gathered.view(world, -1)
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total.add_(piece)
        tensor.copy_(total.view_as(tensor))

    return Works([work], add_up)


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Works:
    """Copy a tensor from group rank `src` to all ranks."""
    return Works([dist.broadcast(tensor, group_src=src, group=group, async_op=True)])


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Works:
    """Send `inputs[r]` to rank r and receive `outputs[r]` from it; sizes may differ and be zero."""
    received = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype, device=outputs[0].device)
    sent = torch.cat([t.reshape(-1) for t in inputs])
    sizes_in, sizes_out = [t.numel() for t in inputs], [t.numel() for t in outputs]
    work = dist.all_to_all_single(received, sent, sizes_out, sizes_in, group=group, async_op=True)

    def unpack() -> None:
        for output, piece in zip(outputs, received.split(sizes_out), strict=True):
            output.copy_(piece.view_as(output))

    return Works([work], unpack)
