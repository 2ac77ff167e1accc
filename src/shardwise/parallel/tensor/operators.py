"""Dispatch mode that records the operators of a block, and its use of weights of other blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardwise.registry import part_of


class Operators(TorchDispatchMode):
    """Records operators, with their arguments that are no tensors and no fractions.

    `foreign` is a sharded parameter outside of `block` that was used where `closes` is False.
    """

    supports_higher_order_operators = True

    def __init__(self, block: nn.Module, closes: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        # A wrapped forward pass of a copy may use weights of the block.
        self._own = {id(parameter) for parameter in block.parameters()}
        self.found: list[str] = []
        self.foreign: nn.Parameter | None = None
        self._closes, self._depth = closes, 0
        self._handles: list[RemovableHandle] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because torch.compile raises an error otherwise."""
        return True

    def __enter__(self) -> Any:
        def begins(module: nn.Module, _: Any) -> None:
            self._depth += self._closes(module)

        def ends(module: nn.Module, _: Any, __: Any) -> None:
            self._depth -= self._closes(module)

        self._handles = [
            register_module_forward_pre_hook(begins),
            register_module_forward_hook(ends, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if self.foreign is None and not self._depth:
            self.foreign = next((one for one in leaves if _is_part(one) and id(one) not in self._own), None)
        self.found.append(f"{func} {[one for one in leaves if not isinstance(one, (torch.Tensor, float))]}")
        return func(*args, **(kwargs or {}))


def _is_part(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and part_of(value).box is not None
