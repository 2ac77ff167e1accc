"""Ranks of a checkpoint whose own state a rank of another mesh takes."""

from __future__ import annotations

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.places import Counterparts, counterparts


def saved_on(data: int, tensor: int, layers: int) -> Manifest:
    places = [
        {"layers": [stage, layers], "data": [share, data], "sequence": [0, 1], "tensor": [part, tensor]}
        for stage in range(layers)
        for share in range(data)
        for part in range(tensor)
    ]
    layout = {"world": len(places)}
    return Manifest("a", 0.0, {}, layout, {}, {}, [], ranks=[{"place": place} for place in places])


def test_a_rank_takes_what_the_ranks_with_its_samples_had() -> None:
    manifest = saved_on(data=2, tensor=2, layers=2)  # ranks 0 to 3 in the first stage, 4 to 7 in the second

    def found(rank: int, world: int, **place: tuple[int, int]) -> Counterparts:
        return counterparts(manifest, {"layers": (0, 1), "sequence": (0, 1), **place}, rank, world)

    here = found(3, 8, layers=(0, 2), data=(1, 2), tensor=(1, 2))
    assert (here.same, here.own, here.line) == (True, 3, {3, 7})
    assert found(1, 2, data=(1, 2), tensor=(0, 1)).line == {2, 6}  # tensors were divided, and are not here
    assert found(3, 4, data=(1, 2), tensor=(1, 2)).line == {3, 7}
    assert found(0, 4, data=(0, 2), tensor=(0, 1), sequence=(1, 2)).line == {0, 4}
    assert found(1, 4, data=(1, 4), tensor=(0, 1)).line == frozenset()
    assert found(1, 4, data=(0, 1), tensor=(1, 4)).line == frozenset()
    drawn = [found(0, 8, data=(1, 2), **{name: (1, 2)}) for name in ("tensor", "layers", "sequence")]
    assert [(one.own, one.random, one.with_torch) for one in drawn] == [(3, 3, True), (6, 6, True), (None, 2, False)]
    beyond = found(5, 8, data=(1, 2), tensor=(2, 4))
    assert (beyond.own, beyond.random, beyond.with_torch) == (None, 2, True)
    assert found(7, 8, data=(3, 4), tensor=(1, 2)).random is None
