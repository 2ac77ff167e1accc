"""Partition of a model into units, found from the module tree in registration order.

The outermost repeated containers (`nn.ModuleList`, `nn.Sequential` with several children that hold parameters) name the
blocks. A block within the cap is a unit, containers included, hence children chosen by data (experts) are in the unit
of their parent. Other modules (embeddings, final norms, heads) are taken one by one, and small adjacent ones are packed
together up to the size of the largest block.

Parameters that only some ranks share are in units of their own. Sizes are relative to the model; the cap is the user's.
If ranks have parts of different sizes, the largest counts: all ranks find the same units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.registry import DomainKey, LogicalTensor, Registry

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class UnitSpec:
    """Unit to be built, named by its first module (`h.3`, or `(root)`); `sizes` are the largest of any rank."""

    name: str
    modules: list[nn.Module]
    tensors: list[LogicalTensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of elements of all parameters, the same on all ranks."""
        return sum(self.sizes)

    def add(self, tensor: LogicalTensor, size: int) -> None:
        """Add a parameter."""
        self.tensors.append(tensor)
        self.sizes.append(size)

    @property
    def domain(self) -> DomainKey | None:
        """Domain of the parameters; None: all ranks."""
        return self.tensors[0].domain


class _Finder:
    def __init__(
        self, root: nn.Module, registry: Registry, cap: int, leaves: Iterable[nn.Module], sizes: Sequence[int]
    ) -> None:
        self.registry = registry
        self.sizes = sizes
        self.cap = cap
        self.leaves = {id(leaf) for leaf in leaves}
        self.taken: set[int] = set()
        self.specs: list[UnitSpec] = []
        self.names = {id(module): name or "(root)" for name, module in root.named_modules(remove_duplicate=False)}
        # The first module that has a tied parameter claims it, but all of its modules need it.
        self.homes: dict[int, list[nn.Module]] = {}
        for module in root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    tensor = registry.find(parameter)
                    if tensor is not None and module not in self.homes.setdefault(tensor.index, []):
                        self.homes[tensor.index].append(module)

    def own(self, module: nn.Module, recurse: bool) -> list[LogicalTensor]:
        found: dict[int, LogicalTensor] = {}
        for parameter in module.parameters(recurse=recurse):
            tensor = self.registry.find(parameter)
            if tensor is not None and tensor.index not in self.taken:
                found[tensor.index] = tensor
        return list(found.values())

    def claim(self, module: nn.Module, tensors: Sequence[LogicalTensor]) -> None:
        for domain in dict.fromkeys(tensor.domain for tensor in tensors):
            self._claim(module, [tensor for tensor in tensors if tensor.domain == domain])

    def _claim(self, module: nn.Module, tensors: Sequence[LogicalTensor]) -> None:
        spec = UnitSpec(self.names[id(module)], [module])
        for tensor in tensors:
            self.taken.add(tensor.index)
            size = self.sizes[tensor.index]
            if spec.tensors and spec.size + size > self.cap and id(module) not in self.leaves:
                self.specs.append(spec)
                spec = UnitSpec(self.names[id(module)], [module])
            spec.add(tensor, size)
        self.specs.append(spec)

    def block(self, module: nn.Module) -> None:
        tensors = self.own(module, recurse=True)
        size = sum(self.sizes[tensor.index] for tensor in tensors)
        if id(module) in self.leaves or (size <= self.cap and not isinstance(module, _CONTAINERS)):
            self.claim(module, tensors)
            return
        self.claim(module, self.own(module, recurse=False))
        for child in module.children():
            self.block(child)

    def walk(self, module: nn.Module) -> None:
        if id(module) in self.leaves:
            self.claim(module, self.own(module, recurse=True))
            return
        self.claim(module, self.own(module, recurse=False))
        repeated = isinstance(module, _CONTAINERS) and len(list(module.children())) > 1
        for child in module.children():
            if repeated:
                self.block(child)
            else:
                self.walk(child)


def find_units(
    root: nn.Module,
    registry: Registry,
    cap: int,
    leaves: Iterable[nn.Module] = (),
    sizes: Sequence[int] | None = None,
) -> list[UnitSpec]:
    """Split a model into units, in registration order. Each tensor of the registry is in exactly one unit.

    A parameter larger than `cap` elements is a unit of its own. Modules `leaves` stay in one unit even above the cap.
    `sizes` has the elements of each parameter, by index, the same on all ranks; None: this rank's.
    """
    sizes = [tensor.numel for tensor in registry] if sizes is None else sizes
    finder = _Finder(root, registry, cap, leaves, sizes)
    finder.walk(root)
    specs = sorted(finder.specs, key=lambda spec: spec.tensors[0].index)
    return [_with_homes(spec, finder.homes) for spec in _pack(specs, registry, cap, finder.leaves)]


def _pack(specs: list[UnitSpec], registry: Registry, cap: int, leaves: set[int]) -> list[UnitSpec]:
    """Join small adjacent units up to the size of the largest repeated block (or largest layer, if no size repeats)."""
    sizes: dict[int, int] = {}
    for spec in specs:
        sizes[spec.size] = sizes.get(spec.size, 0) + 1
    repeated = [size for size, count in sizes.items() if count > 1]
    limit = min(cap, max(repeated or sizes or [0]))
    packed: list[UnitSpec] = []
    for spec in specs:
        last = packed[-1] if packed else None
        if last is not None and last.size + spec.size <= limit and _may_join(last, spec, leaves):
            last.tensors.extend(spec.tensors)
            last.sizes.extend(spec.sizes)
            last.modules.extend(module for module in spec.modules if module not in last.modules)
        else:
            packed.append(UnitSpec(spec.name, list(spec.modules), list(spec.tensors), list(spec.sizes)))
    return packed


def _may_join(first: UnitSpec, second: UnitSpec, leaves: set[int]) -> bool:
    """Return False for leaves, and for nested modules: the unit would stay unsharded for the outer forward."""
    if first.domain != second.domain:
        return False
    if {id(module) for spec in (first, second) for module in spec.modules} & leaves:
        return False
    inside = {id(inner) for module in first.modules for inner in module.modules() if inner is not module}
    return not any(id(module) in inside for module in second.modules)


def _with_homes(spec: UnitSpec, homes: dict[int, list[nn.Module]]) -> UnitSpec:
    """Add modules outside of the unit's own modules that hold tied copies of its parameters."""
    covered = {id(m) for module in spec.modules for m in module.modules()}
    for tensor in spec.tensors:
        for module in homes.get(tensor.index, ()):
            if id(module) not in covered:
                covered.add(id(module))
                spec.modules.append(module)
    return spec
