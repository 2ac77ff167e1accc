"""Measurement of activations: each tensor that an operator creates, until its memory is freed.

A dispatch mode sees the operators of forward, loss, backward and step, including autograd's own. Results in new memory
count as activations, unless the engine has claimed them (`Accountant.hold`) or owns the block (`Accountant.owning`).
Scratch memory inside kernels is invisible; sizes are those of tensors, not of allocator blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.compat import requested_device
from shardwise.memory.accountant import Accountant


@contextlib.contextmanager
def track_activations(accountant: Accountant) -> Iterator[Accountant]:
    """Count the tensors that operators create inside the block, in an engine's accountant or a new one.

    The tracker costs some microseconds an operator: use it for a few steps. Inputs created outside of the block do not
    count, nor do tensors created from Python numbers or NumPy arrays.

    >>> from shardwise.memory import Category
    >>> linear, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> with track_activations(Accountant()) as accountant:
    ...     out = linear(x).relu()
    >>> accountant.live[Category.ACTIVATIONS]  # the output of relu, which is all that its backward needs
    64
    """
    with accountant.tracking(), _Tracker(accountant):
        yield accountant


class _Tracker(TorchDispatchMode):
    def __init__(self, accountant: Accountant) -> None:
        super().__init__()
        self._accountant = accountant

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (device := requested_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        accountant = self._accountant
        unknown = [tensor for tensor in _dense(result) if not accountant.knows(tensor)]
        if unknown:
            # An operator may return its input or a view of it, that is, existing memory.
            inputs = {id(tensor.untyped_storage()) for tensor in _dense((args, kwargs))}
            for tensor in unknown:
                if id(tensor.untyped_storage()) not in inputs:
                    accountant.observe(tensor)
        return result


def _dense(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.layout is torch.strided]
