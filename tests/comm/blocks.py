"""Reductions of quantised blocks, written down as they are defined: all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rounded(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """What comes out of the codes of a 1-D tensor."""
    levels = 2 ** (bits - 1) - 1
    parts = []
    for part in values.split(block):
        top = part.abs().max()
        parts.append((part * (levels / top)).round() * (top / levels) if top else part)
    return torch.cat(parts)


class Simulation:
    """All ranks: what each sends to each, what nodes send to each other, and what is kept of it.

    Args:
        world: ranks.
        node: ranks to a node; `world`: one hop.
        bits: of a code.
        block: values to a scale.
        memory: of the error feedback; None: there is none.
    """

    def __init__(self, world: int, node: int, bits: int, block: int, memory: float | None) -> None:
        self.world, self.node, self.bits, self.block, self.memory = world, node, bits, block, memory
        self.errors: dict[object, torch.Tensor] = {}

    def _send(self, key: object, values: torch.Tensor) -> torch.Tensor:
        old = self.errors.get(key, torch.zeros_like(values, dtype=torch.bfloat16)).float()
        wanted = values + old if self.memory is not None else values
        sent = rounded(wanted, self.bits, self.block)
        if self.memory is not None:
            missing = wanted - sent
            self.errors[key] = (missing * (1 - self.memory) + old * self.memory if self.memory else missing).bfloat16()
        return sent

    def reduce(self, name: str, fulls: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums of all ranks' ranges, one after the other, of what each rank has for all."""
        shard = fulls[0].numel() // self.world
        parts = [full.float().split(shard) for full in fulls]
        sums = []
        for owner in range(self.world):
            terms = [self._send((name, rank, owner), full[owner]) for rank, full in enumerate(parts)]
            if self.node < self.world:
                nodes = [sum(terms[n + 1 : n + self.node], terms[n]) for n in range(0, self.world, self.node)]
                terms = [self._send((name, "node", n, owner), total) for n, total in enumerate(nodes)]
            sums.append(sum(terms[1:], terms[0]))
        return torch.cat(sums)
