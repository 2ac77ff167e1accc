"""Traces the module that produced the first non-finite values, with hooks that record value ranges.

Each module call records minimum and maximum of its inputs, parameters and outputs, and of their gradients: one pass
over memory each (`torch.aminmax`, which shows NaN and infinity). Both stay on the device, without a host wait, until a
step has non-finite gradients. The first non-finite record names the module of an output, or the parent module that made
the value between its submodules. A module's contribution to the summed gradient of a shared tensor is recorded at its
own autograd nodes, found by a walk from outputs to inputs. The graph is unchanged: gradients are bit-identical.

Expected infinities are ignored: minus infinity in an input without a gradient (a mask), and minus infinity that the
module turns into finite values (a softmax).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.autograd.graph import Node

from shardwise.comm.ledger import user_line
from shardwise.compat import backward_pass, number_of, transforming
from shardwise.precision.origin import Origin
from shardwise.precision.overflow import OverflowReport
from shardwise.trees import tensors_in
from shardwise.zero.passes.modulehook import ModuleHook

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

MOST = 1 << 17
"""Most records of a window; bounds memory for scripts that never step."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_FAR = 4096
"""Most autograd nodes of a module that are searched."""


class Call:
    """A call of a module: `name` ("" is the model), enclosing call (None: the script), records and autograd nodes.
    `begins`: nodes of its inputs. `inside`: nodes of submodule outputs, each with the nodes of the inputs.
    """

    __slots__ = ("around", "begins", "came_out", "gradients", "inside", "micro_batch", "name", "of_class", "went_in")

    def __init__(self, name: str, of_class: str, around: Call | None, micro_batch: int) -> None:
        self.name = name
        self.of_class = of_class
        self.around = around
        self.micro_batch = micro_batch
        self.went_in: list[Look] = []
        self.came_out: list[Look] = []
        self.gradients: list[Look] = []
        self.begins: set[Node] = set()
        self.inside: dict[Node, set[Node]] = {}


class Look:
    """Smallest and largest of some values, on their device: of an input, parameter or output, or a gradient."""

    __slots__ = ("call", "differentiable", "parameter", "range", "what")

    def __init__(self, what: str, call: Call, values: torch.Tensor, parameter: str | None = None) -> None:
        self.what = what
        self.call = call
        self.range = torch.aminmax(values.detach())
        self.differentiable = values.requires_grad
        self.parameter = parameter


Trace = list[Look]
"""Records of a window, in order of time."""


