"""Groups of ranks laid over machines, from each rank's machine (`Communicator.nodes`), in any order of ranks.

ranks 0 and 2 on a, ranks 1 and 3 on b: groups of 2 are [0 2][1 3]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.comm.coded import ranks_in_words

_ROWS = 8
"""Machines that have a row each in the table."""


def by_machine(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each machine; machines in the order of their first ranks.

    >>> by_machine(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def groups_of(nodes: Sequence[str], size: int) -> list[list[int]]:
    """Return groups of `size` ranks, which divides their number: as many as possible inside of machines.

    Ranks that remain on machines form groups in the order of machines, hence whole machines where sizes allow it.

    >>> groups_of(["a", "b", "a", "b"], 2), groups_of(["a", "a", "a", "b"], 2)
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    groups, rest = [], []
    for ranks in by_machine(nodes).values():
        whole = len(ranks) - len(ranks) % size
        groups += [ranks[at : at + size] for at in range(0, whole, size)]
        rest += ranks[whole:]
    groups += [rest[at : at + size] for at in range(0, len(rest), size)]
    return sorted(groups, key=min)


def machines_of(nodes: Sequence[str], lines: Sequence[Sequence[int]]) -> int:
    """Return the largest number of machines on which one of some groups of ranks lies."""
    return max(len({nodes[rank] for rank in line}) for line in lines)


def split_by(nodes: Sequence[str], lines: Sequence[Sequence[int]]) -> str:
    """Return in words the first group that lies on several machines and has a part of a machine; empty: none has."""
    ranks = by_machine(nodes)
    for line in lines:
        there = list(dict.fromkeys(nodes[rank] for rank in line))
        if len(there) > 1 and sum(len(ranks[node]) for node in there) != len(line):
            sizes = ", ".join(f"{len(ranks[node])} on {node}" for node in there)
            return f"{ranks_in_words(sorted(line))} lie on {len(there)} machines, whose ranks are {sizes}"
    return ""


def topology(
    nodes: Sequence[str], facts: Sequence[Sequence[str]], dimensions: Mapping[str, Sequence[Sequence[int]]]
) -> str:
    """Return a table of the machines, and a line for each mesh dimension: the groups' sizes and machines.

    `facts` has interface and device of each rank; `dimensions` the groups of ranks by name. Of many machines, those
    with the same number of ranks, devices and interface have one row.
    """
    machines = by_machine(nodes)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for node, ranks in machines.items():
        what = (len(ranks), *(", ".join(dict.fromkeys(facts[rank][place] for rank in ranks)) for place in (1, 0)))
        alike.setdefault(what if len(machines) > _ROWS else (*what, node), []).append(node)
    rows = [("machine", "ranks", "devices", "interface")]
    for (_, devices, interface, *_), some in alike.items():
        held = [rank for node in some for rank in machines[node]]
        named = some[0] if len(some) == 1 else f"{len(some)}: {some[0]}, {some[1]}{', ...' * (len(some) > 2)}"
        rows.append((named, f"{len(held)} ({_numbers(held)})", devices, interface))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, groups in dimensions.items():
        count = machines_of(nodes, groups)
        where = "inside of machines" if count == 1 else f"across {count} machines"
        lines.append(f"{name}: {len(groups)} x {len(groups[0])} ranks, {where}")
    return "\n".join(lines)


def _numbers(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ranges with a stride.

    >>> _numbers([0, 1, 2]), _numbers([0, 2, 4]), _numbers([0, 3, 4])
    ('0-2', '0-4 by 2', '0, 3, 4')
    """
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
