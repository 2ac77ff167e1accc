"""Detects that ranks were given the same first batch, which adds work but no samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.checkpoint.safetensors_reader import bytes_of
from shardwise.comm.coded import ranks_in_words
from shardwise.compat import has_values, transforming
from shardwise.device import Later
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once

_LARGEST = (1 << 52) - 1
"""Largest digest: it is exact in fp64."""

_BYTES = 1 << 16
"""Bytes of each tensor that enter the digest."""


class SameInputs:
    """Compares digests of each rank's first inputs, in the first step's all-reduce.

    Args:
        rank: this rank of `ranks`, each of which has a place in the all-reduce.
        compared: ranks that are to have different samples.
    """

    def __init__(self, rank: int, ranks: int, compared: Sequence[int]) -> None:
        self._rank, self._ranks, self._compared = rank, ranks, compared
        self._digest: int | None = None

    def note(self, inputs: Any) -> None:
        """Compute the digest of the first inputs. Tensors of equal values do not count as data."""
        if self._digest is not None or transforming():
            return
        found = hashlib.blake2b(digest_size=8)
        self._digest = 0
        for tensor in tensors_in(inputs):
            if tensor.layout is torch.strided and has_values(tensor) and not tensor.is_meta and tensor.numel():
                size = tensor.element_size()
                part = tensor.detach().reshape(-1)[: max(1, _BYTES // size)].cpu()
                values = bytes(bytes_of(part))
                found.update(values)
                if values != values[:size] * (len(values) // size):
                    self._digest = 1
        self._digest *= 1 + int.from_bytes(found.digest(), "little") % _LARGEST

    def facts(self) -> list[float]:
        """Return numbers that are, summed over ranks, the digest of each rank."""
        found = [0.0] * self._ranks
        found[self._rank] = float(self._digest or 0)
        return found

    def compare(self, sums: torch.Tensor) -> None:
        """Warn if digests of ranks are equal."""
        values = Later(sums).read()
        by_digest: dict[float, list[int]] = {}
        for rank in self._compared:
            by_digest.setdefault(values[rank], []).append(rank)
        same = max((ranks for digest, ranks in by_digest.items() if digest), key=len, default=[])
        if len(same) > 1:
            every = len(same) == len(self._compared)
            who = f"all {len(same)} ranks" if every else f"{ranks_in_words(same)} of {len(self._compared)}"
            warn_once(
                f"{who} were given the same inputs in their first forward pass, so the global batch has the samples of "
                "one of them only. Give each rank its own: pass training_data to initialize(), or use "
                "torch.utils.data.DistributedSampler"
            )
