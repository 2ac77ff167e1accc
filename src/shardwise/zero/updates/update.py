"""Steps of sharded parameters: the tensors that an optimizer is given, and the way of its results back.

An elementwise optimizer steps segments (`shardwise.zero.updates.segments`). One that needs whole tensors steps those
that a rank owns (`shardwise.zero.updates.owner_sharded`). One optimizer may have groups of both kinds. The client's
optimizer instance is kept: its parameter groups are edited in place, and its state goes with the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import StateHome
from shardwise.registry import LogicalTensor
from shardwise.zero.units.unit import Unit

StateKind = Callable[[Any, int, str], bool]
"""Whether an entry of an optimizer's state has one value per element: (value, elements of the parameter, name)."""


@dataclass(frozen=True)
class Stepping:
    """What an optimizer has to be given.

    Attributes:
        whole: parameter groups whose tensors are stepped whole; those of the others are stepped in flat segments.
        norms: the optimizer asks for norms of the tensors that segments are parts of.
        cost: of stepping a whole tensor of a shape, by which owners are balanced; None: elements.
        communicates: the optimizer reduces gradients itself (see `shardwise.zero.updates.communicated`).
    """

    whole: frozenset[int] = frozenset()
    norms: bool = False
    cost: Callable[[Sequence[int]], float] | None = None
    communicates: bool = False


class Update(Protocol):
    """One way of stepping sharded parameters."""

    def capture(self, unit: Unit) -> None:
        """Take what is needed from a unit whose whole values are valid for the last time."""

    def bind(self) -> None:
        """Give the optimizer what it is to step, after all units have been captured."""

    def takes_factor(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `step` can multiply the gradients now; else they have to be multiplied before."""

    def step(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`; write the results into the parameters' memory."""

    def end_step(self) -> None:
        """The step is over: the next one begins anew."""

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over parameter values of a gathered unit that somebody has changed.

        Elements whose value is as it was keep the master's extra digits, except in the parameters `loaded`.
        """

    def share_changes(self) -> None:
        """Bring changes to masters that are on ranks which `refresh` does not reach (all ranks call)."""

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the runs of a parameter of which the master is stored on this rank."""

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return the same runs as (start, stop, 1-D master view); what lives elsewhere has to be lent."""

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, stop, 1-D view) for the runs of an elementwise optimizer state stored on this rank."""

    def state(self, index: int) -> Mapping[str, Any]:
        """Return all that the optimizer keeps on this rank for (the segment of) a parameter; empty if nothing."""

    def clear_state(self) -> None:
        """Forget all optimizer state."""

    def stepped_together(self, key: str) -> list[list[int]]:
        """Return sets of parameters that have, on this rank, one value of an entry that is not elementwise."""

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Give a parameter state: zeros for elementwise entries, to be filled through `state_pieces`, and whole values.

        Args:
            index: the parameter.
            elementwise: dtype by name of entries that have one value per element.
            whole: values by name of the other entries.
            filled: the caller writes these entries of every parameter, so that only padding needs zeros.

        Raises:
            CheckpointError: parameters that are stepped together would have different whole values.
        """

    def publish(self, unit: Unit) -> None:
        """Write masters that somebody has changed into the parameters' memory (all ranks call)."""

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield master weights that belong to no section, and where they live."""

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield what the optimizer keeps for more than one element, and where it lives."""

    def take_new_views(self) -> None:
        """Whole parameters lie in other memory now: so does what is stepped there."""

    def stays_local(self) -> bool:
        """Whether the gradients of the window that begins now are only added up locally (the same on all ranks)."""

    def check_agreed(self, what: str) -> None:
        """Raise where every rank has parameters of its own, and `what` is about to be changed on all of them.

        Raises:
            UsageError: see above.
        """

    def state_was_set(self) -> None:
        """State has been changed through `state_pieces`."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank knows, for its part of a checkpoint; None if nothing."""

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take it over again; return whether it fits the layout, or there was nothing."""

    def detach(self) -> None:
        """The engine is being closed."""


class ReducedUpdate:
    """What is the same for optimizers that get reduced gradients; see `Update`."""

    def stays_local(self) -> bool:
        """See `Update.stays_local`."""
        return False

    def end_step(self) -> None:
        """See `Update.end_step`."""

    def share_changes(self) -> None:
        """See `Update.share_changes`: masters are where their parameters are."""

    def check_agreed(self, what: str) -> None:
        """See `Update.check_agreed`: all ranks have the same parameters."""

    def state_was_set(self) -> None:
        """See `Update.state_was_set`."""

    def rank_state(self) -> dict[str, Any] | None:
        """See `Update.rank_state`."""
        return None

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """See `Update.load_rank_state`."""
        return state is None

    def detach(self) -> None:
        """See `Update.detach`."""


class Placing(Protocol):
    """What puts parameters of its own making into an optimizer's groups."""

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add to the members of each group; take over state, by `id` of the client's parameter."""


def assign_groups(optimizer: torch.optim.Optimizer, members: Sequence[Sequence[nn.Parameter]]) -> None:
    """Replace the parameters of an optimizer's groups in place."""
    for group, parameters in zip(optimizer.param_groups, members, strict=True):
        group["params"] = list(parameters)


def tensors_of(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield what an optimizer keeps for more than one element; counts of steps stay where they are."""
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 1:
            yield value


def hold(state: Mapping[str, Any], accountant: Accountant, tier: Tier) -> None:
    """Tell the accountant about what an optimizer keeps for one parameter, and on what that lies."""
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            accountant.hold(Category.OPTIMIZER, value, tier)


def bind(optimizer: torch.optim.Optimizer, parts: Sequence[Placing]) -> None:
    """Put what all parts step into the optimizer's groups, with the state that their parameters had."""
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    old_state = _take_state(optimizer)
    for part in parts:
        part.place(members, old_state)
    assign_groups(optimizer, members)


def as_gradient(values: torch.Tensor, master: torch.Tensor, accountant: Accountant) -> torch.Tensor:
    """Return accumulated values in the dtype of what they update (the same ones, unless it was chosen narrower)."""
    if values.dtype == master.dtype:
        return values
    wide = values.to(master.dtype)
    accountant.hold(Category.GRADIENTS, wide)
    return wide


def state_dtype(value: torch.Tensor, tensor: LogicalTensor, master: torch.Tensor) -> torch.dtype:
    """Return the dtype of adopted state: state in the parameter's own dtype goes on in the master's."""
    return master.dtype if value.dtype is tensor.source_dtype else value.dtype


def state_of_part(state: dict[str, Any], tensor: LogicalTensor, is_elementwise: StateKind) -> dict[str, Any]:
    """Return the state of a rank's part: entries that the optimizer has for the whole tensor are cut as it is."""
    return {
        key: tensor.cut(value) if is_of_whole(key, value, tensor, is_elementwise) else value
        for key, value in state.items()
    }


def is_of_whole(key: str, value: Any, tensor: LogicalTensor, is_elementwise: StateKind) -> bool:
    """Whether an entry of state has one value per element of a whole tensor, of which this rank has a part.

    So it is where an optimizer has stepped a parameter, or loaded its state, before that became a part.
    """
    shape = tensor.global_shape
    return tensor.box is not None and is_elementwise(value, math.prod(shape), key) and tuple(value.shape) == shape


def _take_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Remove and return the state an optimizer already has, by `id(parameter)`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): optimizer.state.pop(p) for p in parameters if p in optimizer.state}


