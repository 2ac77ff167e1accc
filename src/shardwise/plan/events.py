"""What a rank does in a step, in order: operators, and collectives with the places where it waits for them.

A dry run of the engine on fake tensors is recorded, so the order is that of the engine itself: units that are gathered
ahead, reductions beneath the backward pass, the optimizer. Nothing is computed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.ledger import Record
from shardwise.compat import requested_device, times_of_operators
from shardwise.profile.counting import Callers
from shardwise.profile.formulas import formulas

UPDATE, OTHER = "update", "other"
"""What is done for no unit: by the optimizer, and by operators outside of modules with parameters."""

_SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b",
}


@dataclass(frozen=True)
class Operator:
    """A torch operator on tensors of some shapes.

    Attributes:
        signature: name and arguments as text: equal for operators that take equally long.
        name: of the operator, such as "aten.mm.default".
        flops: by torch's formulas; 0 for operators that only move memory.
        moved: bytes of all tensors that it reads and writes; 0 for views.
        dtype: of the first tensor with floats that it reads, such as "bf16"; "f8" for all of 8 bits.
        on_host: the host runs it on state that is offloaded.
    """

    signature: str
    name: str
    flops: int
    moved: int
    dtype: str = ""
    on_host: bool = False


@dataclass(frozen=True)
class Launch:
    """A collective begins. `number` is that of its `Wait`; `size`, `sent`, `narrow` are those of the ledger's record;
    `at_once`: the rank waits for it before it does anything else.
    """

    number: int
    op: str
    group: str
    ranks: int
    members: tuple[int, ...]
    size: int
    sent: int
    label: str
    narrow: bool = False
    at_once: bool = False


@dataclass(frozen=True)
class Wait:
    """The rank goes on when a collective has ended."""

    number: int


Event = Operator | Launch | Wait
_Kind = TypeVar("_Kind", Operator, Launch, Wait)
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator with its arguments, in which `Form` stands for tensors."""


