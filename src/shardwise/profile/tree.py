"""What was counted, as a tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.profile.counting import BACKWARD, FORWARD, RECOMPUTE, FlopCount

Numel = Callable[[nn.Parameter], int]


@dataclass(frozen=True)
class ModuleProfile:
    """What a module and all in it have computed.

    Attributes:
        name: path from the model, as in `named_modules`; empty for the model itself.
        kind: name of its class.
        parameters: elements of its parameters, shared ones counted once.
        forward: floating-point operations of forward passes; of the model also those around it, such as a loss that was
            computed while counting.
        backward: of backward passes, without what was recomputed.
        recompute: of what backward passes have computed again.
        seconds: of its forward calls.
        calls: in forward passes.
        children: its modules; each module is in one place, the first.
    """

    name: str
    kind: str
    parameters: int
    forward: int
    backward: int
    recompute: int
    seconds: float
    calls: int
    children: tuple[ModuleProfile, ...]

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of forward passes: all that is counted are products of matrices."""
        return self.forward // 2

    @property
    def depth(self) -> int:
        """How many modules are around it."""
        return self.name.count(".") + 1 if self.name else 0

    @property
    def flops(self) -> int:
        """Of forward and backward passes, without what was recomputed."""
        return self.forward + self.backward

    def walk(self) -> Iterator[ModuleProfile]:
        """Yield this module and all in it, each before what is in it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        own = ("name", "kind", "parameters", "forward", "backward", "recompute", "seconds", "calls", "macs")
        return {**{key: getattr(self, key) for key in own}, "children": [child.as_dict() for child in self.children]}


def profile_of(count: FlopCount, numel: Numel = nn.Parameter.numel, *, timed: bool = True) -> ModuleProfile:
    """Return what has been counted; waits for the device if there are times of it.

    Args:
        count: has been stopped.
        numel: tells how many elements a parameter has, where ranks hold parts of it.
        timed: False: nothing has really been computed, so times mean nothing.
    """
    seconds = count.seconds() if timed else {}
    return _profile("", count.model, count, seconds, numel, {count.model})


def _profile(
    name: str,
    module: nn.Module,
    count: FlopCount,
    seconds: dict[nn.Module, float],
    numel: Numel,
    seen: set[nn.Module],
) -> ModuleProfile:
    children = []
    for part, child in module.named_children():
        if child not in seen:
            seen.add(child)
            children.append(_profile(f"{name}.{part}" if name else part, child, count, seconds, numel, seen))
    owners: Collection[nn.Module | None] = (module,) if name else (module, None)
    sums = {
        phase: sum(count.flops[owner, phase] for owner in owners) + sum(getattr(child, phase) for child in children)
        for phase in (FORWARD, BACKWARD, RECOMPUTE)
    }
    return ModuleProfile(
        name=name,
        kind=type(module).__name__,
        parameters=sum(numel(parameter) for parameter in module.parameters()),
        seconds=seconds.get(module, 0.0),
        calls=count.calls[module],
        children=tuple(children),
        **sums,
    )
