"""Updates: optimizer steps of sharded parameters.

An elementwise optimizer steps segments of flat parameters (`segments`). An optimizer that needs unsharded tensors steps
the tensors that a rank owns (`owner_sharded`). One optimizer may have groups of both kinds. The client's optimizer
instance is kept: its groups are edited in place, and its state is taken over.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.compat import share_memory
from shardwise.errors import CheckpointError
from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import StateHome
from shardwise.registry import LogicalTensor
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.unit import Unit

OUTER = "outer_"
"""Prefix of the names of an outer optimizer's state (`shardwise.zero.updates.local_sgd`) in checkpoints."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

StateKind = Callable[[Any, int, str], bool]
"""Whether an entry of optimizer state (value, elements of the parameter, name) has one value per element."""


@dataclass(frozen=True)
class Stepping:
    """Requirements of an optimizer.

    Attributes:
        whole: optimizer groups whose tensors are stepped unsharded; other groups are stepped in segments.
        norms: the optimizer needs norms of unsharded tensors for its segments.
        cost: cost of stepping an unsharded tensor of a shape, by which owners are balanced; None: elements.
        communicates: the optimizer reduces gradients itself (`shardwise.zero.updates.comm_optimizer`).
    """

    whole: frozenset[int] = frozenset()
    norms: bool = False
    cost: Callable[[Sequence[int]], float] | None = None
    communicates: bool = False


