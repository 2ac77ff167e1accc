"""Saved-tensor hooks of sharded units: autograd keeps positions; graphs do not keep unsharded values.

A graph can be entered elsewhere than at a call's outputs: by a loss kept on the module, an activation from a hook, or a
gradient that is differentiated again. Nodes that saved a weight then run before the nodes of any output, or without
them. Therefore the hooks receive all tensors that autograd saves while a unit computes. Of a tensor in a unit's memory
only its position is kept; reading it unshards the unit. Other tensors are kept as by autograd.

Autograd calls only the innermost pair of hooks. Pairs outside of this one (activation checkpointing, offloading) are
called from here with every tensor, or without tensors of units if the object of their functions has a true attribute
`activations_only`. Pairs inside of this one (a checkpoint in a block) replace it: their tensors are recomputed or
copied. They can check by `lets_go` whether this pair needs a tensor, and pass it on.
"""

from __future__ import annotations

import math
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
    """Saved-tensor hooks of one engine; `recall` makes the values of a unit valid before a node reads them.

    Attributes:
        reads: nodes read values of units; False: their shapes only, so the hooks unshard nothing and give NaN.
    """

    def __init__(self, recall: Callable[[Unit], None]) -> None:
        self.recall = recall
        self._units: dict[int, Unit] = {}
        self.reads = True

    def know(self, unit: Unit) -> None:
        """Register the memory of an unsharded unit."""
        for section in unit.sections:
            if section.full.numel():
                self._units[section.full.untyped_storage()._cdata] = unit

    def forget(self) -> None:
        """Drop all registered memory."""
        self._units.clear()

    def value(self, place: _Place) -> torch.Tensor:
        """Return a tensor in a unit's memory."""
        if not self.reads:
            dtype, _, size, _ = place.view
            return torch.full((), math.nan, dtype=dtype, device=place.section.full.device).expand(size)
        self.recall(place.unit)
        return place.tensor()

    def open(self) -> bool:
        """Enable the hooks on this thread; return True if `close` must be called, because they were not enabled."""
        outer = saved_hooks_in_force(True)
        if (outer is not None and self._owns(outer)) or reason_against_saved_hooks() is not None:
            return False
        if outer is None:
            saved_tensors_hooks(self._pack, self._unpack).__enter__()
        else:
            around = _WithOuterHooks(self, *outer)
            saved_tensors_hooks(around.pack, around.unpack).__enter__()
        return True

    def close(self) -> bool:
        """Undo one `open`; return False if the hooks are not enabled."""
        innermost = saved_hooks_in_force(True)
        if innermost is None or not self._owns(innermost):
            return False
        saved_tensors_hooks(*innermost).__exit__()
        return True

    def close_all(self) -> None:
        """Disable hooks that interrupted calls have left enabled."""
        while self.close():
            pass

    def _owns(self, pair: tuple[Pack, Unpack]) -> bool:
        owner = getattr(pair[0], "__self__", None)
        return owner is self or (type(owner) is _WithOuterHooks and owner.saved is self)

    def place_of(self, tensor: torch.Tensor) -> _Place | None:
        """Return the position (with the version counter) of a tensor in a unit's memory, or None if there is none."""
        try:
            unit = self._units.get(tensor.untyped_storage()._cdata)
        except RuntimeError:  # without a storage (sparse tensors)
            return None
        # After a reshard, the memory may have another use.
        section = unit.owner_of(tensor) if unit is not None else None
        if unit is None or section is None or tensor.is_conj() or tensor.is_neg():
            return None
        counter = version_counter(tensor)
        view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return _Place(unit, section, view, counter, counter._version)

    def lets_go(self, tensor: torch.Tensor) -> bool:
        """Return True if inner hooks may keep a tensor themselves, because it is in no unit's memory."""
        return self.place_of(tensor) is None

    def cover(self) -> None:
        """Enable the hooks inside of a running node that may be differentiated again; autograd restores its own."""
        if backward_pass() is not None:
            self.open()

    @never_compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self.place_of(tensor)
        if place is not None:
            return place
        # Detached, because a node that holds its own output would never be freed. The version is kept, because autograd
        # leaves the check to the hooks.
        kept = tensor.detach() if tensor.requires_grad else tensor
        return kept, kept._version

    @never_compiled
    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.cover()
        if type(packed) is _Place:
            return self.value(packed)
        tensor, version = packed
        check_version(tensor, version, tensor)
        return tensor


class _Place:
    """Position of a saved tensor in a flat parameter: (dtype, offset, size, stride), and its version counter."""

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
        dtype, offset, size, stride = self.view
        full = self.section.full
        if dtype is full.dtype:
            found = full.as_strided(size, stride, offset)
        else:
            found = torch.empty(0, dtype=dtype, device=full.device).set_(full.untyped_storage(), offset, size, stride)
        check_version(self.counter, self.version, found)
        return found


class _WithOuterHooks:
    def __init__(self, saved: SavedValues, pack: Pack, unpack: Unpack) -> None:
        self.saved = saved
        self._outer_pack = pack
        self._outer_unpack = unpack
        self._outer = getattr(pack, "__self__", None)
        self._activations_only = getattr(self._outer, "activations_only", False)

    def lets_go(self, tensor: torch.Tensor) -> bool:
        outer_lets_go = getattr(self._outer, "lets_go", None)
        return self.saved.lets_go(tensor) and outer_lets_go is not None and bool(outer_lets_go(tensor))

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        place = self.saved.place_of(tensor)
        if place is not None and self._activations_only:
            return place
        packed = self._outer_pack(tensor)
        # If the outer pair keeps the tensor itself, its position is kept instead.
        itself = place is not None and isinstance(packed, torch.Tensor) and place.unit.owns(packed)
        return place if itself else _Packed(place.unit if place is not None else None, packed)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.saved.cover()
        if type(packed) is _Place:
            value = self.saved.value(packed)
            if self._activations_only:
                return value
            tensor, unit = self._outer_unpack(value), packed.unit
        else:
            tensor, unit = self._outer_unpack(packed.content), packed.unit
        if unit is not None and self.saved.reads:
            self.saved.recall(unit)  # the outer pair may have unsharded and resharded the unit
        return tensor


class _Packed:
    __slots__ = ("content", "unit")

    def __init__(self, unit: Unit | None, content: Any) -> None:
        self.unit = unit
        self.content = content
