"""Anomalies of an engine's steps (non-finite gradients, spikes, rewinds): kept, logged, and sent to monitors."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.engine.spikes import Spike

Phase = Literal["forward", "backward", "reduce", "gradients"]
Kind = Literal["NaN", "infinite"]
What = Literal[
    "batch", "parameter", "output", "code", "loss", "loss_gradient", "input_gradient", "code_gradient", "own_gradient"
]

LARGE = 1e4
"""Finite values above this are near the fp16 limit, and unusual in any dtype."""

KEPT = 100
"""Number of anomalies that are kept."""

SPIKE_ADVICE = (
    "look at the data of this step; where it recurs, lower the learning rate, lengthen its warm-up, or set "
    "gradient_clipping"
)
GRADIENT_ADVICE = (
    'see what the batch has, lower the learning rate or set gradient_clipping; "anomaly_watch": {"enabled": true, '
    '"trace": "always"} names the module'
)


@dataclass(frozen=True)
class Origin:
    """The first non-finite values of an accumulation window that were computed from finite ones.

    Attributes:
        what: "batch": the inputs of the model. "parameter": a parameter, before its use. "output": a module's output
            from finite inputs. "code": the result of a module's own code between calls of its submodules. "loss": the
            script's loss from the model's outputs. Backward pass: "loss_gradient": the gradient that enters the model.
            "input_gradient": a module's input gradient from finite gradients. "code_gradient": a gradient of code
            between calls. "own_gradient": a parameter's gradient, while all gradients between modules were finite.
        module: its name in the model; "" is the model itself, None is outside of the model.
        parameter: its name, for "parameter" and "own_gradient".
        other_module: for code: the module that received or produced the value.
        ranks: ranks with such values; `micro_batch`: its number in the accumulation window.
        line: `file:line` of the module's call.
        largest: largest absolute input value; None if unknown.
    """

    what: What
    phase: Literal["forward", "backward"]
    module: str | None
    of_class: str = ""
    parameter: str | None = None
    other_module: str | None = None
    kind: Kind = "NaN"
    ranks: tuple[int, ...] = ()
    micro_batch: int | None = None
    line: str = ""
    largest: float | None = None

    def __str__(self) -> str:
        """Return a sentence for a message.

        >>> print(Origin("output", "forward", "blocks.1.up", "Linear", ranks=(2,), micro_batch=0, largest=3.5))
        Origin: forward pass of micro-batch 0 on rank 2: module 'blocks.1.up' (Linear) made NaN values from finite \
ones, of which the largest was 3.5
        """
        micro_batch = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        line = f" ({self.line})" if self.line else ""
        return f"Origin: {self.phase} pass{micro_batch} on {_named(self.ranks)}: {self._cause()}{line}"

    def _cause(self) -> str:
        kind, other, parameter = self.kind, repr(self.other_module), repr(self.parameter)
        of_class = f" ({self.of_class})" if self.of_class else ""
        module = f"module {self.module!r}{of_class}" if self.module else f"the model{of_class}"
        largest = "" if self.largest is None else f", of which the largest was {self.largest:.4g}"
        return {
            "batch": f"the inputs of the model were {kind}",
            "parameter": f"parameter {parameter} of {module} was {kind} before its use",
            "output": f"{module} made {kind} values from finite ones{largest}",
            "code": f"the code of {module} made {kind} values, the inputs of {other}",
            "loss": f"the outputs of the model were finite, and the loss was {kind}",
            "loss_gradient": f"the loss was finite, and the gradient of the model's outputs was {kind}",
            "input_gradient": f"{module} made {kind} gradients from finite ones{largest}",
            "code_gradient": f"the code of {module} made {kind} gradients, the first for the output of {other}",
            "own_gradient": f"{module} made the gradient of its parameter {parameter} {kind}; gradients between "
            "modules were finite",
        }[self.what]

    @property
    def advice(self) -> str:
        """Recommended remedies."""
        if self.what == "batch":
            return "look for such values in the data of this micro-batch"
        if self.what == "parameter":
            return (
                "an earlier update has damaged parameters: load an earlier checkpoint, and skip such steps "
                '("non_finite": "skip")'
            )
        if self.what in ("loss", "loss_gradient"):
            return "look at logarithms, divisions and means over nothing in the loss, and at the labels"
        if self.kind == "infinite" or (self.largest is not None and self.largest > LARGE):
            return (
                "values outgrow their dtype: look at the inputs of this module, lower the learning rate or lengthen "
                "its warm-up, normalise, or take bf16 instead of fp16"
            )
        return "look at divisions, roots, logarithms and masks of this module; an epsilon may be missing"


@dataclass(frozen=True)
class Extent:
    """The `count` of `total` parameters with non-finite gradients, in the order of the model.

    `last` is the name of the last one, `following` of the next parameter, which has a finite gradient, or None.
    """

    count: int
    total: int
    last: str
    following: str | None

    @classmethod
    def of(cls, places: Sequence[int], names: Sequence[str]) -> Extent:
        """Return the extent of parameters at ascending places in `names`."""
        return cls(len(places), len(names), names[places[-1]], next(iter(names[places[-1] + 1 :]), None))

    def describe(self, phase: Phase) -> str:
        """Return a sentence for a message. In a backward pass NaN spreads from the last parameters to the first.

        >>> print(Extent(3, 8, "layers.1.bias", "layers.2.weight").describe("backward"))
        3 of 8 parameters have such gradients, the last 'layers.1.bias'; the gradient of the next, 'layers.2.weight', \
