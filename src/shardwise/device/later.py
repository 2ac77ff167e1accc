"""Values of a device that the host learns without waiting for them now."""

from __future__ import annotations

import torch

from shardwise.compat import has_values


class Later:
    """A small tensor on its way to the host.

    Args:
        values: 1-D; on a CUDA device the copy runs behind what has been launched so far, and the host goes on.

    Example:
        >>> Later(torch.tensor([1.0, 2.0])).read()
        [1.0, 2.0]
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda" and has_values(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> list[float]:
        """Return the values, waiting for those that are still under way; zeros in a dry run, which has none."""
        if not has_values(self._values):
            return [0.0] * self._values.numel()
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._values.tolist()]
