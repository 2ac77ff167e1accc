"""How attention heads are dealt out to ranks, and from which attributes of a module their numbers are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.parallel.tensor.group import Runs
from shardwise.parallel.tensor.layers import runs_of

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_attention_heads_per_partition")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_multi_query_groups_per_partition")
GROUPS = ("num_key_value_groups",)
FEATURES = (
    "inner_dim",
    "all_head_size",
    "split_size",
    "embed_dim",
    "hidden_size",
    "hidden_size_per_partition",
)
"""Attributes that modules of attention use as the number of features of their queries, if they have this value."""
KEY_FEATURES = ("kv_dim",)
"""Those that are used as the number of features of keys."""


@dataclass(frozen=True)
class Heads:
    """Which heads each place has.

    With as many heads of keys as ranks, or more, these are dealt out, and the queries that use them follow. With fewer
    each is shared by some ranks, which divide the queries that use it.

    Attributes:
        total: heads of queries.
        keys: heads of keys and values.
        own: of queries, by place.
        own_keys: of keys and values, by place; ranks that share some have the same.
    """

    total: int
    keys: int
    own: tuple[Runs, ...]
    own_keys: tuple[Runs, ...]

    @classmethod
    def dealt(cls, total: int, keys: int, size: int) -> Heads:
        """Deal heads out to so many ranks; `fitting` says which numbers do.

        Example: four heads of queries, two by two with the same keys, of which two ranks each share one.
            >>> found = Heads.dealt(4, 2, 4)
            >>> found.own, found.own_keys
            ((((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)), (((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)))
        """
        group = total // keys
        if size <= keys:
            own_keys = runs_of(keys, size)
            return cls(total, keys, scaled(own_keys, group), own_keys)
        sharing = size // keys
        among = runs_of(group, sharing)
        own = [
            tuple((key * group + first, key * group + end) for first, end in among[one])
            for key in range(keys)
            for one in range(sharing)
        ]
        return cls(total, keys, tuple(own), tuple(((key, key + 1),) for key in range(keys) for _ in range(sharing)))

    @property
    def shares(self) -> bool:
        """Whether some ranks have the same keys."""
        return len(set(self.own_keys)) < len(self.own_keys)

    def count(self, place: int) -> int:
        """Return how many heads of queries a place has."""
        return sum(end - first for first, end in self.own[place])

    def count_keys(self, place: int) -> int:
        """Return how many heads of keys a place has."""
        return sum(end - first for first, end in self.own_keys[place])

    def attributes(self, module: nn.Module, features: int, key_features: int, place: int) -> dict[str, int]:
        """Return what attributes of a module have to be on a place, as far as it has them."""
        own, own_keys = self.count(place), self.count_keys(place)
        found = {name: own for name in HEADS if getattr(module, name, None) == self.total}
        found |= {name: own_keys for name in KEY_HEADS if getattr(module, name, None) == self.keys}
        found |= {name: own // own_keys for name in GROUPS if getattr(module, name, None) == self.total // self.keys}
        found |= {name: features // self.total * own for name in FEATURES if getattr(module, name, None) == features}
        found |= {
            name: key_features // self.keys * own_keys
            for name in KEY_FEATURES
            if getattr(module, name, None) == key_features
        }
        return found


def fits(total: int, keys: int, size: int) -> bool:
    """Whether heads can be dealt out to so many ranks."""
    return size <= keys or (size % keys == 0 and size <= total)


def fitting(total: int, keys: int) -> list[int]:
    """Return the numbers of ranks above one to which heads can be dealt out.

    >>> fitting(8, 2)
    [2, 4, 6, 8]
    """
    return [size for size in range(2, total + 1) if fits(total, keys, size)]


def scaled(runs: Sequence[Runs], factor: int) -> tuple[Runs, ...]:
    """Return runs of features from runs of units of so many of them.

    >>> scaled([((0, 1), (2, 3))], 4)
    (((0, 4), (8, 12)),)
    """
    return tuple(tuple((first * factor, end * factor) for first, end in own) for own in runs)


def number(places: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first of some attributes that one of the objects has as a number."""
    for place in places:
        for name in names:
            found = getattr(place, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None
