"""Reports infinite and NaN gradients: parameter, ranks and phase, and with tracing the module of origin.

The step's all-reduce includes the norm or a flag, read at once on a CPU, and at the next step on CUDA, without a host
wait. Only after a non-finite value all ranks search for the origin together.

With `anomaly_watch.trace`, hooks record the minimum and maximum (`torch.aminmax`) of each module's inputs, parameters
and outputs, and of their gradients. Both stay on the device until a step has non-finite gradients. The first non-finite
record names a module, or the calling module whose own code computed the value. A module's contribution to the summed
gradient of an input is recorded at its own autograd nodes. The graph is unchanged: gradients are bit-identical.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.autograd.graph import Node

from shardwise.comm.ledger import user_line
from shardwise.compat import backward_pass, number_of, transforming
from shardwise.engine.anomalies import Anomalies, Anomaly, Extent, Kind, Origin, OverflowReport, Phase
from shardwise.engine.scaling import on_non_finite
from shardwise.precision.norms import count_non_finite
from shardwise.trees import tensors_in
from shardwise.utils.logging import logger
from shardwise.zero.passes.modulehook import ModuleHook

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.window import Window
    from shardwise.zero.model import ShardedModel

_MOST_RECORDS = 1 << 17
"""Limit of a window, because scripts may never step."""
_MOST_NODES = 4096
"""Limit of the autograd nodes that are searched for one module."""
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_BETWEEN = {"input": ("batch", "code"), "output_gradient": ("loss_gradient", "code_gradient")}
"""Origins of values between modules: code of the script, or of the calling module."""

# -- module tracing ----------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Call:
    """A call of a module; `caller`: the enclosing call, None: the script. `records`: of this call, by kind.

    `inputs`: autograd nodes of its inputs. `inner`: nodes of submodule outputs, each with the nodes of the inputs.
    """

    trace: list[_Record]
    micro_batch: int
    module: str
    of_class: str
    line: str = ""
    caller: _Call | None = None
    records: dict[str, list[_Record]] = field(default_factory=dict)
    inputs: set[Node] = field(default_factory=set)
    inner: dict[Node, set[Node]] = field(default_factory=dict)

    def record(self, kind: str, values: torch.Tensor, parameter: str | None = None) -> _Record | None:
        """Record the range of a tensor or gradient; no host wait."""
        dense = values.layout is torch.strided and not values.is_nested and not values.is_inference()
        if not dense or values.dtype not in _FLOATS or not values.numel() or len(self.trace) > _MOST_RECORDS:
            return None
        record = _Record(kind, self, torch.aminmax(values.detach()), values.requires_grad, parameter)
        self.trace.append(record)
        self.records.setdefault(kind, []).append(record)
        return record

    def record_gradients(
        self, kind: str, places: Sequence[int], gradients: Sequence[torch.Tensor | None], *_: Any
    ) -> None:
        """Record the gradients at some places of those that an autograd node receives or returns."""
        for gradient in [gradients[place] for place in places if place < len(gradients)]:
            if gradient is not None:
                self.record(kind, gradient)

    def hook_own_nodes(self, made: set[Node]) -> None:
        """Record the gradients that the module's own autograd nodes pass to its inputs; `made`: nodes of outputs."""
        newest = max(map(number_of, self.inputs), default=math.inf)
        pending, seen = list(made), set(made)
        while pending and len(seen) < _MOST_NODES:
            node = pending.pop()
            sources = self.inner.get(node)
            if sources is None:
                places = [place for place, (source, _) in enumerate(node.next_functions) if source in self.inputs]
                if places:
                    node.register_hook(functools.partial(self.record_gradients, "input_gradient", places))
                sources = {source for source, _ in node.next_functions if source is not None}
            # Inputs, and nodes older than the newest input, were made before the call.
            further = {source for source in sources - seen if number_of(source) > newest}
            pending += further
            seen |= further