class UpdatePart:
    """Steps some flat parameters of all units; parts share one step of the optimizer, and fill its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, accountant: Accountant) -> None:
        self.optimizer = optimizer
        self._accountant = accountant
        self._scaled: dict[int, float | torch.Tensor] = {}  # factors of scaled gradients, by flat parameter
        self._factors: dict[torch.device, torch.Tensor] = {}  # factor of this step, by device

    def capture(self, unit: Unit) -> None:
        """Copy the needed values from an unsharded unit, which is resharded afterwards."""

    def place(self, members: list[list[nn.Parameter]], old_state: dict[int, dict[str, Any]]) -> None:
        """Add tensors to the members of each group, with the old state, by `id` of the client's parameter."""
        raise NotImplementedError

    def place_anew(self, members: list[list[nn.Parameter]], shared: Mapping[int, Any]) -> None:
        """Add tensors to the members of each group again, without state; see `Update.cut_by`."""
        self.place(members, {})

    def fits(self, shared: Mapping[int, Any]) -> bool:
        """Return True if no tensor that the optimizer steps has parameters with different values in `shared`."""
        return True

    def step(self, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`, as the only part."""
        with self.around(factor):
            self.optimizer.step()

    def around(self, factor: float | torch.Tensor) -> AbstractContextManager[None]:
        """Give the optimizer gradients times `factor` for the block, and write the parameters afterwards."""
        raise NotImplementedError

    def scaled(self, section: FlatParamStorage, gradient: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Return a gradient times the step's factor; memory that stays is scaled once: a step may be retried."""
        known = self._scaled.get(id(section))
        if known is not None or (isinstance(factor, float) and factor == 1.0):
            return gradient
        wide = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        if isinstance(factor, torch.Tensor) and section.steps_apart:
            # Once in a step: for each part, the host would also wait for copies to the device.
            near = self._factors.get(wide.device)
            factor = self._factors[wide.device] = factor.to(wide.device) if near is None else near
        wide.mul_(factor)
        if wide is not gradient:
            self._accountant.hold(Category.GRADIENTS, wide)
        elif not section.gradient_needs_acquiring:
            self._scaled[id(section)] = factor
        return wide

    def factor_in(self, section: FlatParamStorage) -> float | torch.Tensor:
        """Return the factor by which a gradient has been multiplied in a step that has not ended."""
        return self._scaled.get(id(section), 1.0)

    def end_step(self) -> None:
        """Drop the factors of the step."""
        self._scaled.clear()
        self._factors.clear()

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over a script's changes of an unsharded unit; other elements keep their digits, except in `loaded`."""

    def share_changes(self) -> None:
        """Send changes to ranks with master weights that `refresh` does not reach (all ranks call)."""

    def has(self, index: int) -> bool:
        """Return True if the part steps a parameter, on any rank."""
        raise NotImplementedError

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the ranges of a parameter's master weights on this rank."""
        raise NotImplementedError

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return these ranges as (start, stop, 1-D view); offloaded ones have no memory."""
        raise NotImplementedError

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, stop, 1-D view) of the ranges of an elementwise state entry on this rank."""
        raise NotImplementedError

    def state(self, index: int) -> Mapping[str, Any]:
        """Return the optimizer state of (the segment of) a parameter on this rank; empty if none."""
        raise NotImplementedError

    def keep_state(self) -> None:
        """Move elementwise optimizer state to its tier."""

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Create optimizer state of a parameter: elementwise entries of a dtype, and other entries `whole` with values.

        Elementwise entries are zeros, to be filled through `state_pieces`; with `filled` only padding is zero. Raises
        CheckpointError if parameters that are stepped together would have different values of an entry in `whole`.
        """
        raise NotImplementedError

    def publish(self, unit: Unit) -> None:
        """Copy master weights that a script has changed to the parameters (all ranks call)."""
        raise NotImplementedError

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield master weights that belong to no flat parameter, with their tier."""
        yield from ()

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield optimizer state of more than one element, with its tier."""
        yield from ()

    def take_new_views(self) -> None:
        """Use the memory in which unsharded parameters lie now."""


class Update:
    """Steps the sharded parameters of one engine, all parts in one step of the optimizer; gradients are reduced."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[UpdatePart]) -> None:
        self.optimizer = optimizer
        self.parts = list(parts)
        self.partial = ""

    def part_of(self, index: int) -> UpdatePart:
        """Return the part that steps a parameter."""
        return next((part for part in self.parts if part.has(index)), self.parts[0])

    def capture(self, unit: Unit) -> None:
        """Copy the needed values from an unsharded unit, which is resharded afterwards."""
        for part in self.parts:
            part.capture(unit)

    def bind(self, own_gradient: Callable[[FlatParamStorage], torch.Tensor], written: Callable[[], None]) -> None:
        """Fill the optimizer's groups, with the old state of the parameters, after all units are captured.

        `own_gradient` returns this rank's gradient of a flat parameter, if gradients are not reduced. `written` is
        called after parameters have changed outside of a step.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        old_state = {id(p): self.optimizer.state.pop(p) for p in parameters if p in self.optimizer.state}
        members: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for part in self.parts:
            part.place(members, old_state)
        assign_groups(self.optimizer, members)

    def step(self, factor: float | torch.Tensor) -> None:
        """Step with the accumulated gradients times `factor`, and write the parameters.

        After an error, `partial` tells whether some tensors have been stepped, so that a second try would step them
        twice.
        """
        before = self._versions()
        try:
            self._step(factor)
        except BaseException as error:
            if self._versions() != before:
                self.partial = (
                    f"some parameters or optimizer state were stepped, then {type(error).__name__} was raised"
                )
            raise

    def _versions(self) -> list[int]:
        state, found = self.optimizer.state, list[int]()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                found.append(parameter._version)
                for value in state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor):
                        found.append(value._version)
        return found

    def _step(self, factor: float | torch.Tensor) -> None:
        if len(self.parts) == 1:
            self.parts[0].step(factor)
            return
        with contextlib.ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.around(factor))
            self.optimizer.step()

    def factor_in(self, section: FlatParamStorage, index: int) -> float | torch.Tensor:
        """Return the factor by which a gradient has been multiplied in a step that has not ended."""
        return self.part_of(index).factor_in(section)

    def end_step(self) -> None:
        """Drop the factors of the step."""
        for part in self.parts:
            part.end_step()

    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        """Take over values of a unit that a script has changed (`UpdatePart.refresh`)."""
        for part in self.parts:
            part.refresh(unit, loaded)

    def share_changes(self) -> None:
        """Send changes to the master weights of other ranks (all ranks call)."""
        for part in self.parts:
            part.share_changes()

    def publish(self, unit: Unit) -> None:
        """Copy master weights that a script has changed to the parameters (all ranks call)."""
        for part in self.parts:
            part.publish(unit)

    def master_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the ranges of a parameter's master weights on this rank."""
        return self.part_of(index).master_ranges(index)

    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return these ranges with views of the master weights."""
        return self.part_of(index).master_pieces(index)

    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return the ranges of an elementwise state entry with their views."""
        return self.part_of(index).state_pieces(index, key)

    def state(self, index: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter on this rank."""
        return self.part_of(index).state(index)

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Create optimizer state of a parameter (`UpdatePart.make_state`); an outer optimizer makes its own."""
        elementwise = {key: dtype for key, dtype in elementwise.items() if not key.startswith(OUTER)}
        self.part_of(index).make_state(index, elementwise, whole, filled=filled)

    def cut_by(self, shared: Mapping[int, Any]) -> None:
        """Let parameters with different step counts be stepped apart, because a segment has one count.

        Drops the optimizer state if segments change.

        Args:
            shared: entries of the state that are not elementwise, in any form that can be compared, by parameter.
        """
        if all(part.fits(shared) for part in self.parts):
            return
        self.clear_state()
        members: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for part in self.parts:
            part.place_anew(members, shared)
        assign_groups(self.optimizer, members)

    def clear_state(self) -> None:
        """Drop all optimizer state."""
        self.optimizer.state.clear()
        for part in self.parts:
            part.keep_state()

    def own_masters(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield master weights that belong to no flat parameter, with their tier."""
        for part in self.parts:
            yield from part.own_masters()

    def own_state(self) -> Iterator[tuple[torch.Tensor, StateHome]]:
        """Yield optimizer state of more than one element, with its tier."""
        for part in self.parts:
            yield from part.own_state()

    def take_new_views(self) -> None:
        """Use the memory in which unsharded parameters lie now."""
        for part in self.parts:
            part.take_new_views()

    # -- optimizers that average over ranks themselves ---------------------------------------------------------------

    def stays_local(self) -> bool:
        """Return True if the next window has no reduction in backward (the same on all ranks)."""
        return False

    def begin_averaging(self) -> bool:
        """Skip to the steps that average over ranks, for memory plans; return False if there are none."""
        return False

    def check_agreed(self, what: str) -> None:
        """Raise UsageError if parameters differ by rank, and `what` would be changed on all ranks."""

    def check_movable(self, what: str) -> None:
        """Raise UsageError if optimizer state cannot leave the device."""

    def state_was_set(self) -> None:
        """Handle a change of optimizer state through `state_pieces`."""

    def rank_state(self) -> dict[str, Any] | None:
        """Return state of this rank only, for its part of a checkpoint; None: no such state."""
        return None

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Load a result of `rank_state`; return False if its layout differs."""
        return state is None

    def detach(self) -> None:
        """Detach the optimizer from the engine, which is closed."""


def assign_groups(optimizer: torch.optim.Optimizer, members: Sequence[Sequence[nn.Parameter]]) -> None:
    """Replace the parameters of the optimizer's groups in place."""
    for group, parameters in zip(optimizer.param_groups, members, strict=True):
        group["params"] = list(parameters)


@contextlib.contextmanager
def keeping_memory(optimizer: torch.optim.Optimizer, stepped: Iterable[nn.Parameter]) -> Iterator[None]:
    """Copy parameters to the memory that they had before the block: an optimizer may assign `parameter.data`.

    After an error, their versions show changes through `parameter.data`, too.
    """
    before = [(parameter, parameter.detach()) for parameter in stepped]
    sums = [] if has_known_step(optimizer) else [_sum_of_bits(values) for _, values in before]
    try:
        yield
    except BaseException:
        for (_, values), found in zip(before, sums, strict=False):
            if not torch.equal(found, _sum_of_bits(values)):
                torch.autograd.graph.increment_version(values)
        raise
    finally:
        for parameter, values in before:
            if not share_memory(parameter, values):
                values.copy_(parameter.detach().reshape(values.shape))
                parameter.data = values


def has_known_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `step` is that of a class of torch or of this library."""
    return inspect.unwrap(type(optimizer).step).__module__.startswith(("torch.optim.", "shardwise.optim."))


def _sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.dtype.itemsize]).sum()


def tensors_of(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield state of more than one element; step counts stay on their device."""
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 1:
            yield value


def hold(state: Mapping[str, Any], accountant: Accountant, tier: Tier) -> None:
    """Count the optimizer state of one parameter on a tier."""
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            accountant.hold(Category.OPTIMIZER, value, tier)


def as_gradient(values: torch.Tensor, master: torch.Tensor, accountant: Accountant) -> torch.Tensor:
    """Return accumulated values in the dtype of the master weights; a copy only if the dtypes differ."""
    if values.dtype == master.dtype:
        return values
    wide = values.to(master.dtype)
    accountant.hold(Category.GRADIENTS, wide)
    return wide


def state_dtype(value: torch.Tensor, tensor: LogicalTensor, master: torch.Tensor) -> torch.dtype:
    """Return the dtype of adopted state: the master weights' dtype for state in the parameter's own dtype."""
    return master.dtype if value.dtype is tensor.source_dtype else value.dtype


def state_of_part(state: dict[str, Any], tensor: LogicalTensor, is_elementwise: StateKind) -> dict[str, Any]:
    """Return the state of a rank's part: entries of the whole tensor are cut to the part."""
    return {
        key: tensor.cut(value) if is_of_whole(key, value, tensor, is_elementwise) else value
        for key, value in state.items()
    }


def is_of_whole(key: str, value: Any, tensor: LogicalTensor, is_elementwise: StateKind) -> bool:
    """Return True if a state entry covers an unsharded tensor, of which this rank has a part.

    This is so if an optimizer has stepped the parameter, or loaded its state, before it became a part.
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
            # Zeros that are overwritten at once would cost as much as the writes.
            state[key] = (torch.empty_like if filled else torch.zeros_like)(stepped.detach(), dtype=dtype)
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            # As in torch, a step count on the host stays there.
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
    """Return True if two entries of optimizer state or groups have one type and equal values."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def take_changes(master: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite the elements of `master` that do not round to `values`; the others keep their digits.

    `master` may be offloaded, with `values` on another device.
    """
    values = values.to(master.device)
    changed = master.to(values.dtype) != values
    master.copy_(torch.where(changed, values.to(master.dtype), master))