is finite, and the origin lies between them in the order of the model
        >>> print(Extent(8, 8, "head.bias", None).describe("backward"))
        All 8 parameters have such gradients; the origin is 'head.bias', or lies behind it
        """
        if self.count == self.total:
            behind = f"; the origin is {self.last!r}, or lies behind it" if phase == "backward" else ""
            return f"All {self.total} parameters have such gradients{behind}"
        if self.count == 1:
            return f"1 of {self.total} parameters has such a gradient"
        first = f"{self.count} of {self.total} parameters have such gradients, the last {self.last!r}"
        if phase != "backward" or self.following is None:
            return first
        between = "is finite, and the origin lies between them in the order of the model"
        return f"{first}; the gradient of the next, {self.following!r}, {between}"


@dataclass(frozen=True)
class OverflowReport:
    """Cause of non-finite gradients in a step, the same on every rank.

    Attributes:
        phase: "forward": a loss was non-finite. "backward": losses were finite, a rank's own gradient was not, in its
            communication dtype. "reduce": all communicated gradients were finite, their sum was not, as sums in 16 bits
            can be. "gradients": "backward" or "reduce"; not every gradient was checked before communication; in the
            following steps each is.
        ranks: ranks of the data-parallel group with such a loss or gradient; empty for "reduce" and "gradients".
        parameter: first parameter in registration order with a non-finite gradient; None: only the norm is non-finite.
        loss_scale: factor of the losses.
        infinite, nan, largest: infinite and NaN elements, and the largest absolute finite one, of the summed gradient,
            as the step would use it; None: already freed.
        origin: module of the first non-finite value; None if modules were not traced (`anomaly_watch.trace`).
        watched_for: number of following steps in which modules are traced, to name the module of a recurrence.
    """

    phase: Phase
    ranks: tuple[int, ...]
    parameter: str | None
    unit: str | None
    numel: int
    loss_scale: float
    infinite: int | None = None
    nan: int | None = None
    largest: float | None = None
    origin: Origin | None = None
    extent: Extent | None = None
    watched_for: int | None = None

    def __str__(self) -> str:
        """Return sentences for a message.

        >>> print(OverflowReport("backward", (1,), "up.weight", "blocks.1", 8, 256.0, 2, 1, 0.5))
        backward: gradients on rank 1 were not finite. First parameter: 'up.weight' (unit 'blocks.1'), of whose 8 \
