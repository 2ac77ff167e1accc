"""Steps of sharded parameters: the tensors that an optimizer is given, and the way of its results back.

An elementwise optimizer steps segments (`shardwise.zero.updates.segments`). One that needs whole tensors steps those
that a rank owns (`shardwise.zero.updates.owner_sharded`). One optimizer may have groups of both kinds. The client's
optimizer instance is kept: its parameter groups are edited in place, and its state goes with the parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import StateHome
from shardwise.registry import LogicalTensor
from shardwise.zero.units.flat_param import FlatParamStorage
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
        communicates: the optimizer reduces gradients itself (see `shardwise.zero.updates.comm_optimizer`).
    """

    whole: frozenset[int] = frozenset()
    norms: bool = False
    cost: Callable[[Sequence[int]], float] | None = None
    communicates: bool = False


class UpdatePart:
    """Steps some of the flat parameters of all units, in steps of the optimizer that other parts share.

    Args:
        optimizer: of which the part fills parameter groups.
        accountant: counts gradients and state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accountant: Accountant) -> None:
        self.optimizer = optimizer
        self._accountant = accountant
        self._scaled: dict[int, float | torch.Tensor] = {}  # factors that gradients have been multiplied by, by section
        self._factors: dict[torch.device, torch.Tensor] = {}  # of this step, by device

    def capture(self, unit: Unit) -> None:
        """Take what is needed from a unit, whose unsharded values are valid for the last time."""

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add to the members of each group; take over state, by `id` of the client's parameter."""
        raise NotImplementedError

    def step(self, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`, where no other part does."""
        with self.around(factor):
            self.optimizer.step()

    def around(self, factor: float | torch.Tensor) -> AbstractContextManager[None]:
        """Give the optimizer gradients times `factor`, and write the results into the parameters' memory afterwards."""
        raise NotImplementedError

    def scaled(self, section: FlatParamStorage, gradient: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Return the gradient of a flat parameter times the factor of the step, in the same memory if it has 32 bits.

        Because an optimizer that has raised may be called again, memory that stays is multiplied once in a step.
        """
        known = self._scaled.get(id(section))
        if known is not None or (isinstance(factor, float) and factor == 1.0):
            return gradient
        wide = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        if isinstance(factor, torch.Tensor) and section.steps_apart:
            # The host waits once in a step; after each part it would also wait for copies to the device.
            near = self._factors.get(wide.device)
            factor = self._factors[wide.device] = factor.to(wide.device) if near is None else near
        wide.mul_(factor)
        if wide is not gradient:
            self._accountant.hold(Category.GRADIENTS, wide)
        elif not section.lends_gradient:
            self._scaled[id(section)] = factor
        return wide

    def factor_in(self, section: FlatParamStorage) -> float | torch.Tensor:
        """Return what the gradient of a flat parameter has been multiplied by in a step that has not ended."""
        return self._scaled.get(id(section), 1.0)

    def end_step(self) -> None:
        """Forget the step: the next one begins anew."""
        self._scaled.clear()
        self._factors.clear()

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over parameter values of an unsharded unit that a script has changed.

        Elements whose value is as it was keep the master's extra digits, except in the parameters `loaded`.
        """

    def share_changes(self) -> None:
        """Bring changes to masters that are on ranks which `refresh` does not reach (all ranks call)."""

    def has(self, index: int) -> bool:
        """Return True if the part steps a parameter, here or on another rank."""
        raise NotImplementedError

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the ranges of a parameter of which the master is stored on this rank."""
        raise NotImplementedError

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return the same ranges as (start, stop, 1-D master view); what lives elsewhere has to be lent."""
        raise NotImplementedError

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, stop, 1-D view) for the ranges of an elementwise optimizer state stored on this rank."""
        raise NotImplementedError

    def state(self, index: int) -> Mapping[str, Any]:
        """Return all that the optimizer keeps on this rank for (the segment of) a parameter; empty if nothing."""
        raise NotImplementedError

    def keep_state(self) -> None:
        """Have what the optimizer keeps for each element live where it should."""

    def stepped_together(self, key: str) -> list[list[int]]:
        """Return sets of parameters that have, on this rank, one value of an entry that is not elementwise."""
        return []

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
        raise NotImplementedError

    def publish(self, unit: Unit) -> None:
        """Write masters that a script has changed into the parameters' memory (all ranks call)."""
        raise NotImplementedError

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield master weights that belong to no section, and where they live."""
        yield from ()

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield what the optimizer keeps for more than one element, and where it lives."""
        yield from ()

    def take_new_views(self) -> None:
        """Step unsharded parameters in the memory in which they lie now."""


class Update:
    """Steps the sharded parameters of one engine. The optimizer steps once, for all parts.

    This is the update of an optimizer whose gradients the engine reduces. A subclass serves optimizers that average
    over ranks themselves (`shardwise.zero.updates.comm_optimizer`).

    Args:
        optimizer: its parameter groups are edited in place.
        parts: each serves some of the flat parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[UpdatePart]) -> None:
        self.optimizer = optimizer
        self.parts = list(parts)

    def part_of(self, index: int) -> UpdatePart:
        """Return the part that steps a parameter."""
        return next((part for part in self.parts if part.has(index)), self.parts[0])

    def capture(self, unit: Unit) -> None:
        """Take what is needed from a unit, whose unsharded values are valid for the last time."""
        for part in self.parts:
            part.capture(unit)

    def bind(self, own_gradient: Callable[[FlatParamStorage], torch.Tensor], written: Callable[[], None]) -> None:
        """Give the optimizer what it is to step, with the state that its parameters had, after all units are captured.

        Args:
            own_gradient: returns this rank's gradient of a flat parameter, where gradients are not reduced.
            written: is called after parameters have changed outside of a step.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        old_state = {id(p): self.optimizer.state.pop(p) for p in parameters if p in self.optimizer.state}
        members: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for part in self.parts:
            part.place(members, old_state)
        assign_groups(self.optimizer, members)

    def step(self, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`, and write the results into the parameters' memory."""
        if len(self.parts) == 1:
            self.parts[0].step(factor)
            return
        with contextlib.ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.around(factor))
            self.optimizer.step()

    def factor_in(self, section: FlatParamStorage, index: int) -> float | torch.Tensor:
        """Return what the gradient of a flat parameter has been multiplied by in a step that has not ended."""
        return self.part_of(index).factor_in(section)

    def end_step(self) -> None:
        """Forget the step: the next one begins anew."""
        for part in self.parts:
            part.end_step()

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over changed parameter values of a unit; see `UpdatePart.refresh`."""
        for part in self.parts:
            part.refresh(unit, loaded)

    def share_changes(self) -> None:
        """Bring changes to masters on other ranks (all ranks call)."""
        for part in self.parts:
            part.share_changes()

    def publish(self, unit: Unit) -> None:
        """Write masters that a script has changed into the parameters' memory (all ranks call)."""
        for part in self.parts:
            part.publish(unit)

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the ranges of a parameter of which the master is stored on this rank."""
        return self.part_of(index).master_ranges(index)

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return the same ranges with views of the master."""
        return self.part_of(index).master_pieces(index)

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return the ranges of an elementwise optimizer state with their views."""
        return self.part_of(index).state_pieces(index, key)

    def state(self, index: int) -> Mapping[str, Any]:
        """Return all that the optimizer keeps on this rank for a parameter."""
        return self.part_of(index).state(index)

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Give a parameter state; see `UpdatePart.make_state`."""
        self.part_of(index).make_state(index, elementwise, whole, filled=filled)

    def clear_state(self) -> None:
        """Forget all optimizer state."""
        self.optimizer.state.clear()
        for part in self.parts:
            part.keep_state()

    def stepped_together(self, key: str) -> list[list[int]]:
        """Return sets of parameters that have one value of an entry that is not elementwise."""
        return [found for part in self.parts for found in part.stepped_together(key)]

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield master weights that belong to no section, and where they live."""
        for part in self.parts:
            yield from part.own_masters()

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield what the optimizer keeps for more than one element, and where it lives."""
        for part in self.parts:
            yield from part.own_state()

    def take_new_views(self) -> None:
        """Step unsharded parameters in the memory in which they lie now."""
        for part in self.parts:
            part.take_new_views()

    # -- optimizers that average over ranks themselves ---------------------------------------------------------------

    def stays_local(self) -> bool:
        """Return True if the window that begins now has no reduction in backward (the same on all ranks)."""
        return False

    def begin_averaging(self) -> bool:
        """Go on with the steps that average over ranks, for plans of memory; return False if there are none."""
        return False

    def check_agreed(self, what: str) -> None:
        """Raise where every rank has parameters of its own, and `what` is about to be changed on all of them.

        Raises:
            UsageError: see above.
        """

    def check_movable(self, what: str) -> None:
        """Raise where optimizer state cannot leave the device for a while.

        Raises:
            UsageError: see above.
        """

    def state_was_set(self) -> None:
        """Take note that state has been changed through `state_pieces`."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank keeps, for its part of a checkpoint; None if nothing."""
        return None

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take over what `rank_state` has returned; return False if it is of another layout."""
        return state is None

    def detach(self) -> None:
        """Free the optimizer of the engine, which is being closed."""


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
