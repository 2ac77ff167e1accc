"""Training throughput: samples, tokens and FLOPs a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.profile.peaks import Peak

_TOKENS = "input_ids"


def tokens_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a module call, padding included, or None if unknown.

    Tokens are the elements of `input_ids`, an argument or a key of one; else of the first 2-D integer tensor.

    >>> tokens_in((), {"input_ids": torch.zeros(2, 5, dtype=torch.int64)})
    10
    >>> tokens_in((torch.zeros(2, 5),), {})
    """
    given = [*args, *kwargs.values()]
    for named in (kwargs, *(one for one in given if isinstance(one, Mapping))):
        if isinstance(named.get(_TOKENS), torch.Tensor):
            return int(named[_TOKENS].numel())
    for one in given:
        if isinstance(one, torch.Tensor) and one.dim() == 2 and not (one.is_floating_point() or one.is_complex()):
            return one.numel() if one.dtype is not torch.bool else None
    return None


class Rates:
    """Throughput over wall-clock time between two reports.

    The first step is excluded because of its one-time allocations. Waiting for data, evaluation and saving count. Each
    of `readers` ranks has as many tokens of its own as this one. `synchronized` waits for the device before the clock
    is read, because the host runs ahead of the device.
    """

    def __init__(self, readers: int, synchronized: bool, device: torch.device, peak: Peak | None) -> None:
        self._readers = readers
        self._waits = synchronized and device.type == "cuda"
        self._device = device
        self._peak = peak
        self._since: float | None = None
        self._steps = self._samples = 0
        self._tokens: int | None = 0

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a training forward pass."""
        found = tokens_in(args, kwargs)
        self._tokens = None if found is None or self._tokens is None else self._tokens + found

    def stepped(self, samples: int) -> None:
        """Count a step with the samples of all ranks."""
        if self._since is None:
            self.restart()
            return
        self._steps += 1
        self._samples += samples

    def restart(self) -> None:
        """Reset the counts."""
        self._since = self._now()
        self._steps = self._samples = self._tokens = 0

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def read(self, flops: int | None) -> str:
        """Return the throughput since the last call and reset; `flops` are those of a step, without recomputation."""
        if self._since is None or not self._steps:
            return ""
        seconds = self._now() - self._since
        rates = [f"{self._samples / seconds:.4g} samples/s"]
        if self._tokens:
            rates.append(f"{self._tokens * self._readers / seconds:.4g} tokens/s")
        if flops:
            speed = flops * self._steps / seconds / 1e12
            rates.append(f"{speed:.4g} TFLOP/s on each device")
            if self._peak is not None:
                share = speed / self._peak.tflops
                rates.append(f"MFU {share:.1%} of {self._peak.tflops:g} TFLOP/s ({self._peak.name})")
        self.restart()
        return ", ".join(rates)
