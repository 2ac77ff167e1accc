"""Places of ranks in the mesh decide which saved rank's own state (random numbers, buffers that differ between ranks)
a rank takes, if the checkpoint is of another mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.manifest import Manifest

PLACE = "place"
"""Key of a rank's state: {dimension of the mesh: [coordinate, size]}."""

LAYERS = "layers"
"""Dimension whose ranks have different layers of the model; ranks along it get the same samples."""

SAMPLES = "data"
"""Dimension whose ranks get different samples."""

TENSORS = "tensor"
"""Dimension whose ranks have different parts of tensors, and equal random numbers."""

Place = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Counterparts:
    """Saved ranks that correspond to this rank.

    Attributes:
        same: the checkpoint is of the same mesh.
        own: the rank at the same coordinates; None: the saved mesh has no such coordinates.
        line: ranks that had the same share of samples and tensors, of any layers; if tensors were divided otherwise,
            those with the same share of samples that are first in the other dimensions; empty if shares of samples
            have other sizes.
        random: the rank whose random number generators this rank takes: `own`, else the one with the same share of
            samples, by number, that is first in the other dimensions, because the ranks of a copy of the model draw
            alike; None without.
        with_torch: take torch's generators, too; not if ranks with other tokens or layers, which draw their own, would
            share them.
    """

    same: bool
    own: int | None
    line: frozenset[int]
    random: int | None
    with_torch: bool = True


def counterparts(manifest: Manifest, place: Place, rank: int, world: int) -> Counterparts:
    """Return the counterparts of a rank; by number where places are not recorded."""
    saved = [_recorded(tree) for tree in manifest.ranks]
    if not place or not saved or None in saved:
        count = int(manifest.layout.get("world", len(saved)))
        same = count == world
        own = rank if rank < len(saved) else None
        return Counterparts(same, own, frozenset([rank] if same else []), own)
    here = {name: pair for name, pair in place.items() if pair[1] > 1}
    known = [(number, other) for number, other in enumerate(saved) if other is not None]
    line = [number for number, other in known if _but(other, LAYERS) == _but(here, LAYERS)]
    if not line:
        for number, other in known:
            first = not any(at for at, _ in _but(other, SAMPLES, LAYERS).values())
            line += [number] if first and other.get(SAMPLES) == here.get(SAMPLES) else []
    at = {_coordinates(other): number for number, other in known}
    same = len(saved) == world and _sizes(saved[0] or {}) == _sizes(here)
    own = at.get(_coordinates(here))
    random = at.get(_coordinates(here) - _coordinates(_but(here, SAMPLES))) if own is None else own
    with_torch = own is not None or not _coordinates(_but(here, SAMPLES, TENSORS))
    return Counterparts(same, own, frozenset(line), random, with_torch)


def _recorded(tree: Any) -> dict[str, tuple[int, int]] | None:
    """Return the place in a rank's tree, without dimensions of size 1."""
    found: Any = tree.get(PLACE) if isinstance(tree, dict) else None
    try:
        return {str(name): (int(at), int(size)) for name, (at, size) in found.items() if int(size) > 1}
    except (AttributeError, TypeError, ValueError):
        return None


def _coordinates(place: Place) -> frozenset[tuple[str, int]]:
    return frozenset((name, at) for name, (at, _) in place.items() if at)


def _sizes(place: Place) -> dict[str, int]:
    return {name: size for name, (_, size) in place.items()}


def _but(place: Place, *dimensions: str) -> dict[str, tuple[int, int]]:
    return {name: pair for name, pair in place.items() if name not in dimensions}
