"""Norms of whole tensors for optimizers that step parts of them, equal in fp32 for any sharding.

Layer-wise optimizers (LARS, You et al., 2017; LAMB, You et al., 2020) are elementwise except for one number a tensor.
As in the global gradient norm, each rank sums squares in fp64 over its runs of each tensor. One small all-reduce a step
adds the sums of all tensors and quantities in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.precision.norms import Squares

NORMS = "shardwise_norms"
"""Optimizer attribute to which the engine assigns the norms of sharded tensors."""


@dataclass(frozen=True)
class TensorRun:
    """Elements `[start, stop)` of an optimizer's flat parameter that belong to the tensor with number `tensor`."""

    tensor: int
    start: int
    stop: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the view of the run in values with the parameter's layout."""
        return values if self.stop - self.start == values.numel() else values.view(-1)[self.start : self.stop]


class TensorNorms:
    """The tensors inside an optimizer's parameters, numbered in registration order, and their norms over all ranks.

    Args:
        groups: for each parameter group the numbers of all its tensors, on any rank.
        runs: the runs in each parameter that the optimizer steps on this rank; elements outside all runs are padding.
        counted: the runs of which this rank contributes squares; over all ranks each element counts once.
        count: number of tensors; None: as many as `groups` have.
        wide: numbers of the tensors with fp64 norms; other norms are rounded to fp32.
        device: device of the norms; the parameters may be on several (a part of the optimizer is offloaded).
        add: in-place sum of a small fp64 tensor over ranks.
        overwrites: True if the step may overwrite gradients.

    >>> weight, bias = torch.tensor([[3.0], [4.0]]), torch.zeros(2)
    >>> norms = TensorNorms.local([{"params": [weight, bias]}])
    >>> norms.of({weight: weight, bias: bias})
    [tensor([5., 0.], dtype=torch.float64)]
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        runs: Mapping[torch.Tensor, Sequence[TensorRun]],
        counted: Sequence[tuple[torch.Tensor, TensorRun]],
        *,
        count: int | None = None,
        wide: Iterable[int] = (),
        device: torch.device,
        add: Callable[[torch.Tensor], None] | None = None,
        overwrites: bool = False,
    ) -> None:
        known = 1 + max((number for numbers in groups for number in numbers), default=-1)
        self.count = known if count is None else count
        self.overwrites = overwrites
        self._runs = {parameter: tuple(found) for parameter, found in runs.items()}
        self._device = device
        by_device: dict[torch.device, list[tuple[torch.Tensor, TensorRun]]] = {}
        for parameter, run in counted:
            by_device.setdefault(parameter.device, []).append((parameter, run))
        self._counted = [
            (found, Squares([(run.tensor, run.stop - run.start) for _, run in found], self.count, place))
            for place, found in by_device.items()
        ]
        self._add = add
        # Allocated on the device once, because copying indices in every step would wait for it.
        self._members = [_indices(numbers, device) for numbers in groups]
        self._numbers = {
            parameter: _indices([run.tensor for run in found], device) for parameter, found in self._runs.items()
        }
        wide = sorted(wide)
        self._wide = _indices(wide, device) if wide else None

    @classmethod
    def local(cls, groups: Sequence[Mapping[str, Any]], *, overwrites: bool = False) -> TensorNorms:
        """Return the norms of unsharded parameters: each is one tensor. Parameters without a gradient have no run."""
        every = [parameter for group in groups for parameter in group["params"]]
        number = {id(parameter): place for place, parameter in enumerate(every)}
        present = [p for p in every if p.grad is not None or not p.requires_grad]
        runs = {p: [TensorRun(number[id(p)], 0, p.numel())] for p in present}
        return cls(
            [[number[id(p)] for p in group["params"]] for group in groups],
            runs,
            [(p, run) for p, found in runs.items() for run in found],
            wide=[number[id(p)] for p in every if p.dtype is torch.float64],
            device=every[0].device if every else torch.device("cpu"),
            overwrites=overwrites,
        )

    def single_rank(self, groups: Sequence[Mapping[str, Any]]) -> TensorNorms:
        """Return norms of other, unsharded parameters for a trial step."""
        return TensorNorms.local(groups, overwrites=self.overwrites)

    def members(self, group: int) -> torch.Tensor:
        """Return the numbers of all tensors of a parameter group."""
        return self._members[group]

    def runs(self, parameter: torch.Tensor) -> tuple[TensorRun, ...]:
        """Return the runs in a parameter of the optimizer."""
        return self._runs[parameter]

    def numbers(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the tensors of `runs(parameter)`."""
        return self._numbers[parameter]

    def of(self, *quantities: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Return the fp64 norms of all tensors for each quantity (values by parameter); zero for tensors without a run.

        Every rank calls this once a step with all its quantities, because each call is one all-reduce.
        """
        sums = torch.stack([self._sums_of_squares(values) for values in quantities])
        if self._add is not None:
            self._add(sums)
        norms = sums.sqrt()
        # Rounding to fp32 removes the differences in fp64 bits between layouts of runs.
        rounded = norms.float().double()
        if self._wide is not None:
            rounded[:, self._wide] = norms[:, self._wide]
        return list(rounded)

    def _sums_of_squares(self, values: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(self.count, dtype=torch.float64, device=self._device)
        for counted, squares in self._counted:
            total += squares.sums([run.of(values[parameter]) for parameter, run in counted]).to(self._device)
        return total


def _indices(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
