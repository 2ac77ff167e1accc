"""Host-device transfers of small values without blocking the host."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from shardwise.compat import has_values
from shardwise.device.streams import Mark, streams_of


def numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers as a tensor on a device, without blocking the host, unlike `torch.tensor(values, device=...)`.

    >>> numbers_on(torch.device("cpu"), [1, 2], torch.int64)
    tensor([1, 2])
    """
    # The source is not pinned, so CUDA has read it when the call returns.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Later:
    """Asynchronous copy of a small 1-D tensor to the host; on a CUDA device on the current stream.

    >>> Later(torch.tensor([1.0, 2.0])).read()
    [1.0, 2.0]
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._streams = streams_of(values.device)
        self._arrived: Mark | None = None
        self._values = values
        if self._streams.beside and has_values(values):
            pinned = values.device.type == "cuda"
            with self._streams.on_host():
                self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
            self._values.copy_(values, non_blocking=True)
            self._arrived = self._streams.mark()

    def arrived(self) -> bool:
        """Return True if `read` does not block."""
        return self._arrived is None or self._arrived.reached()

    def read(self) -> list[float]:
        """Return the values, waiting for the copy; zeros in a dry run, which has no values."""
        if not has_values(self._values):
            return [0.0] * self._values.numel()
        if self._arrived is not None:
            self._streams.block(self._arrived, timedelta.max)
        return list(map(float, self._values.tolist()))