@dataclass(eq=False, slots=True)
class _Record:
    """Smallest and largest value of an input, parameter or output of a call, or of a gradient; on the device."""

    kind: str
    call: _Call
    range: tuple[torch.Tensor | float, torch.Tensor | float]
    differentiable: bool
    parameter: str | None

    def read(self) -> tuple[float, float]:
        """Return the values; waits for the device the first time."""
        low, high = self.range = float(self.range[0]), float(self.range[1])
        return low, high

    def finite(self) -> bool:
        """Return True if both values are finite."""
        return all(map(math.isfinite, self.read()))

    def expected(self) -> bool:
        """Return True for minus infinity in a mask without a gradient, or in an input with finite outputs (softmax)."""
        low, high = self.read()
        if self.kind not in ("input", "output") or low != -math.inf or not high < math.inf:
            return False
        outputs = self.call.records.get("output") if self.kind == "input" else None
        return not self.differentiable or bool(outputs and all(output.finite() for output in outputs))

    def origin(self) -> Origin:
        """Return the origin of a window, if these are its first non-finite values."""
        call, what = self.call, self.kind
        module: _Call | None = call
        if what in _BETWEEN:
            module = call.caller
            what = _BETWEEN[what][module is not None]
        sources = call.records.get({"output": "input", "input_gradient": "output_gradient"}.get(what, ""), ())
        return Origin(
            what,  # type: ignore[arg-type]
            "backward" if "gradient" in what else "forward",
            None if module is None else module.module,
            "" if module is None else module.of_class,
            self.parameter,
            None if module is None or module is call else call.module,
            _kind(*self.read()),
            micro_batch=call.micro_batch,
            line=call.line,
            largest=max((max(map(abs, source.read())) for source in sources), default=None),
        )