def add_state(
    optimizer: torch.optim.Optimizer,
    tensor: LogicalTensor,
    stepped: nn.Parameter,
    state: dict[str, Any],
    elementwise: Mapping[str, torch.dtype],
    whole: Mapping[str, Any],
    *,
    filled: bool = False,
) -> None:
    """Add entries to the state of a segment or master that `tensor` is part of; elementwise ones blank if `filled`."""
    settings = optimizer.param_groups[tensor.group or 0]
    on_device = settings.get("capturable") or settings.get("fused")
    for key, dtype in elementwise.items():
        if key not in state:
            # Zeros that are overwritten at once would cost as much as reading what takes their place.
            state[key] = (torch.empty_like if filled else torch.zeros_like)(stepped.detach(), dtype=dtype)
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            # As in torch: a step count that the host counts stays there.
            value = value.to("cpu" if key == "step" and not on_device else stepped.device, copy=True)
        if key not in state:
            state[key] = value
        elif not equal_values(state[key], value):
            raise CheckpointError(
                f"optimizer state {key!r} of {tensor.name!r} is {value!r}; that of parameters which are stepped "
                f"together with it is {state[key]!r}. Put them into different parameter groups, or start with fresh "
                "optimizer state"
            )


def equal_values(first: Any, second: Any) -> bool:
    """Whether two entries of an optimizer's state or groups are of one type and have the same values."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def take_changes(master: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite the elements of a master that are not, rounded, what is given; the others keep their digits."""
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))
