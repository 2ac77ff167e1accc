"""Selective activation checkpointing: outputs of some operators are kept, and everything else is recomputed.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` numbers all operators of both passes. Because all-gathers
of sharded parameters run in either pass, only matrix products and fused attention are numbered here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.compat import detached_with_version, requested_device
from shardwise.errors import UsageError

Selective = Literal["attention", "every_second_matmul", "matmuls"]

# Products with a weight: of two dimensions, or grouped. Attention scores (bmm) grow with the square of the length.
_MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")}
_ATTENTION = {
    f"aten::_scaled_dot_product_{name}"
    for name in (
        *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
        "fused_attention_overrideable",
    )
}
_IN_PLACE = {f"c10d::{name}_" for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce")}


def selective_contexts(selective: Selective) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a call and of its recomputation, for `context_fn` of `torch.utils.checkpoint.checkpoint`.

    An output that the function modifies in place is not kept, nor is attention with dropout, which draws random
    numbers. A compiled function inside is recomputed as a whole.

    Args:
        selective: "attention": outputs of fused attention are kept (`scaled_dot_product_attention` where it does not
            use separate operators). "every_second_matmul": also the first, third, ... product with a weight, as in
            torchtitan's selective checkpointing by operator. "matmuls": also all such products.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=partial(selective_contexts, "matmuls"))
    """
    calls: list[_Call] = []
    return _Keeping(calls, selective), _Reusing(calls)


class _Call:
    """A numbered operator call of the forward pass, and its output as long as that is kept."""

    def __init__(self, function: Any, output: Any) -> None:
        self.function = function
        self._output = tree_map_only(torch.Tensor, detached_with_version, output)
        self._versions = [tensor._version for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self._output) if isinstance(leaf, torch.Tensor)]

    def drop(self) -> None:
        self._output = None

    def take(self) -> Any:
        """Return the output once; None if it is not kept, or has been modified."""
        same = [tensor._version for tensor in self.tensors()] == self._versions
        output, self._output = self._output, None
        return output if same else None


class _Keeping(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, calls: list[_Call], selective: Selective) -> None:
        super().__init__()
        self._calls, self._selective = calls, selective
        self._matmuls = 0
        self._by_storage: dict[int, _Call] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile works inside the context."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := requested_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if _numbered(func, args, kwargs):
            self._calls.append(call := _Call(func, found))
            if self._keeps(func):
                self._by_storage.update({_storage(tensor): call for tensor in call.tensors()})
            else:
                call.drop()
        elif self._by_storage:
            for tensor in _written(func, args, kwargs):
                if (changed := self._by_storage.pop(_storage(tensor), None)) is not None:
                    changed.drop()
        return found

    def _keeps(self, func: Any) -> bool:
        if func._schema.name in _ATTENTION:
            return True
        self._matmuls += 1
        return self._selective == "matmuls" or (self._selective == "every_second_matmul" and self._matmuls % 2 == 1)


class _Reusing(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls
        self._number = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile works inside the context."""
        return True

    def __enter__(self) -> Any:
        self._number = 0  # a retained graph is recomputed again, without kept outputs
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := requested_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if not _numbered(func, args, kwargs):
            return func(*args, **kwargs)
        call = self._calls[self._number] if self._number < len(self._calls) else None
        self._number += 1
        if call is None or call.function is not func:
            raise UsageError(
                f"selective activation checkpointing: product or attention number {self._number} of the recomputation "
                f"is {func}, and was {call and call.function} in the forward pass. The function must do the same for "
                "equal arguments; leave `selective` out where it does not"
            )
        kept = call.take()
        return func(*args, **kwargs) if kept is None else kept


@functools.cache
def _names(func: Any) -> list[str] | None:
    """Return the names of the arguments of an operator that may be numbered; None for others."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return None
    return [a.name for a in func._schema.arguments] if func._schema.name in _MATMULS | _ATTENTION else None


def _numbered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = _names(func)
    if names is None or "dropout_p" not in names:
        return names is not None
    place = names.index("dropout_p")
    # With dropout it draws random numbers, which the recomputation must draw again for what follows.
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    if not isinstance(func, torch._ops.OpOverload):
        return []
    if func._schema.name in _IN_PLACE:  # schemas of collectives do not say that they write
        return [(0, "tensors")]
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for place, name in _written_places(func):
        for leaf in tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return -1
