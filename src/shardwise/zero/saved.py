"""Values of sharded units that autograd has saved: they are brought back whenever a backward pass reads them.

A call's outputs are not the only way into its graph. A loss kept on the module, an activation caught by a hook, a
gradient that is differentiated again: each leads to nodes that saved a weight and run before the nodes of any output,
or without them. So what autograd saves while a unit computes passes through here. A tensor in the memory of a unit is
kept with the unit's name on it, and reading it gathers the unit; every other tensor is kept as autograd keeps it.

Of such hooks autograd calls one pair, the innermost. Pairs around the call (activation checkpointing, offloading) are
called from here with every tensor. Pairs inside of it (a checkpoint in a block) take the place of this one: what they
hand out has been recomputed, or was a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.compat import never_compiled
from shardwise.zero.unit import Unit

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]

_innermost: Callable[[bool], tuple[Pack, Unpack] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_reason_against: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class SavedValues:
    """The hooks of one engine; see the module docstring.

    Args:
        recall: makes the values of a unit valid; called when a node is about to read them.
    """

    def __init__(self, recall: Callable[[Unit], None]) -> None:
        self.recall = recall
        self._units: dict[int, Unit] = {}

    def know(self, unit: Unit) -> None:
        """Note where the whole values of a unit lie until it is released."""
        for section in unit.sections:
            address = section.full.untyped_storage().data_ptr()
            if address:  # tensors of a dry run have none
                self._units[address] = unit

    def forget(self) -> None:
        """Forget where units were."""
        self._units.clear()

    def open(self) -> bool:
        """Put the hooks in force on this thread, unless they are; return whether `close` must be called."""
        outer = _innermost(True)
        if self._owns(outer) or _reason_against() is not None:
            return False
        saved_tensors_hooks(*self._pair(outer)).__enter__()
        return True

    def close(self) -> bool:
        """Undo one `open`; return whether there was one to undo."""
        innermost = _innermost(True)
        if innermost is None or not self._owns(innermost):
            return False
        saved_tensors_hooks(*innermost).__exit__()
        return True

    def close_all(self) -> None:
        """Undo what calls that were interrupted have opened."""
        while self.close():
            pass

    def _owns(self, pair: tuple[Pack, Unpack] | None) -> bool:
        owner = getattr(pair[0], "__self__", None) if pair is not None else None
        return owner is self or (type(owner) is _Around and owner.saved is self)

    def _pair(self, outer: tuple[Pack, Unpack] | None) -> tuple[Pack, Unpack]:
        if outer is None:
            return self._pack, self._unpack
        around = _Around(self, *outer)
        return around.pack, around.unpack

    def unit_at(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose memory a tensor lies."""
        try:
            unit = self._units.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # it has no storage (sparse tensors)
            return None
        # The unit may have been released since, and its memory given to somebody else.
        return unit if unit is not None and unit.owns(tensor) else None

    def cover(self) -> None:
        """Watch what the node that runs now saves, if its graph is to be differentiated again.

        It is called from within the node; autograd puts its own hooks back in force after each.
        """
        if torch._C._current_graph_task_id() != -1:
            self.open()

    @never_compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self.unit_at(tensor)
        # Detached, because a node that held its own output would never die. The version goes with it: autograd leaves
        # the check to the hooks.
        kept = tensor.detach() if unit is not None or tensor.requires_grad else tensor
        return (kept, kept._version) if unit is None else _Values(unit, kept, kept._version)

    @never_compiled
    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.cover()
        if type(packed) is _Values:
            self.recall(packed.unit)
            tensor, version = packed.content, packed.version
        else:
            tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected "
                f"version {version} instead"
            )
        return tensor


class _Values:
    """A saved tensor in the memory of a unit: itself, or what an outer pair of hooks has made of it."""

    __slots__ = ("content", "unit", "version")

    def __init__(self, unit: Unit, content: Any, version: int = 0) -> None:
        self.unit = unit
        self.content = content
        self.version = version


class _Around:
    """The hooks of `saved` where another pair is in force already."""

    def __init__(self, saved: SavedValues, pack: Pack, unpack: Unpack) -> None:
        self.saved = saved
        self._outer_pack = pack
        self._outer_unpack = unpack

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        unit = self.saved.unit_at(tensor)
        packed = self._outer_pack(tensor)
        return packed if unit is None else _Values(unit, packed)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.saved.cover()
        if type(packed) is not _Values:
            return self._outer_unpack(packed)
        tensor = self._outer_unpack(packed.content)
        self.saved.recall(packed.unit)  # after the other pair has done, which may compute with the unit and release it
        return tensor
