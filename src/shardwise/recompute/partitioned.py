"""Partitioning of saved inputs over the tensor-parallel group (`partition_activations`).

Outside of tensor-parallel layers all ranks of the group have the same activations. Each rank keeps one part of a saved
input; one exact all-gather a tensor restores the input for the recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.compat import check_version, has_values, never_compiled, saved_hooks_in_force, transforming
from shardwise.errors import DesyncError
from shardwise.parallel.tensor.group import TensorGroup, fingerprint

LEAST = 1024  # Minimum elements of a partitioned tensor; smaller ones are saved whole.

_COMPARED = 32  # number of a group's first tensors that are compared over ranks


class _Part(NamedTuple):
    content: Any
    shape: torch.Size
    dtype: torch.dtype


class _Whole(NamedTuple):
    content: Any
    version: int | None  # None: the enclosing hooks keep the tensor


class _Divided:
    """Saved-tensor hooks of one checkpointed call; `outer` are the enclosing hooks, which receive the kept parts."""

    activations_only = True

    def __init__(self, group: TensorGroup, outer: Any) -> None:
        self._group, self._outer = group, outer
        self._owner = getattr(outer[0], "__self__", None) if outer is not None else None

    def lets_go(self, tensor: torch.Tensor) -> bool:
        """Return True if an inner pair of hooks may keep the tensor itself."""
        return self._owner is None or bool(self._owner.lets_go(tensor))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        divides = tensor.is_floating_point() and tensor.numel() >= LEAST and not isinstance(tensor, nn.Parameter)
        if not divides or not self.lets_go(tensor):
            whole = self._kept(tensor)
            return _Whole(whole, whole._version if self._outer is None else None)
        self._compare(tensor)
        size, place = self._group.size, self._group.place
        each = -(-tensor.numel() // size)
        own = tensor.new_zeros(each)
        part = tensor.detach().reshape(-1)[place * each : (place + 1) * each]
        own[: part.numel()].copy_(part)
        return _Part(self._kept(own), tensor.shape, tensor.dtype)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        kept: torch.Tensor = packed.content if self._outer is None else self._outer[1](packed.content)
        if isinstance(packed, _Whole):
            if packed.version is not None:
                check_version(kept, packed.version, kept)
            return kept
        full = kept.new_empty(kept.numel() * self._group.size)
        if has_values(kept):
            self._group.comm.all_gather([(full, kept.contiguous())], "partition_activations", kind="explicit").wait()
        return full[: packed.shape.numel()].view(packed.shape)

    def _kept(self, tensor: torch.Tensor) -> Any:
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    def _compare(self, tensor: torch.Tensor) -> None:
        if self._group.compared >= _COMPARED or not has_values(tensor):
            return
        self._group.compared += 1
        fingerprints = self._group.comm.exchange(fingerprint(tensor), "partition_activations")
        if any(other != fingerprints[0] for other in fingerprints):
            raise DesyncError(
                f"partition_activations: an input of a checkpointed function, of shape {list(tensor.shape)}, differs "
                f"over ranks {self._group.comm.members}, a tensor-parallel group: {fingerprints}. Switch "
                "partition_activations off where these ranks have tokens, or parts of a layer, of their own there"
            )


@contextmanager
def dividing(group: TensorGroup | None) -> Iterator[None]:
    """Partition tensors that autograd saves inside the block over a group; no effect without a group or on one rank."""
    outer = saved_hooks_in_force(True)
    foreign = outer is not None and not hasattr(getattr(outer[0], "__self__", None), "lets_go")
    if group is None or group.size == 1 or foreign or transforming():
        yield
        return
    pair = _Divided(group, outer)
    with saved_tensors_hooks(pair.pack, pair.unpack):
        yield