class Tracer:
    """Traces the modules of one engine: never, always, or after a step with non-finite gradients (`steps` steps)."""

    def __init__(self, root: nn.Module, mode: Literal["off", "after", "always"], steps: int) -> None:
        self.micro_batch: Callable[[], int] = int
        self._root = root
        self._mode = mode
        self._steps = steps
        self._until: int | None = None
        self._handles: list[Any] = []
        self._trace: Trace = []
        self._running: list[Call] = []
        self._on = False
        self._lines: dict[str, str] = {}
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, Look | None]] = {}
        if mode == "always":
            self._install()

    @property
    def watching(self) -> bool:
        """Whether modules are traced now; the same on all ranks."""
        return bool(self._handles)

    def new_window(self, step: int) -> Trace | None:
        """Begin the window of `step`; return its trace, or None if modules are not traced."""
        if self._until is not None and step >= self._until:
            self._until = None
            self.remove()
        self._trace = []
        self._seen.clear()
        return self._trace if self.watching else None

    def arm(self, step: int) -> int | None:
        """Start tracing from the next window on (all ranks call). Returns the number of traced steps, if it was off."""
        if self._mode != "after":
            return None
        new = not self.watching
        self._until = step + 1 + self._steps
        self._install()
        return self._steps if new else None

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running.clear()
        self._seen.clear()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        if self._handles:
            return
        for name, module in self._root.named_modules():
            before, after = self._hooks(module, name)
            self._handles.append(module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True))
            self._handles.append(module.register_forward_hook(ModuleHook(after), with_kwargs=True, always_call=True))

    def _hooks(self, module: nn.Module, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        of_class = type(module).__name__

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running = self._running
            if module is self._root:
                running.clear()  # calls interrupted by an error
            again = backward_pass() is not None
            if not running:
                self._on = torch.is_grad_enabled() and not transforming()
            micro_batch = self.micro_batch()
            around = running[-1] if running else self._holder(name, micro_batch) if again else None
            call = Call(name, of_class, around, micro_batch)
            running.append(call)
            if not self._on or len(self._trace) > MOST:
                return
            if name not in self._lines:
                self._lines[name] = user_line()
            if not again:
                for key, parameter in module._parameters.items():
                    if type(parameter) is nn.Parameter:
                        self._look("parameter", call, parameter, key)
            for values in _tensors((args, kwargs)):
                if values.grad_fn is not None:
                    call.begins.add(values.grad_fn)
                if not again and (look := self._look("input", call, values)) is not None:
                    call.went_in.append(look)

        def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            running = self._running
            place = next((n for n in reversed(range(len(running))) if running[n].name == name), None)
            if place is None:
                return
            call = running[place]
            del running[place:]
            if not self._on or len(self._trace) > MOST:
                return
            again = backward_pass() is not None
            made: set[Node] = set()
            for values in _tensors(outputs):
                hooked = self._known(values)
                if not again and (look := self._look("output", call, values)) is not None:
                    call.came_out.append(look)
                if not values.requires_grad or (node := values.grad_fn) is None:
                    continue
                if hooked is None:
                    values.register_hook(self._gradient_hook("output_gradient", call))
                if node not in call.begins:
                    made.add(node)
            if call.begins:
                self._follow(call, made)
            if call.around is not None:
                call.around.inside.update((node, call.begins) for node in made)
            call.begins, call.inside = set(), {}  # the nodes keep activations alive

        return before, after

    def _holder(self, name: str, micro_batch: int) -> Call | None:
        """Return a call of the enclosing module, where a part of it is recomputed separately."""
        while name:
            name = name.rpartition(".")[0]
            module = self._root.get_submodule(name)
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                return Call(name, type(module).__name__, None, micro_batch)
        return None

    def _follow(self, call: Call, made: set[Node]) -> None:
        """Record the gradients that a module's own autograd nodes pass to its inputs; `made`: nodes of its outputs."""
        newest = max(number_of(node) for node in call.begins)
        pending, seen = list(made), set(made)
        while pending and len(seen) < _FAR:
            node = pending.pop()
            befores = call.inside.get(node)
            if befores is None:
                own = [place for place, (before, _) in enumerate(node.next_functions) if before in call.begins]
                if own:
                    node.register_hook(self._handed_on(call, own))
                befores = {before for before, _ in node.next_functions if before is not None}
            # Nodes older than the newest input were made before the call.
            further = {before for before in befores - seen - call.begins if number_of(before) > newest}
            pending += further
            seen |= further

    def _handed_on(self, call: Call, places: list[int]) -> Callable[..., None]:
        look = self._gradient_hook("input_gradient", call)

        def after(handed: tuple[torch.Tensor | None, ...], _: Any) -> None:
            for place in places:
                gradient = handed[place] if place < len(handed) else None
                if gradient is not None:
                    look(gradient)

        return after

    def _gradient_hook(self, what: str, call: Call) -> Callable[[torch.Tensor], None]:
        trace = self._trace

        def look(gradient: torch.Tensor) -> None:
            if _visible(gradient) and len(trace) <= MOST:
                trace.append(Look(what, call, gradient))
                if what == "output_gradient":
                    call.gradients.append(trace[-1])

        return look

    def _look(self, what: str, call: Call, values: torch.Tensor, parameter: str | None = None) -> Look | None:
        known = self._known(values)
        if known is not None and known[0] is not None:
            return known[0]
        if not _visible(values):
            return None
        look = Look(what, call, values, parameter)
        self._trace.append(look)
        self._note(values, look)
        return look

    def _known(self, values: torch.Tensor) -> tuple[Look | None] | None:
        found = self._seen.get(id(values))
        if found is None or found[0]() is not values or found[1] != values._version:
            return None
        return (found[2],)

    def _note(self, values: torch.Tensor, look: Look | None) -> None:
        self._seen[id(values)] = weakref.ref(values), values._version, look

    # -- evaluation --------------------------------------------------------------------------------------------------

    def explained(
        self, report: OverflowReport, trace: Trace | None, losses: list[torch.Tensor] | None, job: Communicator
    ) -> Origin | None:
        """Return the origin of non-finite values; None if untraced or unseen. All ranks call and get the same."""
        if trace is None:
            return None
        told = job.exchange(self._own(trace, losses or []), "origin")
        found = [(rank, said) for rank, said in enumerate(told) if said is not None]
        if not found:
            return self._of_parameter(report)
        # The earliest micro-batch; within it forward before backward.
        _, first = min(found, key=lambda one: (one[1]["micro_batch"], one[1]["phase"] != "forward", one[0]))
        alike = ("micro_batch", "phase", "what", "module", "parameter")
        ranks = [rank for rank, said in found if all(said[key] == first[key] for key in alike)]
        return Origin(**{**first, "ranks": tuple(ranks)})

    def _of_parameter(self, report: OverflowReport) -> Origin | None:
        if report.phase != "backward" or report.parameter is None:
            return None
        module, _, parameter = report.parameter.rpartition(".")
        kind: Literal["NaN", "infinite"] = "NaN" if report.nan or report.infinite == 0 else "infinite"
        owner = dict(self._root.named_modules()).get(module)
        of_class = "" if owner is None else type(owner).__name__
        line = self._lines.get(module, "")
        return Origin("own_gradient", "backward", module, of_class, parameter, None, kind, report.ranks, None, line)

    def _own(self, trace: Trace, losses: list[torch.Tensor]) -> dict[str, Any] | None:
        ranges = dict(zip(map(id, trace), _read(trace), strict=True))
        bad = [look for look in trace if not _finite(ranges[id(look)]) and not self._expected(look, ranges)]
        forward = next((look for look in bad if "gradient" not in look.what), None)
        backward = next((look for look in bad if "gradient" in look.what), None)
        lost = next((n for n, loss in enumerate(losses) if not math.isfinite(float(loss))), None)
        found: list[tuple[int, int, Origin]] = []
        if forward is not None:
            found.append((forward.call.micro_batch, 0, self._origin(forward, ranges)))
        if lost is not None:
            kind: Literal["NaN", "infinite"] = "NaN" if math.isnan(float(losses[lost])) else "infinite"
            line = self._lines.get("", "")
            found.append((lost, 1, Origin("loss", "forward", None, kind=kind, micro_batch=lost, line=line)))
        if backward is not None:
            found.append((backward.call.micro_batch, 2, self._origin(backward, ranges)))
        return asdict(min(found, key=lambda one: one[:2])[2]) if found else None

    def _expected(self, look: Look, ranges: dict[int, tuple[float, float]]) -> bool:
        low, high = ranges[id(look)]
        if look.what not in ("input", "output") or low != -math.inf or not (math.isfinite(high) or high == -math.inf):
            return False
        if not look.differentiable:
            return True
        outputs = look.call.came_out
        return look.what == "input" and bool(outputs) and all(_finite(ranges[id(one)]) for one in outputs)

    def _origin(self, look: Look, ranges: dict[int, tuple[float, float]]) -> Origin:
        call = look.call
        kind: Literal["NaN", "infinite"] = "NaN" if any(math.isnan(value) for value in ranges[id(look)]) else "infinite"
        at: dict[str, Any] = {"kind": kind, "micro_batch": call.micro_batch, "line": self._lines.get(call.name, "")}

        def largest(looks: list[Look]) -> float | None:
            sizes = [max(map(abs, ranges[id(one)])) for one in looks if id(one) in ranges]
            return max(sizes, default=None)

        if look.what == "parameter":
            return Origin("parameter", "forward", call.name, call.of_class, look.parameter, **at)
        if look.what == "output":
            return Origin("output", "forward", call.name, call.of_class, largest=largest(call.went_in), **at)
        if look.what == "input_gradient":
            looks = call.gradients
            return Origin("input_gradient", "backward", call.name, call.of_class, largest=largest(looks), **at)
        around = call.around
        if look.what == "input":
            if around is None:
                return Origin("batch", "forward", None, **at)
            return Origin("code", "forward", around.name, around.of_class, other_module=call.name, **at)
        if around is None:
            return Origin("loss_gradient", "backward", None, **at)
        return Origin("code_gradient", "backward", around.name, around.of_class, other_module=call.name, **at)


def _visible(values: torch.Tensor) -> bool:
    return values.dtype in _FLOATS and values.numel() > 0 and values.layout is torch.strided and not values.is_nested


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif type(values) in (tuple, list):
        for value in values:
            yield from _tensors(value)
    elif type(values) is dict:
        for value in values.values():
            yield from _tensors(value)
    elif values is not None and not isinstance(values, str | int | float):
        yield from tensors_in(values)


def _finite(pair: tuple[float, float]) -> bool:
    return math.isfinite(pair[0]) and math.isfinite(pair[1])


def _read(trace: Trace) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = [(0.0, 0.0)] * len(trace)
    places: dict[torch.device, list[int]] = {}
    for place, look in enumerate(trace):
        places.setdefault(look.range[0].device, []).append(place)
    for here in places.values():
        values = torch.stack([value.double() for place in here for value in trace[place].range]).tolist()
        for number, place in enumerate(here):
            found[place] = values[2 * number], values[2 * number + 1]
    return found
