"""How fast a machine is: measured operators, collectives and overheads, in a file; and estimates of what is missing."""

from __future__ import annotations

import functools
import math
import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.errors import CommandLineError, UsageError
from shardwise.plan.clock import Costs
from shardwise.plan.events import Call, Form, Launch, Operator, Recorder

_TRIALS = 5
_ENOUGH_S = 0.2
"""An operator that has taken so long in all is not measured more often."""
_LEAST_TRIALS = 2
_MOST_TRIALS = 15
_SOON_S = 2e-3
"""An operator that has taken less in all is measured more often."""
_CACHE = 8 << 20
"""Bytes that take the place of an operator's tensors in the cache."""
_STAYS = 2 << 20
"""Tensors of so few bytes are in the cache when an operator reads them, because the one before has written them."""


class OperatorTime(BaseModel):
    """Seconds of an operator, with its FLOPs and bytes."""

    model_config = ConfigDict(extra="forbid")

    name: str
    seconds: float = Field(ge=0)
    flops: int = Field(ge=0)
    moved: int = Field(ge=0)


class CollectiveTime(BaseModel):
    """Seconds of a collective of `ranks` ranks whose whole message has `size` bytes; `narrow`: of 16-bit values."""

    model_config = ConfigDict(extra="forbid")

    op: str
    ranks: int = Field(ge=2)
    size: int = Field(ge=1)
    narrow: bool = False
    seconds: float = Field(gt=0)


class Crowd(BaseModel):
    """How many times as long operators take where `ranks` ranks work on the machine at once.

    `narrow`: those that compute in 16 bits, for which cores may share units.
    """

    model_config = ConfigDict(extra="forbid")

    ranks: int = Field(ge=1)
    computing: float = Field(ge=0)
    narrow: float = Field(ge=0)
    moving: float = Field(ge=0)


