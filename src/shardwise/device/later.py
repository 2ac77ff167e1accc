"""Values that go to a device, or come from there, without the host waiting for what the device does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from shardwise.compat import has_values
from shardwise.device.streams import Mark, streams_of


def numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return some numbers in a tensor on a device, for which the host does not wait.

    `torch.tensor(values, device=...)` would wait for all that has been launched there.

    >>> numbers_on(torch.device("cpu"), [1, 2], torch.int64)
    tensor([1, 2])
    """
    # They are not pinned, so CUDA has read them when the call returns.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Later:
    """A small tensor on its way to the host.

    Args:
        values: 1-D; on a CUDA device the copy runs behind what has been launched so far, and the host goes on.

    Example:
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
        """Whether `read` would not wait."""
        return self._arrived is None or self._arrived.reached()

    def read(self) -> list[float]:
        """Return the values, waiting for those that are still under way; zeros in a dry run, which has none."""
        if not has_values(self._values):
            return [0.0] * self._values.numel()
        if self._arrived is not None:
            self._streams.block(self._arrived, timedelta.max)
        return [float(value) for value in self._values.tolist()]
