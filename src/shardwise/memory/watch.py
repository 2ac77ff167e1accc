"""Measurement of one forward pass: module outputs and tensors saved by autograd."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.compat import without_overrides
from shardwise.errors import UsageError
from shardwise.trees import tensors_in


class Watch:
    """Counts bytes of module outputs and of saved tensors in one forward pass, by module name."""

    def __init__(self, module: nn.Module) -> None:
        self.outputs: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()
        self.inputs = 0
        self._names = {inner: name for name, inner in module.named_modules()}
        self._running: list[_Call] = []
        self._kept: list[tuple[str, weakref.ref[_Kept]]] = []
        with without_overrides():
            tensors = (*module.parameters(), *module.buffers())
            self._permanent = {id(storage): storage for tensor in tensors for storage in _storages(tensor)}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def run(self, module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None) -> None:
        """Call the module and count."""
        self.inputs = self._new_bytes((args, kwargs))
        with self._hooked(), torch.autograd.graph.saved_tensors_hooks(self._keep, _Kept.back):
            result = module(*args, **kwargs)
            scalar = loss(result) if loss is not None else None
        counted: set[int] = set()
        for name, reference in self._kept:
            kept = reference()
            if kept is None:
                continue  # its part of the graph has been freed
            for storage in _storages(kept.tensor):
                if id(storage) not in self._permanent and id(storage) not in counted:
                    counted.add(id(storage))
                    self.saved[name] += storage.nbytes()
        del result, scalar  # kept the graph alive until here

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for inner in self._names:
                handles.append(inner.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(inner.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._running:
            self._running[-1].calls_others = True
        self._running.append(_Call(module))

    def _leave(self, module: nn.Module, _: Any, result: Any) -> None:
        call = self._running.pop()
        while call.module is not module:  # calls ended by an exception before their hooks
            call = self._running.pop()
        if not call.calls_others:
            self.outputs[self._names[module]] += self._new_bytes(result)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        name = self._names[self._running[-1].module] if self._running else ""
        self._kept.append((name, weakref.ref(kept)))
        return kept

    def _new_bytes(self, values: Any) -> int:
        size = 0
        for storage in (storage for tensor in tensors_in(values) for storage in _storages(tensor)):
            known = self._seen.get(id(storage))
            if id(storage) in self._permanent or (known is not None and known() is storage):
                continue
            self._seen[id(storage)] = weakref.ref(storage)
            size += storage.nbytes()
        return size


class _Call:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls_others = False


class _Kept:
    """A tensor saved by autograd; lives as long as the graph node."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def back(self) -> torch.Tensor:
        return self.tensor


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(wrapper, name))]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        raise UsageError(f"memory_sources(): memory behind tensors of layout {tensor.layout} cannot be counted")
    return [part.untyped_storage() for part in parts]
