"""Tensor-parallel groups: each rank has a part of every sharded matrix.

    ranks     0 1 2 3 4 5 6 7        tensor parallelism of 2
    model     [a a][b b][c c][d d]   ranks 0 and 1 are one tensor-parallel group
    place      0 1  0 1  0 1  0 1    ranks 0, 2, 4, 6 have the same half
    data       0 0  1 1  2 2  3 3    data-parallel index

A rank's part of a tensor is declared with `shardwise.declare_part`, and replicated over the ranks with the same index.
ZeRO sharding and checkpoints follow from the declaration.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.boxes import Region, region
from shardwise.comm.communicator import Communicator
from shardwise.compat import at_end_of_backward, backward_pass, has_values
from shardwise.errors import UsageError
from shardwise.parallel.sequence import shares
from shardwise.registry import declare_part

NAME = "tensor_parallel"  # of the group in records

Runs = tuple[tuple[int, int], ...]  # a rank's ranges [first, end) of a dimension, in order


class TensorGroup:
    """A tensor-parallel group with this rank.

    Args:
        comm: of the ranks; None: unconnected.
        columns: the engine's ranks by index in their tensor-parallel groups, ascending.
        place: index of this rank.
        data: the data-parallel group, if known.

    Attributes:
        copies: number of tensor-parallel groups.
        compared: saved inputs of recomputed functions that the ranks have compared.
    """

    def __init__(
        self,
        comm: Communicator | None,
        columns: Sequence[Sequence[int]],
        place: int,
        data: Communicator | None = None,
    ) -> None:
        self._comm = comm
        self.data = data
        self.columns = [list(column) for column in columns]
        self.size, self.place = len(columns), place
        self.copies = len(columns[0])
        self.compared = 0
        self._tokens = 0
        self._totals: set[int] = set()  # equal on all ranks
        self._task: int | None = None  # backward pass at whose end the cached input is cleared
        self._entered: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # copies of a model use the same ranks

    def __reduce__(self) -> tuple[type[TensorGroup], tuple[None, list[list[int]], int]]:
        return TensorGroup, (None, self.columns, self.place)  # a pickled model is unconnected

    @property
    def comm(self) -> Communicator:
        """Communicator of the group; raises a UsageError without an engine."""
        if self._comm is None:
            raise UsageError(
                f"this model is divided over {self.size} ranks (tensor parallelism), and there is no engine that "
                "connects them. Pass it to shardwise.initialize() before it is called, and do not call it after "
                "engine.destroy()"
            )
        return self._comm

    def carries(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has values to communicate (no traced fake tensor), or a dry run counts its bytes."""
        return has_values(tensor) or self.comm.imagined

    def close(self) -> None:
        """Disconnect the ranks."""
        self._comm = self.data = None
        self.end_pass()

    def part(self, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> dict[str, Any]:
        """Return this rank's part of a tensor sharded in one dimension, as arguments of `declare_part`."""
        # Ranks with equal ranges (shared key heads) have partial gradients of their part.
        same = [place for place in range(self.size) if runs[place] == runs[self.place]]
        ranks = sorted(rank for place in same for rank in self.columns[place])
        return {"ranks": ranks, "box": self.box(shape, dim, runs), "divisor": self.copies}

    def declare(self, parameter: nn.Parameter, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> None:
        """Declare this rank's part of a tensor sharded in one dimension; arguments as of `part`."""
        declare_part(parameter, shape=shape, **self.part(shape, dim, runs))

    def declare_summands(self, parameter: nn.Parameter) -> None:
        """Declare that each rank has a partial gradient of an unsharded parameter."""
        declare_part(parameter, ranks=sorted(rank for column in self.columns for rank in column), divisor=self.copies)

    def box(self, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> Region:
        """Return this rank's box of such a tensor; arguments as of `part`."""
        found: list[Any] = [(0, size) for size in shape]
        found[dim] = runs[self.place]
        return region(found)

    # -- sharded tokens outside of tensor-parallel layers --------------------------------------------------------------

    def begin_tokens(self, tokens: int) -> list[int]:
        """Split tokens over the ranks; return the number of each, as equal as possible. Later layers gather as many."""
        self._tokens = tokens
        self._totals.add(tokens)
        return shares(tokens, self.size)

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that the ranks share."""
        return self._tokens

    def tokens_of_all(self, own: int) -> list[int]:
        """Return the number of tokens of each rank, as split before; raises a UsageError if this rank's differs."""
        # With several sequence lengths a recomputed block may belong to an earlier pass.
        if backward_pass() is not None and len(self._totals) > 1:
            # This rank has `own` tokens of `size` consecutive totals. If the known totals are that far apart, every
            # rank knows which it is; otherwise all ranks exchange their numbers.
            least = (own - 1) * self.size + self.place + 1
            fitting = self._totals.intersection(range(least, least + self.size))
            if fitting:
                total = fitting.pop()
                near = self._totals.intersection(range(total - self.size + 1, total + self.size))
                self._tokens = total if len(near) == 1 else sum(self.comm.exchange(own, "tensor_tokens"))
        found = shares(self._tokens, self.size)
        if found[self.place] != own:
            raise UsageError(
                f"tensor parallelism: a norm has got {own} tokens, and the {self._tokens} of the sequence give this "
                f"rank {found[self.place]}. With tensor_parallel.sequence_parallel each rank has its own tokens from "
                "the first block to the last norm: name the norms before divided layers, and the last, in "
                "tensor_parallel.partition_config.layer_specs (partition_type norm)"
            )
        return found

    def tokens_of_whole(self, tokens: int) -> list[int]:
        """Return the tokens of each rank, after a layer has computed a sequence; raises a UsageError if incomplete."""
        if backward_pass() is not None and tokens in self._totals:
            self._tokens = tokens
        if tokens != self._tokens:
            raise UsageError(
                f"tensor parallelism: a layer has computed {tokens} tokens, of {self._tokens} of the sequence. With "
                "tensor_parallel.sequence_parallel there has to be a norm before it that puts tokens together: name it "
                "in tensor_parallel.partition_config.layer_specs (partition_type norm)"
            )
        return shares(tokens, self.size)

    # -- shared activations -------------------------------------------------------------------------------------------

    def entered(self, given: torch.Tensor) -> torch.Tensor | None:
        """Return the cached tensor-parallel input of the previous layer, if it had the same input."""
        if self._entered is None:
            return None
        before, version, made = self._entered
        return made if before() is given and version == given._version else None

    def note_entered(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """Cache a tensor-parallel input for layers with the same input, until the next one."""
        self._entered = weakref.ref(given), given._version, made
        task = backward_pass()
        if task not in (None, self._task):
            self._task = task
            at_end_of_backward(self.end_pass)

    def end_pass(self, *_: Any) -> None:
        """Clear the cached input."""
        self._entered = None


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Return a few numbers that differ for different tensors."""
    if not tensor.numel():
        return [list(tensor.shape)]
    flat = tensor.detach().reshape(-1).double()
    weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
    return [list(tensor.shape), float(flat.nan_to_num() @ weights)]
