"""How fast training goes: samples, tokens and floating-point operations in a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.profile.peaks import Peak

_TOKENS = "input_ids"


def tokens_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return how many tokens a module is called with, padding included; None where that is not known.

    They are the elements of `input_ids`, as an argument or a key of one; without, of the first argument that is a
    tensor of integers with two dimensions, (sequences, tokens).

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
    """Counts what is trained, and divides it by the time of the clock.

    The first step is left out, because much is made then. Everything between two lines counts: waiting for data,
    evaluation, saving.

    Args:
        ranks: of the job; each has as many tokens as this one.
        synchronized: wait for the device before the clock is read. Otherwise it may be behind.
        device: of the model.
        peak: of the device; None: it is not known.
    """

    def __init__(self, ranks: int, synchronized: bool, device: torch.device, peak: Peak | None) -> None:
        self._ranks = ranks
        self._waits = synchronized and device.type == "cuda"
        self._device = device
        self._peak = peak
        self._since: float | None = None
        self._steps = self._samples = 0
        self._tokens: int | None = 0

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pass of training begins."""
        found = tokens_in(args, kwargs)
        self._tokens = None if found is None or self._tokens is None else self._tokens + found

    def stepped(self, samples: int) -> None:
        """A step has ended.

        Args:
            samples: of all ranks that went into it.
        """
        if self._since is None:
            self.restart()
            return
        self._steps += 1
        self._samples += samples

    def restart(self) -> None:
        """Begin anew."""
        self._since = self._now()
        self._steps = self._samples = self._tokens = 0

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def read(self, flops: int | None) -> str:
        """Return the rates since the last time, and begin anew; empty if there was no step.

        Args:
            flops: floating-point operations of a step on this device, without what is recomputed; None: not known.
        """
        if self._since is None or not self._steps:
            return ""
        seconds = self._now() - self._since
        rates = [f"{self._samples / seconds:.4g} samples/s"]
        if self._tokens:
            rates.append(f"{self._tokens * self._ranks / seconds:.4g} tokens/s")
        if flops:
            speed = flops * self._steps / seconds / 1e12
            rates.append(f"{speed:.4g} TFLOP/s on each device")
            if self._peak is not None:
                share = speed / self._peak.tflops
                rates.append(f"MFU {share:.1%} of {self._peak.tflops:g} TFLOP/s ({self._peak.said})")
        self.restart()
        return ", ".join(rates)
