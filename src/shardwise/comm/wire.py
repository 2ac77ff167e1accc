"""Point-to-point messages of one exchange between ranks, and the arithmetic on what arrives.

The parts that the algorithms in `shardwise.comm.gloo` are made of: `Wire` launches messages and, for
algorithms that pass data on, runs a thread; `Pending` is the handle that the caller waits for; `sum_in_order`
adds pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.errors import PeerLostError, UsageError

_ROUNDING_S = 0.005
"""Gloo counts in whole milliseconds: a wait may end this much before its limit."""

CPU = torch.device("cpu")
"""Where messages are made: said each time, because scripts choose other default devices."""

SUM_CHUNK = 1 << 18
"""Elements that are added at a time. From 2 to 8 pieces, fp32 and bf16, smaller chunks cost calls (1 << 15 is
1.5 times slower) and larger ones leave the cache where a conversion or `accumulate` needs scratch memory."""


class Pending:
    """A launched exchange.

    Attributes:
        scratch: buffers that the exchange has made for itself; `wait()` gives them back.
    """

    def __init__(self, wire: Wire, scratch: Sequence[torch.Tensor] = ()) -> None:
        self.scratch = scratch
        self._wire: Wire | None = wire
        self._after: list[Callable[[], None]] = []
        self._error: PeerLostError | None = None

    def then(self, local_work: Callable[[], None]) -> Pending:
        """Have `wait()` call `local_work` after the messages have arrived; return self."""
        self._after.append(local_work)
        return self

    def wait(self) -> None:
        """Block until all messages are sent and received, then do the local rest; later calls do nothing.

        Raises:
            PeerLostError: a peer left, or did not answer within the group's limit (again on every later call).
        """
        if self._error is not None:
            raise self._error
        if self._wire is None:
            return
        try:
            self._wire.wait()
        except PeerLostError as error:
            self._error, self._wire, self._after, self.scratch = error, None, [], ()
            raise
        for local_work in self._after:
            local_work()
        self._wire, self._after, self.scratch = None, [], ()  # frees the receive buffers


class Message:
    """One message under way to or from `peer`."""

    def __init__(self, peer: int, work: dist.Work) -> None:
        self.peer = peer
        self._work: dist.Work | None = work

    def wait(self, limit: timedelta | None) -> None:
        """Wait until it is sent or received; later calls do nothing (Gloo's own would never return).

        Args:
            limit: how long; None is the group's own limit.
        """
        work, self._work = self._work, None
        if work is None:
            return
        if limit is None:
            work.wait()
        else:
            work.wait(limit)


class Deadline:
    """When the waits of one exchange end: its messages share one limit, however many there are."""

    def __init__(self, limit: timedelta | None) -> None:
        self.limit = limit
        self._end = None if limit is None else time.monotonic() + limit.total_seconds()

    def left(self) -> timedelta | None:
        """Return the time that is left, at least a millisecond (Gloo takes 0 for no limit); None without a limit."""
        return None if self._end is None else timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    def over(self) -> bool:
        """Whether a wait that has failed now has failed because the time is up."""
        return self._end is not None and time.monotonic() > self._end - _ROUNDING_S


def deadline_of(group: dist.ProcessGroup) -> Deadline:
    """Return when waiting that begins now must end in a group."""
    return Deadline(compat.timeout_of(group, CPU))


class Wire:
    """The messages of one exchange, and the thread that passes data on where one is needed.

    Raises:
        UsageError: this rank is not a member of the group.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, tag: int) -> None:
        self.op = op
        self.tag = tag
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError(f"{op}: rank {dist.get_rank()} is not a member of the process group it was given")
        self._messages: list[Message] = []
        self._thread: threading.Thread | None = None
        self._thread_deadline = Deadline(None)
        self._thread_error: BaseException | None = None

    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all ranks send to rank 0 first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Launch a message; an empty one is left out, as its receiver leaves it out."""
        if tensor.numel():
            self._launch(compat.send, tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Message | None:
        """Launch the receipt of a message into `tensor`; None if it is empty."""
        return self._launch(compat.receive, tensor, peer) if tensor.numel() else None

    def _launch(self, call: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> Message:
        try:
            work = call(tensor, self.group, peer, self.tag)
        except RuntimeError as error:
            raise self._lost(peer) from error
        assert work is not None  # None is for ranks outside the group, which the constructor refuses
        message = Message(peer, work)
        self._messages.append(message)
        return message

    def relay(self, steps: Callable[[], None]) -> None:
        """Run `steps`, which wait for messages and send others, in a thread; the limit holds for all of them."""
        self._thread_deadline = deadline_of(self.group)

        def run() -> None:
            try:
                steps()
            except BaseException as error:
                self._thread_error = error

        self._thread = threading.Thread(target=run, name=f"shardwise-{self.op}", daemon=True)
        self._thread.start()

    def wait_for(self, message: Message | None) -> None:
        """Wait for one message, in the thread; None is an empty one."""
        self._wait_until(self._thread_deadline, message)

    def _wait_until(self, deadline: Deadline, message: Message | None) -> None:
        if message is None:
            return
        try:
            message.wait(deadline.left())
        except RuntimeError as error:
            raise self._lost(message.peer, deadline) from error

    def wait(self) -> None:
        """Wait for the thread and all messages."""
        if self._thread is not None:
            self._thread.join()
            if self._thread_error is not None:
                raise self._thread_error
        deadline = deadline_of(self.group)
        for message in self._messages:
            self._wait_until(deadline, message)

    def _lost(self, peer: int, deadline: Deadline | None = None) -> PeerLostError:
        limit = deadline.limit if deadline is not None and deadline.over() else None
        return lost(self.op, self.tag, self.rank, self.world, peer, limit)


def lost(op: str, tag: int, rank: int, world: int, peer: int, limit: timedelta | None = None) -> PeerLostError:
    """Return the error for an exchange that a peer has not taken part in.

    Args:
        op, tag: of the exchange.
        rank, world: who has waited.
        peer: for whom.
        limit: the time that is over; None if the peer has ended.
    """
    if limit is not None:
        why = f"has not heard from rank {peer} of its group within {limit.total_seconds():g} s"
    else:
        why = f"lost rank {peer} of its group: it has ended or lost its connection"
    error = PeerLostError(
        f"rank {rank} of {world}: {op} (tag {tag}) {why}.\n"
        f"The cause is on rank {peer}, or on a rank that it was waiting for: see their output."
    )
    error.peer, error.timed_out = peer, limit is not None
    return error


def check_flat(tensor: torch.Tensor, what: str, op: str) -> torch.Tensor:
    """Return the tensor if it is contiguous and on the CPU, as a message must be.

    Raises:
        UsageError: it is not.
    """
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor
    kind = "contiguous" if tensor.is_contiguous() else "not contiguous"
    raise UsageError(
        f"{op}: {what} must be a contiguous CPU tensor; found shape {tuple(tensor.shape)} on {tensor.device}, {kind}"
    )


class Place(Protocol):
    """An exchange, as its checks need it."""

    op: str
    rank: int
    world: int


def split_by_rank(full: torch.Tensor, piece: torch.Tensor, wire: Place) -> Sequence[torch.Tensor]:
    """Return the views of 1-D `full` that belong to each rank; `piece` is this rank's counterpart.

    Raises:
        UsageError: the sizes do not fit, or `piece` overlaps `full` elsewhere than at this rank's place.
    """
    check_flat(full, "full", wire.op)
    check_flat(piece, "shard", wire.op)
    size = piece.numel()
    if full.dim() != 1 or piece.dim() != 1 or full.numel() != wire.world * size:
        raise UsageError(
            f"{wire.op}: {wire.world} ranks and a 1-D shard of {size} elements need a 1-D full tensor of "
            f"{wire.world * size}; found shapes {tuple(full.shape)} and {tuple(piece.shape)}"
        )
    parts = full.view(wire.world, size).unbind()
    start, end = full.data_ptr(), full.data_ptr() + full.nbytes
    if size and piece.data_ptr() < end and piece.data_ptr() + piece.nbytes > start:
        own = parts[wire.rank]
        if piece.data_ptr() != own.data_ptr() or piece.dtype != own.dtype:
            raise UsageError(
                f"{wire.op}: the shard of rank {wire.rank} overlaps the full tensor at byte "
                f"{piece.data_ptr() - start}; it may only be the rank's own range, "
                f"at byte {own.data_ptr() - start}"
            )
    return parts


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source.view(target.shape))


def sum_in_order(
    out: torch.Tensor, pieces: Sequence[torch.Tensor], accumulate: bool, spare: torch.Tensor | None = None
) -> None:
    """Set (or add to) 1-D `out` the sum of `pieces`, formed in order and in the dtype of `out`.

    One of the pieces may be `out` itself. Where the sum cannot be formed in `out`, it is formed in `spare`; without
    one in a chunk of extra memory, whatever the size.

    Args:
        out: the result.
        pieces: the terms, of the size of `out`.
        accumulate: add to `out` instead of replacing it.
        spare: the first or the second of the pieces, in the dtype of `out`, if nobody needs it afterwards.
    """
    in_place = not accumulate and not any(compat.share_memory(piece, out) for piece in pieces)
    if in_place or spare is not None:
        totals = (out if in_place or spare is None else spare).split(SUM_CHUNK)
    else:
        scratch = torch.empty(min(SUM_CHUNK, out.numel()), dtype=out.dtype, device=CPU)
        totals = tuple(scratch[: target.numel()] for target in out.split(SUM_CHUNK))
    one_pass = len(pieces) > 1 and pieces[0].dtype == out.dtype
    chunks: Iterable[tuple[torch.Tensor, ...]] = zip(
        totals, out.split(SUM_CHUNK), *(piece.split(SUM_CHUNK) for piece in pieces), strict=True
    )
    for total, target, first, *others in chunks:
        if one_pass:
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for term in others:
            total.add_(term)
        if accumulate:
            target.add_(total)
        elif not in_place:
            target.copy_(total)