@dataclass(frozen=True)
class Form:
    """Shape, strides and type of a tensor, which is not kept: that would be memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class UnitWork:
    """What a rank does for a unit in the recorded passes: FLOPs of forward and backward operators, recomputed ones too,
    bytes that operators read and write, bytes that collectives send.
    """

    flops: int = 0
    moved: int = 0
    sent: int = 0

    def add(self, other: UnitWork, times: int = 1) -> None:
        """Add the work of other passes, so many times."""
        self.flops += other.flops * times
        self.moved += other.moved * times
        self.sent += other.sent * times


@dataclass
class Pass:
    """Events of a micro-batch by phase: "forward", "backward" and "step", in this order. Of a pipeline: those of a
    computation of a stage, or of the step, as its one phase (`pipeline.actions.Op`).

    Attributes:
        units: work by unit, `UPDATE` and `OTHER`, if it was counted.
    """

    phases: dict[str, list[Event]] = field(default_factory=dict)
    stage: int | None = None
    units: dict[str, UnitWork] = field(default_factory=lambda: defaultdict(UnitWork))

    @property
    def events(self) -> Iterator[tuple[str, Event]]:
        """All events, with their phases."""
        return ((phase, event) for phase, events in self.phases.items() for event in events)


class Recorder(TorchDispatchMode):
    """Records passes of a dry run. It is a watcher of the ledger, too.

    Attributes:
        passes: of the micro-batches that were run: the first, one in the middle, and the last.
        calls: one call for each signature, by which the operator can be measured.

    Args:
        by_unit: count the work of each unit.
        chunks: count what a dry run leaves out of loops over chunks (`compat.standing_for`), which only CPUs have.
    """

    def __init__(self, *, by_unit: bool = False, chunks: bool = False) -> None:
        super().__init__()
        self._by_unit, self._chunks = by_unit, chunks
        self.passes: list[Pass] = []
        self.calls: dict[str, Call] = {}
        self._known: dict[Any, Operator] = {}
        self._formulas = formulas()
        self._into: list[Event] | None = None
        self._phase = ""
        self._callers: Callers | None = None
        self._units: dict[nn.Module, str] = {}

    def begin(self) -> None:
        """Forget all passes."""
        self.passes = []

    def of(self, kind: type[_Kind]) -> Iterator[_Kind]:
        """Yield all recorded events of a kind."""
        return (event for one in self.passes for _, event in one.events if isinstance(event, kind))

    @contextlib.contextmanager
    def phase(self, name: str, stage: int | None = None) -> Iterator[None]:
        """Record the block as a phase; "forward" begins a pass, and so does all of a pipeline."""
        if name == "forward" or stage is not None:
            self.passes.append(Pass(stage=stage))
        self._into, self._phase = self.passes[-1].phases.setdefault(name, []), name
        try:
            with self:
                yield
        finally:
            self._into = None

    @contextlib.contextmanager
    def watching(self, model: nn.Module, units: Mapping[nn.Module, str]) -> Iterator[None]:
        """Count the work of each unit inside the block; `units`: those that modules need, submodules that need none
        belong to their parents'.
        """
        if not self._by_unit:
            yield
            return
        self._units = {}
        for module in model.modules():  # parents come first
            unit = units.get(module, self._units.get(module, OTHER))
            self._units.update((child, unit) for child in (module, *module.children()))
        self._callers = Callers(model)
        self._callers.start()
        try:
            yield
        finally:
            self._callers.stop()
            self._callers = None

    def _unit(self) -> UnitWork:
        work = self.passes[-1].units
        if self._callers is None or self._phase == "step":
            return work[UPDATE]
        module, _ = self._callers.caller()
        return work[OTHER if module is None else self._units.get(module, OTHER)]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (device := requested_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._into is not None:
            operator = self._operator(func, args, kwargs, found)
            times = times_of_operators() if self._chunks else 1
            self._into.extend([operator] * times)
            if self._by_unit:
                self._unit().add(UnitWork(operator.flops, operator.moved), times)
        return found

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Operator:
        flat = tree_leaves((args, kwargs))
        named = (f"{key}={', '.join(map(_text, tree_leaves(value)))}" for key, value in kwargs.items())
        signature = f"{func} {', '.join([*map(_text, tree_leaves(args)), *named])}"
        known = self._known.get(signature)
        if known is None:
            tensors = [one for one in (*flat, *tree_leaves(found)) if isinstance(one, torch.Tensor)]
            moved = 0 if func.is_view else sum(one.numel() * one.element_size() for one in tensors)
            formula = self._formulas.get(func.overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=found))
            known = self._known[signature] = Operator(signature, str(func), flops, moved, _precision(tensors))
            self.calls[signature] = (func, *tree_map_only(torch.Tensor, _form, (args, kwargs)))
        return known

    # -- watcher of the ledger ---------------------------------------------------------------------------------------

    def opened(self, record: Record) -> None:
        """Record the launch of a collective."""
        if self._into is not None and record.ranks > 1:
            members = tuple(record.members)
            given = (record.sequence, record.op, record.group, record.ranks, members, record.size, record.sent)
            self._into.append(Launch(*given, record.label, record.narrow))
            if self._by_unit:
                known = record.label in self._units.values()
                self.passes[-1].units[record.label if known else OTHER].sent += record.sent

    def closed(self, record: Record) -> None:
        """Record the wait for a collective."""
        if self._into is not None and record.ranks > 1:
            last = self._into[-1] if self._into else None
            if isinstance(last, Launch) and last.number == record.sequence:
                self._into[-1] = replace(last, at_once=True)
            self._into.append(Wait(record.sequence))


def _form(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _precision(tensors: Sequence[torch.Tensor]) -> str:
    kind = next((one.dtype for one in tensors if one.is_floating_point()), None)
    return "" if kind is None else "f8" if kind.itemsize == 1 else _SHORT[kind]


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    kind = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    order = "" if value.is_contiguous() else f":{tuple(value.stride())}"
    return f"{kind}{list(value.shape)}{order}"
