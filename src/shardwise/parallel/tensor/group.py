"""The group of ranks that share tensors: each has a part of every matrix that is divided.

    ranks     0 1 2 3 4 5 6 7        tensor parallelism of 2
    model     [a a][b b][c c][d d]   ranks 0 and 1 have one copy of the model, in halves
    place      0 1  0 1  0 1  0 1    ranks 0, 2, 4, 6 have the same half
    data       0 0  1 1  2 2  3 3    which samples a rank gets

What a rank has of a tensor is a part (`shardwise.declare_part`), which the ranks at its place share; everything else
about it, from ZeRO stages to checkpoints, follows from that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.errors import UsageError
from shardwise.registry import declare_part

NAME = "tensor_parallel"
"""Of the group, in records."""

Runs = tuple[tuple[int, int], ...]
"""What a rank has of a dimension: (first, end), one behind the other."""


class TensorGroup:
    """The ranks that have one copy of the model among them, this one among them.

    Args:
        comm: of the ranks; None: nothing connects them (any more, or yet).
        columns: the ranks of the engine at each place, by place, in ascending order.
        place: of this rank.
        data: of the ranks that get different samples, where these are known.

    Attributes:
        data: see above.
        size: number of ranks.
        place: of this rank among them.
        columns: see above.
        copies: copies of the model.
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
        self._entered: tuple[weakref.ref[torch.Tensor], int, weakref.ref[torch.Tensor]] | None = None

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # a copy of a model belongs to the same ranks

    def __reduce__(self) -> tuple[type[TensorGroup], tuple[None, list[list[int]], int]]:
        return TensorGroup, (None, self.columns, self.place)  # a pickled model has no ranks

    @property
    def comm(self) -> Communicator:
        """Carries what the ranks exchange.

        Raises:
            UsageError: there is no engine any more, or none yet.
        """
        if self._comm is None:
            raise UsageError(
                f"this model is divided over {self.size} ranks (tensor parallelism), and there is no engine that "
                "connects them. Pass it to shardwise.initialize() before it is called, and do not call it after "
                "engine.destroy()"
            )
        return self._comm

    def close(self) -> None:
        """Nothing connects the ranks from now on."""
        self._comm = self.data = None

    def declare(self, parameter: nn.Parameter, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> None:
        """Say what this rank has of a tensor that is divided in one dimension.

        Ranks at places with the same runs (heads that several ranks need) form their part's gradient together: each
        has a summand of it.

        Args:
            parameter: this rank's.
            shape: of the whole tensor.
            dim: that is divided.
            runs: what the rank at each place has.
        """
        same = [place for place in range(self.size) if runs[place] == runs[self.place]]
        declare_part(
            parameter,
            ranks=sorted(rank for place in same for rank in self.columns[place]),
            shape=shape,
            box=self.box(shape, dim, runs),
            divisor=self.copies,
        )

    def box(self, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> Any:
        """Return what this rank has of such a tensor; arguments as of `declare`."""
        found: list[Any] = [(0, size) for size in shape]
        own = runs[self.place]
        found[dim] = own[0] if len(own) == 1 else own
        return tuple(found)

    # -- tokens that the ranks share outside of divided layers ---------------------------------------------------------

    def share_tokens(self, tokens: int) -> list[int]:
        """Return how many of so many tokens each place gets: as equal as can be. Later layers put as many together."""
        self._tokens = tokens
        return [tokens // self.size + (place < tokens % self.size) for place in range(self.size)]

    def tokens_of_all(self, own: int) -> list[int]:
        """Return how many tokens each place has, as they have been shared before.

        Raises:
            UsageError: this rank has another number.
        """
        shares = self.share_tokens(self._tokens)
        if shares[self.place] != own:
            raise UsageError(
                f"tensor parallelism: a layer has got {own} tokens, and the {self._tokens} of the sequence give this "
                f"rank {shares[self.place]}. Between divided layers each rank has its own tokens"
            )
        return shares

    # -- what layers share ---------------------------------------------------------------------------------------------

    def entered(self, given: torch.Tensor) -> torch.Tensor | None:
        """Return what has been made of the same tensor by the layer before, whose input it was, too."""
        if self._entered is None:
            return None
        before, version, made = self._entered
        return made() if before() is given and version == given._version else None

    def note_entered(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """Note what has been made of a tensor, for the layers that get the same one."""
        self._entered = (weakref.ref(given), given._version, weakref.ref(made))


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Return a few numbers that differ where tensors do."""
    if not tensor.numel():
        return [list(tensor.shape)]
    flat = tensor.detach().reshape(-1).double()
    weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
    return [list(tensor.shape), float(flat.nan_to_num() @ weights)]
