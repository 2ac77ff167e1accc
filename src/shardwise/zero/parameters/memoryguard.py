"""Guard that the model still has the sharded parameters, in the engine's memory.

Scripts can exchange and convert modules and parameters, or assign to `p.data`, at any time. Such a change does not fail
at once, and a later failure or loss does not show its cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.compat import never_compiled, without_overrides
from shardwise.errors import UsageError
from shardwise.registry import Registry
from shardwise.utils.logging import warn_once
from shardwise.zero.units.unit import Unit, moved_out

_ADVICE = "Change the model before initialize(), or call engine.refresh() after the change"


_dtype_of, _shape_of = torch.Tensor.dtype.__get__, torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_is_trained = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class MemoryGuard:
    """Records the location of each parameter, and checks it later."""

    def __init__(self, module: nn.Module, registry: Registry, units: Sequence[Unit]) -> None:
        self._module = module
        self._registry = registry
        self._units = units
        self._note()

    def _note(self) -> None:
        modules = list(self._module.modules())
        holders: list[dict[str, Any]] = [holder for m in modules for holder in (m._modules, m._parameters)]
        self._holders = [holder for holder in holders if holder]
        self._empty = [holder for holder in holders if not holder]
        with without_overrides():
            # Frozen parameters are used as they are, until a script makes them require a gradient.
            self._foreign = [p for p in self._module.parameters() if self._registry.find(p) is None]
        # Only unsharded parameters keep their address.
        self._resident = [
            self._registry.parameters[t.index] for unit in self._units if not unit.sharded for t in unit.tensors
        ]
        # Removed objects stay referenced: new ones must not get their `id`.
        self._held = list(itertools.chain.from_iterable(map(dict.values, self._holders)))
        self._found = self._look()

    def _look(self) -> list[list[Any]]:
        """Return the state to compare. The loops run in C, because models have many parameters."""
        parameters = self._registry.parameters
        with without_overrides():
            return [
                list(map(_dtype_of, parameters)),
                list(map(_shape_of, parameters)),
                list(map(torch.Tensor.data_ptr, self._resident)),
                list(map(id, itertools.chain.from_iterable(map(dict.values, self._holders)))),
                [any(self._empty), any(map(_is_trained, self._foreign))],
            ]

    @never_compiled
    def check(self) -> None:
        """Raise UsageError if the model has other trainable parameters now, or some have left the engine's memory."""
        if self._look() != self._found:
            self._look_closer()
            self._note()

    def _look_closer(self) -> None:
        """Raise unless the differences are harmless (a module in another wrapper, memory moved as a whole)."""
        for index in self.resized():
            (was, now), name = (found[1][index] for found in (self._found, self._look())), self._registry[index].name
            raise UsageError(
                f"parameter {name!r} was {tuple(was)} when the engine was built and is {tuple(now)} now (by "
                "resize_token_embeddings(), or an assignment to its data): its new values are not in the memory that "
                f"the engine steps. {_ADVICE}"
            )
        self.check_memory()
        with without_overrides():
            added = [(n, p.requires_grad) for n, p in self._module.named_parameters() if self._registry.find(p) is None]
        trained = [name for name, requires_grad in added if requires_grad]
        if trained:
            raise UsageError(
                "the model has trainable parameters that it did not have when the engine was built: "
                f"{_counted(trained)}. They would not be trained. {_ADVICE}"
            )
        if added:
            warn_once(
                "the model has frozen parameters that it did not have when the engine was built: "
                f"{_counted([name for name, _ in added])}. They are used as they are on each rank, and are neither in "
                f"checkpoints nor in exported weights. {_ADVICE}"
            )

    def resized(self) -> list[int]:
        """Return the indices of parameters that have another shape than when the engine was built."""
        pairs = zip(self._found[1], self._look()[1], strict=True)
        return [index for index, (was, now) in enumerate(pairs) if was != now]

    def check_memory(self) -> None:
        """Raise UsageError if parameters of the same shape have another dtype, or have left the engine's memory."""
        resized = set(self.resized())
        for tensor, was, now in zip(self._registry, self._found[0], self._look()[0], strict=True):
            if was != now and tensor.index not in resized:
                raise UsageError(
                    f"parameter {tensor.name!r} was {was} when the engine was built and is {now} now (by module.to() "
                    "or an assignment to its data): its new values are not in the memory that the engine steps. "
                    "Convert the model before initialize(), or call engine.destroy() first and initialize() afterwards"
                )
        for unit in self._units:
            for section in unit.sections if not unit.sharded else []:
                for slot in section.layout.slots:
                    parameter = self._registry.parameters[slot.index]
                    if slot.numel and slot.index not in resized and not _share(parameter, section.full):
                        raise moved_out(self._registry[slot.index].name)


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    with without_overrides():
        return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _counted(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
