"""Distribution of attention heads over ranks, and the module attributes that hold their numbers."""

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
# Attributes of attention modules for the number of query features, if they have this value.
FEATURES = (
    "inner_dim",
    "all_head_size",
    "split_size",
    "embed_dim",
    "hidden_size",
    "hidden_size_per_partition",
)
KEY_FEATURES = ("kv_dim",)  # attributes for the number of key features


@dataclass(frozen=True)
class Heads:
    """Query heads, and key and value heads, of all ranks and of each.

    With at least as many key heads as ranks, key heads are distributed, and query heads follow. With fewer, each key
    head is shared by several ranks, which split its query heads.
    """

    total: int
    keys: int
    own: tuple[Runs, ...]
    own_keys: tuple[Runs, ...]

    @classmethod
    def dealt(cls, total: int, keys: int, size: int) -> Heads:
        """Distribute heads over `size` ranks (supported sizes: `fitting`).

        >>> found = Heads.dealt(4, 2, 4)  # two ranks share each key head
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
        """True if ranks share key heads."""
        return len(set(self.own_keys)) < len(self.own_keys)

    def count(self, place: int) -> int:
        """Return the number of query heads of a rank."""
        return sum(end - first for first, end in self.own[place])

    def count_keys(self, place: int) -> int:
        """Return the number of key heads of a rank."""
        return sum(end - first for first, end in self.own_keys[place])

    def attributes(self, module: nn.Module, features: int, key_features: int, place: int) -> dict[str, int]:
        """Return the rank's values of a module's existing attributes."""
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
    """Return True if heads can be distributed over `size` ranks."""
    return size <= keys or (size % keys == 0 and size <= total)


def fitting(total: int, keys: int) -> list[int]:
    """Return the numbers of ranks above one that support the heads.

    >>> fitting(8, 2)
    [2, 4, 6, 8]
    """
    return [size for size in range(2, total + 1) if fits(total, keys, size)]


def scaled(runs: Sequence[Runs], factor: int) -> tuple[Runs, ...]:
    """Scale ranges of units to ranges of features.

    >>> scaled([((0, 1), (2, 3))], 4)
    (((0, 4), (8, 12)),)
    """
    return tuple(tuple((first * factor, end * factor) for first, end in own) for own in runs)


def number(places: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first of some attributes that an object has as a positive integer."""
    for place in places:
        for name in names:
            found = getattr(place, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None