class ModuleTracer:
    """Traces the modules of one engine: never, always, or for `steps` steps after one with non-finite gradients.

    Attributes:
        handles: the hooks; empty while modules are not traced. The same on all ranks.
    """

    def __init__(self, root: nn.Module, mode: Literal["off", "after", "always"], steps: int) -> None:
        self.handles: list[Any] = []
        self._root = root
        self._mode = mode
        self._steps = steps
        self._until: int | None = None
        self._window: Window | None = None
        self._running: list[_Call] = []
        self._lines: dict[str, str] = {}
        self._callers: dict[str, _Call | None] = {}  # by module, because parts of a call may be recomputed separately
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, _Record]] = {}
        if mode == "always":
            self._install()

    def begin_window(self, window: Window, step: int) -> None:
        """Record the passes of the window of `step`, while modules are traced."""
        if self._until is not None and step >= self._until:
            self._until = None
            self.remove()
        self._window = window if self.handles else None
        window.trace = [] if self.handles else None
        self._callers, self._seen = {}, {}

    def start(self, step: int) -> int | None:
        """Trace modules from the next window on (all ranks call). Returns the number of traced steps, if it was off."""
        if self._mode != "after":
            return None
        new = not self.handles
        self._until = step + 1 + self._steps
        self._install()
        return self._steps if new else None

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self.handles:
            handle.remove()
        self.handles, self._window, self._callers = [], None, {}
        self._running.clear()

    def follow(self) -> None:
        """Trace the modules that the model has now, between windows."""
        if self.handles:
            window = self._window
            self.remove()
            self._install()
            self._window = window

    def _install(self) -> None:
        if self.handles:
            return
        for name, module in self._root.named_modules():
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self.handles.append(module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True))
            self.handles.append(module.register_forward_hook(ModuleHook(after), with_kwargs=True, always_call=True))

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        window, running, recomputing = self._window, self._running, backward_pass() is not None
        if module is self._root:
            running.clear()  # calls interrupted by an error
        if window is None or window.trace is None:
            return
        if not running and (not torch.is_grad_enabled() or transforming()):
            return
        if name not in self._lines:
            self._lines[name] = user_line()
        call = _Call(window.trace, window.passes, name, type(module).__name__, self._lines[name])
        call.caller = running[-1] if running else self._callers.get(name) if recomputing else None
        running.append(call)
        self._callers[name] = call.caller
        inputs = _tensors(*args, *kwargs.values())
        call.inputs.update(values.grad_fn for values in inputs if values.grad_fn is not None)
        if recomputing:
            return
        for key, parameter in module._parameters.items():
            if type(parameter) is nn.Parameter:
                self._record("parameter", call, parameter, key)
        for values in inputs:
            self._record("input", call, values)

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        call = next((call for call in reversed(self._running) if call.module == name), None)
        if call is None:
            return
        del self._running[self._running.index(call) :]
        made: set[Node] = set()
        for values in _tensors(outputs):
            node, new = values.grad_fn, self._known(values) is None
            if backward_pass() is None:
                self._record("output", call, values)
            if node is not None and new:
                node.register_prehook(functools.partial(call.record_gradients, "output_gradient", [values.output_nr]))
            if node is not None and node not in call.inputs:
                made.add(node)
        call.hook_own_nodes(made)
        if self._running:
            self._running[-1].inner.update(dict.fromkeys(made, call.inputs))
        call.inputs, call.inner = set(), {}  # because nodes keep activations

    def _known(self, values: torch.Tensor) -> _Record | None:
        found = self._seen.get(id(values))
        return None if found is None or found[0]() is not values or found[1] != values._version else found[2]

    def _record(self, kind: str, call: _Call, values: torch.Tensor, parameter: str | None = None) -> None:
        record = self._known(values)
        if record is not None:
            call.records.setdefault(kind, []).append(record)
        elif (record := call.record(kind, values, parameter)) is not None:
            self._seen[id(values)] = weakref.ref(values), values._version, record

    def origin(self, report: OverflowReport, window: Window, job: Communicator) -> Origin | None:
        """Return the origin of non-finite values; None if untraced or unseen. All ranks call and get the same."""
        if window.trace is None:
            return None
        own = self._own_origin(window.trace, window.losses or [])
        gathered = job.exchange(None if own is None else asdict(own), "origin")
        found = {rank: Origin(**one) for rank, one in enumerate(gathered) if one is not None}
        if not found:
            return self._of_parameter(report)
        first = min(found.values(), key=_time)
        keys = ("micro_batch", "phase", "what", "module", "parameter")
        alike = [rank for rank, one in found.items() if all(getattr(one, key) == getattr(first, key) for key in keys)]
        return replace(first, ranks=tuple(alike))

    def _own_origin(self, trace: list[_Record], losses: list[torch.Tensor]) -> Origin | None:
        line = self._lines.get("", "")
        found = [
            Origin("loss", "forward", None, kind=_kind(loss), micro_batch=number, line=line)
            for number, loss in enumerate(map(float, losses))
            if not math.isfinite(loss)
        ]
        records = (record for record in trace if not record.finite() and not record.expected())
        first = min(records, key=lambda record: (record.call.micro_batch, "gradient" in record.kind), default=None)
        return min(found if first is None else [*found, first.origin()], key=_time, default=None)

    def _of_parameter(self, report: OverflowReport) -> Origin | None:
        if report.phase != "backward" or report.parameter is None:
            return None
        name, _, parameter = report.parameter.rpartition(".")
        module = dict(self._root.named_modules()).get(name)
        of_class = "" if module is None else type(module).__name__
        kind: Kind = "NaN" if report.nan or report.infinite == 0 else "infinite"
        line = self._lines.get(name, "")
        return Origin("own_gradient", "backward", name, of_class, parameter, None, kind, report.ranks, None, line)


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [found for one in values for found in ([one] if isinstance(one, torch.Tensor) else tensors_in(one))]


def _time(origin: Origin) -> tuple[int, bool, bool]:
    # Forward before backward, and the loss last in the forward pass.
    return origin.micro_batch or 0, origin.phase == "backward", origin.what == "loss"


def _kind(*values: float) -> Kind:
    return "NaN" if any(map(math.isnan, values)) else "infinite"


# -- policy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepGradients:
    """State of a step, kept until its gradients are known to be finite; `factor`: scale from sums to gradients.

    `by_parameter`: a number for each parameter, non-finite if its gradient is: its squared norm or (`probed`) another;
    None: not computed. `summed`: over ranks.
    """

    step: int
    window: Window
    factor: float | torch.Tensor
    by_parameter: torch.Tensor | None
    summed: bool
    probed: bool


