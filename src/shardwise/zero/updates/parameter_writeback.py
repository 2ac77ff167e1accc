"""Memory into which an optimizer writes parameters: their own, or a host buffer from which they are copied.

An optimizer that steps on the host writes low-precision parameters into one of two host buffers. While it steps the
next flat parameters, a separate stream copies the other buffer to the device. Parameters that live on the host between
uses are written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.compat import has_values
from shardwise.device.hostmemory import HostMemory
from shardwise.device.staging import copy_stream, is_far
from shardwise.memory import Accountant, Category, Tier
from shardwise.zero.units.flat_param import FlatParamStorage


class Outputs:
    """Provides memory for updated parameters, and copies it to the parameters on `device`."""

    def __init__(self, device: torch.device, accountant: Accountant) -> None:
        self._far = is_far(device)
        self._copies = copy_stream(device) if self._far else None
        self._accountant = accountant
        self._buffers: list[HostMemory | None] = [None, None]
        self._turn = 0
        self._staged: list[tuple[FlatParamStorage, torch.Tensor]] = []

    def stages(self, section: FlatParamStorage) -> bool:
        """Return True if the parameters of a flat parameter are copied from the host after a step."""
        return self._far and section.steps_apart and not section.written_in_place

    def make_room(self, parts: Sequence[Sequence[FlatParamStorage]]) -> None:
        """Allocate the buffers, as large as the largest of some parts that are stepped one after the other."""
        size = max((sum(map(_staged_bytes, filter(self.stages, part))) for part in parts), default=0)
        real = all(has_values(section.shard) for part in parts for section in part)
        for turn in range(2):
            have = self._buffers[turn]
            if size and self._copies is not None and (have is None or have.bytes.numel() < size):
                if have is not None:
                    have.wait()
                self._buffers[turn] = made = HostMemory(self._copies, size, real=real)
                self._accountant.hold(Category.BUFFERS, made.bytes, Tier.HOST)

    def of(self, sections: Sequence[FlatParamStorage]) -> dict[int, torch.Tensor]:
        """Return the memory to be written for each flat parameter of a part, by `id`. Call `send` after the step."""
        found: dict[int, torch.Tensor] = {}
        taken = 0
        for section in sections:
            if section.master_is_parameter:
                section.await_copies()
                continue
            if section.written_in_place:
                found[id(section)] = section.published_in_place
            elif not self.stages(section):
                found[id(section)] = section.published
            else:
                if not taken:
                    self._turn = 1 - self._turn
                buffer, size = self._buffers[self._turn], _staged_bytes(section)
                assert buffer is not None
                if not taken:
                    buffer.wait()
                values = buffer.bytes[taken : taken + size].view(section.layout.dtype)[: section.published.numel()]
                taken += size
                found[id(section)] = values
                self._staged.append((section, values))
        return found

    def send(self) -> None:
        """Copy the written buffer to the device. The current stream waits for the copies, the host does not."""
        staged, self._staged = self._staged, []
        if staged and self._copies is not None:
            self._copies.follow()  # after earlier readers of the parameters
            for section, values in staged:
                self._copies.copy(section.published, values)
                self._accountant.move(Tier.HOST, read=values.nbytes)
            mark = self._copies.mark()
            buffer = self._buffers[self._turn]
            assert buffer is not None
            buffer.used(mark)
            mark.wait()


def _staged_bytes(section: FlatParamStorage) -> int:
    size = section.published.nbytes
    return size + -size % 64
