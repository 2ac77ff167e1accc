"""Buffers of collectives in memory that NCCL has registered (`ncclCommRegister`), which spares copies to its own.

A pool of torch's caching allocator takes memory from NCCL (`ncclMemAlloc`). Every segment that the pool gets is
registered with the communicators of all groups given. Freed buffers stay in the pool, for other buffers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.compat import backend_of, memory_registry
from shardwise.errors import UsageError


class RegisteredMemory:
    """A pool that is registered with the communicators of some groups on one device.

    Raises:
        UsageError: the backend of a group cannot register memory.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._device = device
        self._backends: list[Any] = []
        for group in groups:
            backend = memory_registry(group, device)
            if backend is None:
                raise UsageError(
                    f"registered_buffers: the backend {backend_of(group, device)} on {device} cannot register memory; "
                    "expected NCCL on devices whose NVLink has multicast. Remove the key"
                )
            self._backends.append(backend)
        self._pool: Any = torch.cuda.MemPool(self._backends[0].mem_allocator)
        for backend in self._backends:
            backend.register_mem_pool(self._pool)

    def allocating(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's tensors on the device are made in the pool."""
        return torch.cuda.use_mem_pool(self._pool, device=self._device)

    def close(self) -> None:
        """Deregister the pool, and give it up; no collective may use its buffers any more."""
        while self._backends:
            self._backends.pop().deregister_mem_pool(self._pool)
        self._pool = None
