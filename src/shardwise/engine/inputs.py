"""Detects that all ranks were given the same first batch, which adds work but no samples."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from shardwise.checkpoint.safetensors_reader import bytes_of
from shardwise.compat import has_values, transforming
from shardwise.device import Later
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once

_LARGEST = (1 << 20) - 1
"""Largest digest: sums of squares over 4,096 ranks are exact in fp64."""

_BYTES = 1 << 16
"""Bytes of each tensor that enter the digest."""


class SameInputs:
    """Compares digests of each rank's first inputs, in the first step's all-reduce; `ranks` is their number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
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
        """Return numbers that show, summed over ranks, whether all digests are equal."""
        digest = self._digest or 0
        return [float(digest), float(digest**2)]

    def compare(self, sums: torch.Tensor) -> None:
        """Warn if the digests of all ranks are equal."""
        total, squares = map(int, Later(sums).read())
        if total and self._ranks * squares == total**2:
            warn_once(
                f"all {self._ranks} ranks were given the same inputs in their first forward pass, so the global batch "
                "has the samples of one rank only. Give each rank its own: pass training_data to initialize(), or use "
                "torch.utils.data.DistributedSampler"
            )
