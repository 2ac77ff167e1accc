"""Links: messages from one rank to another one, in one order, as the stages of a pipeline exchange them.

A message is a broadcast in a group of two ranks. Therefore it has a number and a record in the ledger, and the watchdog
and the errors of lost peers know it. Each direction, and each of activations and gradients, has a process group of its
own: messages of one link arrive in the order of sending, and links do not wait for each other. Ranks that receive each
link's messages in this order cannot cause a deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch

from shardwise.comm.communicator import Communicator, Handle


class Link:
    """Messages of one kind from rank `source` to rank `target` of a communicator (both ranks create it).

    Args:
        whole: communicator of all ranks of the job.
        source, target: ranks in `whole`; one of them is this rank.
        what: kind of the messages.
    """

    def __init__(
        self, whole: Communicator, source: int, target: int, what: Literal["activations", "gradients"]
    ) -> None:
        self._comm = whole.part([sorted((source, target))], f"ranks {source} and {target}")
        self._kind = f"{what}_{'up' if source < target else 'down'}"
        self._source = int(source > target)
        self._sent: deque[tuple[str, list[Handle], Sequence[torch.Tensor]]] = deque()

    def connect(self) -> None:
        """Create the process group and connect its ranks (both call, in one order of links).

        Because NCCL connects ranks inside the first collective, where the host waits for the peer, a receive that is
        launched ahead must not be the first.
        """
        self._comm.connect(self._kind)
        if not (self._comm.waits_on_host or self._comm.imagined):
            one = torch.zeros(1, dtype=torch.float32, device=self._comm.device)
            self._comm.broadcast(one, self._source, "connect", self._kind).wait()
            one.cpu()  # the host waits too

    def send(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """Launch the sending of tensors, which keep their memory until the peer has them."""
        while self._sent and self._is_received(*self._sent[0][:2], label):
            self._end_oldest()
        handles = [self._comm.broadcast(tensor, self._source, label, self._kind) for tensor in tensors]
        self._sent.append((label, handles, tensors))

    def _is_received(self, label: str, handles: Sequence[Handle], now: str) -> bool:
        """Return True if the peer has a message, before the message `now` is sent."""
        return all(handle.completed for handle in handles)

    def _end_oldest(self) -> None:
        for handle in self._sent.popleft()[1]:
            handle.wait()

    def flush(self) -> None:
        """Wait until the peer has all messages."""
        while self._sent:
            self._end_oldest()

    def close(self) -> None:
        """Release messages under way; torch keeps the connection open as long as one is referred to."""
        self._sent.clear()

    def receive(self, tensors: Sequence[torch.Tensor], label: str) -> list[Handle]:
        """Launch the receiving of the next message into tensors of its shapes; the caller waits for the handles."""
        return [self._comm.broadcast(tensor, self._source, label, self._kind) for tensor in tensors]