elements 2 are infinite and 1 NaN; the largest other is 0.5 (128 with the loss scale 256)
        """
        sentences = [f"{self.phase}: {self._cause()}", self._first()]
        if self.origin is not None:
            return ". ".join([*sentences, str(self.origin)])
        if self.extent is not None:
            sentences.append(self.extent.describe(self.phase))
        if self.watched_for is not None:
            sentences.append(
                f"Modules are traced for {self.watched_for} steps from now on, to name module and line of a recurrence "
                '("anomaly_watch": {"trace": "always"} names those of the first, too)'
            )
        return ". ".join(sentences)

    def _cause(self) -> str:
        return {
            "forward": f"the loss on {_named(self.ranks)} was not finite",
            "backward": f"gradients on {_named(self.ranks)} were not finite",
            "reduce": "gradients were finite on every rank, and their sum over ranks and micro-batches was not",
            "gradients": "gradients of a rank or their sum over ranks were not finite; the next step checks both",
        }[self.phase]

    def _first(self) -> str:
        if self.parameter is None:
            return "Every parameter's gradient is finite, the norm of all is not"
        first = f"First parameter: {self.parameter!r} (unit {self.unit!r})"
        if self.infinite is None or self.largest is None:
            return first
        scaled = f" ({self.largest * self.loss_scale:.4g} with the loss scale {self.loss_scale:g})"
        return (
            f"{first}, of whose {self.numel} elements {self.infinite} are infinite and {self.nan} NaN; the largest "
            f"other is {self.largest:.4g}{scaled if self.loss_scale != 1 else ''}"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class Anomaly:
    """An anomaly of a step; the same on every rank. A "rewind" is the reaction to another one.

    Attributes:
        step: `engine.global_steps` before the step.
        action: "warn", "skip", "stop" or "rewind".
        ranks: ranks with non-finite values.
        module: module of origin; None if unknown.
        parameters: first and last parameter with a non-finite gradient, or parameters with the most grown gradients.
        phase: "forward", "backward", "reduce" or "gradients" (see `OverflowReport`).
        line: `file:line` that called the module.
        value: loss or norm; of a rewind, the restored step.
        usual: median of the previous values.
    """

    kind: Literal["non_finite", "loss_spike", "grad_norm_spike", "rewind"]
    step: int
    text: str
    action: str
    ranks: tuple[int, ...] = ()
    module: str | None = None
    parameters: tuple[str, ...] = ()
    phase: str | None = None
    line: str = ""
    value: float | None = None
    usual: float | None = None
    advice: str = ""

    @classmethod
    def of_overflow(cls, step: int, report: OverflowReport, action: str) -> Anomaly:
        """Return the anomaly of non-finite gradients."""
        named = (report.parameter, None if report.extent is None else report.extent.last)
        parameters = tuple(dict.fromkeys(name for name in named if name is not None))
        anomaly = cls("non_finite", step, str(report), action, report.ranks, None, parameters, report.phase)
        origin = report.origin
        if origin is None:
            return replace(anomaly, advice=GRADIENT_ADVICE)
        found = {key: getattr(origin, key) for key in ("ranks", "module", "phase", "line", "advice")}
        return replace(anomaly, **found)

    @classmethod
    def of_spike(cls, step: int, spike: Spike) -> Anomaly:
        """Return the anomaly of a spike."""
        grown = tuple(name for name, _ in spike.grown)
        return cls(
            spike.kind,
            step,
            str(spike),
            spike.action,
            parameters=grown,
            value=spike.value,
            usual=spike.usual,
            advice=SPIKE_ADVICE,
        )

    def event(self) -> dict[str, Any]:
        """Return the anomaly as the `event` of log records, for programs."""
        facts = {key: value for key, value in vars(self).items() if key not in ("text", "ranks", "parameters")}
        return {
            **facts,
            "rank": self.ranks[0] if self.ranks else None,
            "ranks": list(self.ranks),
            "parameters": list(self.parameters),
        }


class Anomalies:
    """Keeps the last anomalies of one engine; rank 0 logs them."""

    def __init__(self, rank: int) -> None:
        self.noted: deque[Anomaly] = deque(maxlen=KEPT)
        self.rewinds = 0
        self._rank = rank
        self._count = self._shown = 0

    def note(self, anomaly: Anomaly, message: str, *values: Any, level: int = logging.WARNING) -> None:
        """Keep an anomaly and log a message."""
        self.note_quietly(anomaly)
        if self._rank == 0:
            logger.log(level, message, *values, extra={"event": anomaly.event()})

    def note_quietly(self, anomaly: Anomaly) -> None:
        """Keep an anomaly without logging, because an error reports it."""
        self.noted.append(anomaly)
        self._count += 1

    def take_new(self) -> list[Anomaly]:
        """Return anomalies since the last call, at most `KEPT`."""
        new, self._shown = self._count - self._shown, self._count
        return list(self.noted)[-new:] if new else []
