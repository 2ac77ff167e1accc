"""Values of sharded units that autograd has saved: they are brought back whenever a backward pass reads them.

A call's outputs are not the only way into its graph. A loss kept on the module, an activation caught by a hook, a
gradient that is differentiated again: each leads to nodes that saved a weight and run before the nodes of any output,
or without them. So what autograd saves while a unit computes passes through here. Of a tensor in the memory of a
unit only its place there is kept, and reading it gathers the unit: a graph holds no whole values. Every other tensor is
kept as autograd keeps it.

Of such hooks autograd calls one pair, the innermost. Pairs around the call (activation checkpointing, offloading) are
called from here with every tensor, but for those that say that they want activations only (`activations_only`, an
attribute of what their functions are bound to). Pairs inside of it (a checkpoint in a block) take the place of this
one: what they hand out has been recomputed, or was a copy. They may ask whether a tensor is their business
(`lets_go`), and hand on to this pair what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.compat import (
    backward_pass,
    check_version,
    never_compiled,
    reason_against_saved_hooks,
    saved_hooks_in_force,
    version_counter,
)
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.unit import Unit

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


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
            if section.full.numel():
                self._units[section.full.untyped_storage()._cdata] = unit

    def forget(self) -> None:
        """Forget where units were."""
        self._units.clear()

    def open(self) -> bool:
        """Put the hooks in force on this thread, unless they are; return whether `close` must be called."""
        outer = saved_hooks_in_force(True)
        if self._owns(outer) or reason_against_saved_hooks() is not None:
            return False
        saved_tensors_hooks(*self._pair(outer)).__enter__()
        return True

    def close(self) -> bool:
        """Undo one `open`; return whether there was one to undo."""
        innermost = saved_hooks_in_force(True)
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

    def place_of(self, tensor: torch.Tensor) -> _Place | None:
        """Return where in the memory of a unit a tensor lies; None: it is not in any, or cannot be found again there.

        The place has the tensor's version, and counts with it.
        """
        try:
            unit = self._units.get(tensor.untyped_storage()._cdata)
        except RuntimeError:  # it has no storage (sparse tensors)
            return None
        # The unit may have been released since, and its memory given to somebody else.
        section = unit.owner_of(tensor) if unit is not None else None
        if unit is None or section is None or tensor.is_conj() or tensor.is_neg():
            return None
        counter = version_counter(tensor)
        view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return _Place(unit, section, view, counter, counter._version)

    def lets_go(self, tensor: torch.Tensor) -> bool:
        """Whether a pair inside of this one may keep a tensor in its own way: nothing is known of it here."""
        return self.place_of(tensor) is None

    def cover(self) -> None:
        """Watch what the node that runs now saves, if its graph is to be differentiated again.

        It is called from within the node; autograd puts its own hooks back in force after each.
        """
        if backward_pass() is not None:
            self.open()

    @never_compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self.place_of(tensor)
        if place is not None:
            return place
        # Detached, because a node that held its own output would never die. The version goes with it: autograd leaves
        # the check to the hooks.
        kept = tensor.detach() if tensor.requires_grad else tensor
        return kept, kept._version

    @never_compiled
    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.cover()
        if type(packed) is _Place:
            self.recall(packed.unit)
            return packed.tensor()
        tensor, version = packed
        check_version(tensor, version, tensor)
        return tensor


class _Place:
    """Where in the whole values of a section a saved tensor lies.

    Args:
        unit: whose.
        section: which of its sections.
        view: dtype, offset, size and stride of the tensor.
        counter: has the version counter of the tensor, and no values.
        version: what it was.
    """

    __slots__ = ("counter", "section", "unit", "version", "view")

    def __init__(
        self, unit: Unit, section: FlatParamStorage, view: tuple[Any, ...], counter: torch.Tensor, version: int
    ) -> None:
        self.unit = unit
        self.section = section
        self.view = view
        self.counter = counter
        self.version = version

    def tensor(self) -> torch.Tensor:
        """Return the tensor, as it is in the values that are gathered now."""
        dtype, offset, size, stride = self.view
        full = self.section.full
        if dtype is full.dtype:
            found = full.as_strided(size, stride, offset)
        else:
            found = torch.empty(0, dtype=dtype, device=full.device).set_(full.untyped_storage(), offset, size, stride)
        check_version(self.counter, self.version, found)
        return found


class _Around:
    """The hooks of `saved` where another pair is in force already."""

    def __init__(self, saved: SavedValues, pack: Pack, unpack: Unpack) -> None:
        self.saved = saved
        self._outer_pack = pack
        self._outer_unpack = unpack
        self._outer = getattr(pack, "__self__", None)
        self._alone = getattr(self._outer, "activations_only", False)

    def lets_go(self, tensor: torch.Tensor) -> bool:
        """See `SavedValues.lets_go`."""
        asked = getattr(self._outer, "lets_go", None)
        return self.saved.lets_go(tensor) and asked is not None and bool(asked(tensor))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        place = self.saved.place_of(tensor)
        if place is not None and self._alone:
            return place
        packed = self._outer_pack(tensor)
        # Where the other pair keeps the tensor itself, its place is kept instead.
        itself = place is not None and isinstance(packed, torch.Tensor) and place.unit.owns(packed)
        return place if itself else _Packed(place.unit if place is not None else None, packed)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.saved.cover()
        if type(packed) is _Place:
            self.saved.recall(packed.unit)
            if self._alone:
                return packed.tensor()
            tensor, unit = self._outer_unpack(packed.tensor()), packed.unit
        else:
            tensor, unit = self._outer_unpack(packed.content), packed.unit
        if unit is not None:
            self.saved.recall(unit)  # after the other pair has done, which may compute with the unit and release it
        return tensor


class _Packed:
    """What an outer pair of hooks has made of a saved tensor, and the unit in whose memory that lay, if any."""

    __slots__ = ("content", "unit")

    def __init__(self, unit: Unit | None, content: Any) -> None:
        self.unit = unit
        self.content = content
