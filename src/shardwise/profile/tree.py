"""Module tree of FLOP counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.profile.counting import BACKWARD, FORWARD, RECOMPUTE, FlopCount

Numel = Callable[[nn.Parameter], int]


@dataclass(frozen=True)
class ModuleProfile:
    """FLOPs of a module and its submodules.

    Attributes:
        name: path from the model, as in `named_modules`; empty for the model itself.
        parameters: number of parameter elements, shared ones counted once.
        forward: FLOPs of forward passes; for the model, including operators outside of modules, such as a loss.
        backward: FLOPs of backward passes, without recomputation.
        recompute: FLOPs of recomputation in backward passes.
        seconds: time of its forward calls.
        calls: number of calls in forward passes.
        children: submodules; a shared module appears only at its first place.
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
        """Multiply-accumulate operations of forward passes; all counted operators are matrix products."""
        return self.forward // 2

    @property
    def depth(self) -> int:
        """Number of enclosing modules."""
        return self.name.count(".") + 1 if self.name else 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward passes, without recomputation."""
        return self.forward + self.backward

    def walk(self) -> Iterator[ModuleProfile]:
        """Yield this module and its submodules, depth-first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        own = ("name", "kind", "parameters", "forward", "backward", "recompute", "seconds", "calls", "macs")
        return {**{key: getattr(self, key) for key in own}, "children": [child.as_dict() for child in self.children]}


def profile_of(count: FlopCount, numel: Numel = nn.Parameter.numel, *, timed: bool = True) -> ModuleProfile:
    """Return the profile of a stopped count, waiting for the device if it was timed (not in a dry run)."""
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
