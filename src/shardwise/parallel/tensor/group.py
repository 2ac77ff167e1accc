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

from shardwise.boxes import Region, region
from shardwise.comm.communicator import Communicator
from shardwise.compat import backward_pass, has_values
from shardwise.errors import UsageError
from shardwise.parallel.sequence import shares
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
        self._totals: set[int] = set()
        self._entered: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

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

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has values that can be exchanged, or ranks that are imagined count its bytes.

        A fake tensor among real ranks (a model that is traced) is not sent.
        """
        return has_values(tensor) or self.comm.imagined

    def close(self) -> None:
        """Nothing connects the ranks from now on."""
        self._comm = self.data = None
        self.end_pass()

    def part(self, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> dict[str, Any]:
        """Return what this rank has of a tensor that is divided in one dimension, as `declare_part` is told of it.

        Ranks at places with the same runs (heads that several ranks need) form their part's gradient together: each
        has a summand of it.

        Args:
            shape: of the whole tensor.
            dim: that is divided.
            runs: what the rank at each place has.
        """
        same = [place for place in range(self.size) if runs[place] == runs[self.place]]
        ranks = sorted(rank for place in same for rank in self.columns[place])
        return {"ranks": ranks, "box": self.box(shape, dim, runs), "divisor": self.copies}

    def declare(self, parameter: nn.Parameter, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> None:
        """Say what this rank has of a tensor that is divided in one dimension; arguments as of `part`."""
        declare_part(parameter, shape=shape, **self.part(shape, dim, runs))

    def declare_summands(self, parameter: nn.Parameter) -> None:
        """Say that each rank has a summand of the gradient of a parameter, which all ranks have whole."""
        declare_part(parameter, ranks=sorted(rank for column in self.columns for rank in column), divisor=self.copies)

    def box(self, shape: Sequence[int], dim: int, runs: Sequence[Runs]) -> Region:
        """Return what this rank has of such a tensor; arguments as of `part`."""
        found: list[Any] = [(0, size) for size in shape]
        found[dim] = runs[self.place]
        return region(found)

    # -- tokens that the ranks share outside of divided layers ---------------------------------------------------------

    def begin_tokens(self, tokens: int) -> list[int]:
        """Return how many of so many tokens each place gets: as equal as can be. Later layers put as many together."""
        self._tokens = tokens
        self._totals.add(tokens)
        return shares(tokens, self.size)

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that the ranks share."""
        return self._tokens

    def tokens_of_all(self, own: int) -> list[int]:
        """Return how many tokens each place has, as they have been shared before.

        A block that is recomputed may be one of an earlier pass. So if sequences differ in length, its ranks tell each
        other.

        Raises:
            UsageError: this rank has another number.
        """
        if backward_pass() is not None and len(self._totals) > 1:
            self._tokens = sum(self.comm.exchange(own, "tensor_tokens"))
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
        """Return how many of a sequence's tokens each place has, all of which a layer has computed.

        Raises:
            UsageError: it has computed some of them.
        """
        if backward_pass() is not None and tokens in self._totals:
            self._tokens = tokens
        if tokens != self._tokens:
            raise UsageError(
                f"tensor parallelism: a layer has computed {tokens} tokens, of {self._tokens} of the sequence. With "
                "tensor_parallel.sequence_parallel there has to be a norm before it that puts tokens together: name it "
                "in tensor_parallel.partition_config.layer_specs (partition_type norm)"
            )
        return shares(tokens, self.size)

    # -- what layers share ---------------------------------------------------------------------------------------------

    def entered(self, given: torch.Tensor) -> torch.Tensor | None:
        """Return what has been made of the same tensor by the layer before, whose input it was, too."""
        if self._entered is None:
            return None
        before, version, made = self._entered
        return made if before() is given and version == given._version else None

    def note_entered(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """Note what has been made of a tensor, for the layers that get the same one; it is held until the next one."""
        self._entered = weakref.ref(given), given._version, made

    def end_pass(self, *_: Any) -> None:
        """Let go of what is held."""
        self._entered = None


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Return a few numbers that differ where tensors do."""
    if not tensor.numel():
        return [list(tensor.shape)]
    flat = tensor.detach().reshape(-1).double()
    weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
    return [list(tensor.shape), float(flat.nan_to_num() @ weights)]