class NonFinite:
    """Applies the policy for non-finite gradients: the key `non_finite`, or "skip" where a loss scale is searched.

    Attributes:
        checks: the policy needs the result before the update.
        found: gradients of the last step were not finite; the same on all ranks.
    """

    def __init__(self, sharded: ShardedModel, job: Communicator, config: Config, anomalies: Anomalies) -> None:
        watch = config.anomaly_watch
        self.policy = on_non_finite(config)
        self.checks = self.policy in ("skip", "stop", "rewind")
        self.tracer = ModuleTracer(sharded.module, watch.trace if watch.enabled else "off", watch.trace_steps)
        self.found = False
        self._since: int | None = None
        self._sharded = sharded
        self._job = job
        self._anomalies = anomalies

    @staticmethod
    def flag(values: torch.Tensor) -> torch.Tensor:
        """Return 1 if a value is not finite, else 0, as a 0-D fp64 tensor; the host does not wait."""
        return torch.isfinite(values).all().logical_not().double()

    def update(self, found: bool, gradients: StepGradients, *, late: bool) -> None:
        """Record whether gradients of a step were non-finite, and warn at the beginning and the end of a series of
        such steps, if the policy is to warn (all ranks call). `late`: the gradients are freed.
        """
        assert self._sharded.reducer is not None
        self._sharded.reducer.watch_everything(found)
        self.found = found
        if self.policy != "warn":
            return
        step = gradients.step
        if not found and self._since is not None:
            if self._job.rank == 0:
                logger.warning(
                    "step %d: gradients are finite again, after %d steps with gradients that were not",
                    step,
                    step - self._since,
                )
            self._since = None
        elif found and self._since is None:
            report = self.report(gradients, late=late)
            if report.parameter is None and gradients.probed and not late:
                return  # all gradients are finite, and the probe was beyond their dtype
            self._since = step
            report = self.traced(report, gradients)
            anomaly = Anomaly.of_overflow(step, report, "warn")
            self._anomalies.note(
                anomaly,
                "step %d: gradients are not finite, and the update makes parameters infinite or NaN. %s. The key "
                '"non_finite" is "warn"; "skip" skips such steps, "stop" ends the run before the update, "rewind" '
                "restores a copy in memory; %s",
                step,
                report,
                anomaly.advice,
            )

    def report(self, gradients: StepGradients, *, late: bool = False, loss_scale: float = 1.0) -> OverflowReport:
        """Return the cause of non-finite gradients; all ranks call and get the same."""
        sharded, values = self._sharded, gradients.by_parameter
        numbering, reducer, sums = sharded.numbering, sharded.reducer, sharded.sums
        assert reducer is not None and sums is not None and values is not None
        if not gradients.summed:
            values = sums.by_tensor(sums.own_squares() if gradients.probed and not late else values)
        places = torch.isfinite(values).logical_not().nonzero().flatten().tolist()
        place = places[0] if places else None
        index = numbering.index(place)
        unit = None if index is None else sharded.unit_of(index)
        checked = True if unit is None else reducer.was_finite(unit.index, formerly=late)
        counts = (0, 0, 0.0)
        if index is not None and unit is not None and numbering.counts[index] and not late:
            with sharded.state.acquired([unit], written=False):
                counts = count_non_finite([values for _, _, values in sharded.state.gradient_runs(index) or ()])
        local = (gradients.window.lost(), checked, None if unit is None else unit.name, *counts)
        columns = zip(*self._job.exchange(local, "overflow"), strict=True)
        lost, finite, units, infinite, nan, largest = columns
        with_loss = tuple(rank for rank, one in enumerate(lost) if one)
        with_gradients = tuple(rank for rank, one in enumerate(finite) if one is False or len(finite) == 1)
        summed: Phase = "gradients" if None in finite else "reduce"
        return OverflowReport(
            "forward" if with_loss else "backward" if with_gradients else summed,
            with_loss or with_gradients,
            None if place is None else numbering.names[place],
            next((name for name in units if name is not None), None),
            0 if place is None else math.prod(numbering.shapes[place]),
            loss_scale,
            None if late else sum(infinite),
            None if late else sum(nan),
            None if late else max(largest) * abs(float(gradients.factor)),
            extent=Extent.of(places, numbering.names) if places else None,
        )

    def traced(self, report: OverflowReport, gradients: StepGradients) -> OverflowReport:
        """Return a report with the module of origin, if traced; start tracing if configured (all ranks call)."""
        origin = self.tracer.origin(report, gradients.window, self._job)
        steps = self.tracer.start(gradients.step)
        # With other policies the run ends here, or the update damages all parameters: tracing later is useless.
        recurs = self.policy in ("skip", "rewind")
        return replace(report, origin=origin, watched_for=steps if recurs else None)