class Machine(BaseModel):
    """Rates of one machine, as `shardwise bench machine` measures them.

    Attributes:
        operators: by signature, with one rank at work.
        crowds: by number of ranks.
        host: seconds of the host for each operator; `launch`: for each collective, besides its own.
        interference: seconds by which a second of a collective in flight delays computing.
        disk: bytes/s that a rank reads from its disk and writes to it (`shardwise bench io`); None: unknown.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[2] = 2
    when: str
    host_name: str
    processor: str
    cores: int
    device: str
    torch: str
    threads: int
    operators: dict[str, OperatorTime] = {}
    collectives: list[CollectiveTime] = []
    crowds: list[Crowd] = []
    host: float = Field(default=0.0, ge=0)
    launch: float = Field(default=0.0, ge=0)
    interference: float = Field(default=0.0, ge=0)
    disk: tuple[float, float] | None = None

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a file. Raises CommandLineError if there is none, or it is of another form."""
        try:
            return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise CommandLineError(
                f"{path}: {error.strerror}. `shardwise bench machine --out {path}` measures this machine."
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("version",):
                raise CommandLineError(
                    f"{path} was measured by another version of shardwise. Run `shardwise bench machine` again."
                ) from None
            where = ".".join(map(str, first["loc"]))
            raise CommandLineError(f"{path}: no file of `shardwise bench machine`: {where}: {first['msg']}.") from None

    def save(self, path: str | Path) -> None:
        """Write a file."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def is_here(self) -> bool:
        """Whether these are rates of this machine, and of this version of torch."""
        return (self.host_name, self.torch) == (socket.gethostname(), torch.__version__)

    @property
    def origin(self) -> str:
        """A sentence that says where the rates come from."""
        here = "here" if self.is_here() else f"on {self.host_name} ({self.processor}), not on this machine"
        return f"rates measured {here}, {self.when}"

    def complete(self, recorder: Recorder, ranks: int, limit: float) -> None:
        """Measure operators that lack, if this is the machine and has the device, in up to `limit` seconds.

        Raises UsageError if a collective was not measured with so many ranks.
        """
        missing = {e.signature: e for e in recorder.of(Operator) if e.signature not in self.operators}
        device = _device_of(self.device) if limit and missing and self.is_here() else None
        if device is not None:
            calls = {signature: recorder.calls[signature] for signature in missing}
            self.operators |= measure_operators(calls, missing, device, limit)
        unknown = {(e.op, e.ranks) for e in recorder.of(Launch)} - {(one.op, one.ranks) for one in self.collectives}
        if unknown:
            op, count = min(unknown)
            raise UsageError(
                f"{op} of {count} ranks was not measured. Run `shardwise bench machine --nproc {ranks}` on the machine"
            )

    def costs(self, ranks: int) -> Costs:
        """Return how long things take where `ranks` ranks share the machine."""
        return Costs(
            operator=Operators(self.operators, self.crowd(ranks)).seconds,
            collective=Collectives(self.collectives).seconds,
            measured=lambda operator: operator.signature in self.operators or not operator.moved,
            host=self.host,
            launch=self.launch if ranks > 1 else 0.0,
            interference=self.interference,
            asynchronous=self.device != "cpu",
        )

    @property
    def peaks(self) -> Mapping[str, float]:
        """No peaks, because none are measured."""
        return {}

    @property
    def host_link(self) -> None:
        """None: on the CPU the host's memory is that of the ranks; from a GPU it is not measured."""

    def joined(self, shared: Machine) -> Machine:
        """Return these rates with what several ranks have measured."""
        keys = ("collectives", "crowds", "launch", "interference")
        return self.model_copy(update={key: getattr(shared, key) for key in keys})

    def crowd(self, ranks: int) -> Crowd:
        """Return how much longer operators take where `ranks` ranks share the machine."""
        known = sorted(self.crowds, key=lambda one: abs(one.ranks - ranks))
        if self.device != "cpu" or ranks == 1 or not known:
            return Crowd(ranks=ranks, computing=1.0, narrow=1.0, moving=1.0)
        nearest = known[0]
        times = max(ranks, self.cores) / max(nearest.ranks, self.cores)  # ranks beyond the cores take turns
        share = min(1.0, (ranks - 1) / max(1, min(nearest.ranks, self.cores) - 1))  # fewer ranks than cores crowd less
        given = {name: getattr(nearest, name) for name in ("computing", "narrow", "moving")}
        return Crowd(ranks=ranks, **{name: 1.0 + share * (max(1.0, times * one) - 1.0) for name, one in given.items()})


def _device_of(name: str) -> torch.device | None:
    """Return the device that `Machine.device` names, or None if it is not here."""
    if name == "cpu":
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() and torch.cuda.get_device_name() == name else None


class Operators:
    """Seconds of operators: measured, or estimated from measured ones of the same name, then of all names."""

    def __init__(self, measured: Mapping[str, OperatorTime], crowd: Crowd) -> None:
        self._measured, self._crowd = measured, crowd
        self._by_name: dict[str, list[tuple[float, float]]] = {}
        self._moving: list[tuple[float, float]] = []
        self._computing: list[tuple[float, float]] = []
        for one in measured.values():
            amount = float(one.flops or one.moved)
            if amount:
                self._by_name.setdefault(one.name, []).append((amount, one.seconds))
                (self._computing if one.flops else self._moving).append((amount, one.seconds))
        for points in (*self._by_name.values(), self._moving, self._computing):
            points.sort()

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of an operator. Raises UsageError if nothing was measured that it is estimated from."""
        if not operator.moved:
            return 0.0  # a view
        known = self._measured.get(operator.signature)
        if known is None:
            points = self._by_name.get(operator.name) or (self._computing if operator.flops else self._moving)
            if not points:
                kind = "with" if operator.flops else "without"
                raise UsageError(
                    f"{operator.name} was not measured, nor any other {kind} FLOPs. Run `shardwise bench machine` on "
                    "the machine"
                )
            seconds = interpolated(points, float(operator.flops or operator.moved))
        else:
            seconds = known.seconds
        if not operator.flops:
            return seconds * self._crowd.moving
        return seconds * (self._crowd.narrow if operator.dtype in ("bf16", "f16") else self._crowd.computing)


class Collectives:
    """Seconds of collectives: between measured sizes, and in proportion to what a rank receives beyond."""

    def __init__(self, measured: Iterable[CollectiveTime]) -> None:
        self._points: dict[tuple[str, int, bool], list[tuple[float, float]]] = {}
        for one in measured:
            self._points.setdefault((one.op, one.ranks, one.narrow), []).append((float(one.size), one.seconds))
        for points in self._points.values():
            points.sort()

    def seconds(self, launch: Launch) -> float:
        """Return the seconds of a collective."""
        known = [
            ((narrow is not launch.narrow, abs(ranks - launch.ranks), ranks), points)
            for (op, ranks, narrow), points in self._points.items()
            if op == launch.op
        ]
        if not known:
            raise UsageError(f"{launch.op} was not measured. Run `shardwise bench machine` on the machine")
        return interpolated(min(known)[1], float(launch.size))


def interpolated(points: Sequence[tuple[float, float]], amount: float) -> float:
    """Return the value at `amount` on the line through sorted points; beyond the last one in proportion, before the
    first one its value.

    >>> interpolated([(10.0, 1.0), (20.0, 3.0)], 15.0), interpolated([(10.0, 1.0)], 30.0), interpolated([(9.0, 1.0)], 1)
    (2.0, 3.0, 1.0)
    """
    if not points:
        return 0.0
    place = bisect_left(points, (amount, 0.0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1] * amount / points[-1][0]
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (amount - left) / (right - left)


def measure_operators(
    calls: Mapping[str, Call], operators: Mapping[str, Operator], device: torch.device, limit: float
) -> dict[str, OperatorTime]:
    """Run each operator on tensors of its shapes; return their times. Views are left out, and so are operators that
    cannot be run by themselves, and those for which no time is left of `limit` seconds: they are estimated.
    """
    found: dict[str, OperatorTime] = {}
    end = time.monotonic() + limit
    with torch.no_grad():
        # The cheapest first: a large one that takes all the time keeps no other from being measured.
        for signature in sorted(calls, key=lambda one: operators[one].flops + operators[one].moved):
            operator = operators[signature]
            if not operator.moved:
                continue
            if time.monotonic() > end:
                break
            try:
                seconds = _seconds(calls[signature], device, flush=operator.moved > _STAYS)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            found[signature] = OperatorTime(
                name=operator.name, seconds=seconds, flops=operator.flops, moved=operator.moved
            )
    return found


def _seconds(call: Call, device: torch.device, *, flush: bool) -> float:
    function, args, kwargs = call
    least = min((size for one in tree_leaves((args, kwargs)) if _floats(one) for size in one.shape if size), default=1)
    args, kwargs = tree_map(lambda value: _real(value, least, device), (args, kwargs))
    function(*args, **kwargs)
    times: list[float] = []
    while len(times) < _LEAST_TRIALS or sum(times) < (_ENOUGH_S if len(times) < _TRIALS else _SOON_S):
        if len(times) == _MOST_TRIALS:
            break
        if flush:
            _flush(device)
        _arrive(device)
        begun = time.perf_counter()
        function(*args, **kwargs)
        _arrive(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _flush(device: torch.device) -> None:
    """Fill the cache with other values, as the operators between two uses of a tensor do."""
    _other(device).add_(1.0)


@functools.cache
def _other(device: torch.device) -> torch.Tensor:
    return torch.zeros(_CACHE // 4, dtype=torch.float32, device=device)


def _floats(value: Any) -> bool:
    return isinstance(value, Form) and value.dtype.is_floating_point


def _real(value: Any, least: int, device: torch.device) -> Any:
    """Return a tensor with values: small numbers, and indices that are valid in all dimensions."""
    if not isinstance(value, Form):
        return device if isinstance(value, torch.device) else value
    extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    flat = torch.empty(extent if math.prod(value.shape) else 0, dtype=value.dtype, device=device)
    if flat.is_floating_point():
        flat.uniform_(0.5, 1.0)
    else:
        flat.random_(0, 2 if value.dtype is torch.bool else least)
    return flat.as_strided(value.shape, value.stride)  # elements may share memory, as those of a gradient of a sum


def _arrive(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
