"""Construction of a model's units: plain parameters are laid out, filled and sharded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.domain import Domain, Domains
from shardwise.comm.machines import by_machine, groups_of
from shardwise.errors import ConflictError, UsageError
from shardwise.memory.places import ON_DEVICE, Homes, acquiring
from shardwise.precision.float8 import weights_to_gather
from shardwise.registry import Registry
from shardwise.utils.logging import warn_once
from shardwise.zero.parameters.init import PartStore, whole_values
from shardwise.zero.passes.modulehook import weakly
from shardwise.zero.units import released
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.float8_weights import Float8Codes
from shardwise.zero.units.layout import FlatParam
from shardwise.zero.units.partition import UnitSpec
from shardwise.zero.units.peaks import Orders, best_whole
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.quantized_weights import UnitCodes
from shardwise.zero.units.unit import Unit

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


class UnitBuilder:
    """Builds the units of a sharded model, which is complete except for its units."""

    def __init__(self, model: ShardedModel, domains: Domains, homes: Homes) -> None:
        self._model = model
        self._owner = model.owner
        self._registry, self._plan, self._policy = model.registry, model.plan, model.policy
        self._device, self._accountant = model.device, model.accountant
        self._update, self._owners = model.update, model.owners
        self._domains = domains
        self._homes = homes
        self._resident: frozenset[int] = frozenset()
        self._near: frozenset[int] = frozenset()

    def choose_places(self, specs: Sequence[UnitSpec]) -> None:
        """Choose the units with other tiers, if only a part of the state is offloaded.

        The optimizer state of the first units that fit stays on the device, because these are stepped at once, and the
        next forward pass begins with them while host copies return. Parameters of the first that fit stay on the host.
        """
        where, domains = self._plan.where, self._domains
        resident: list[int] = []
        sizes = [sum(size for t, size in zip(spec.tensors, spec.sizes, strict=True) if t.trainable) for spec in specs]
        left = round(sum(sizes) * (1 - where.share))
        near: list[int] = []
        room = where.near
        for index, spec in enumerate(specs):
            if sizes[index] <= left:
                resident.append(index)
                left -= sizes[index]
            domain = domains.of(spec.domain)
            own = -(-spec.size // domain.parts(self._plan.levels(domain).parameters))
            if own <= room:
                near.append(index)
                room -= own
        self._resident, self._near = frozenset(resident), frozenset(near)

    def homes_of(self, number: int) -> Homes:
        """Return the tiers of a unit's state."""
        homes = self._homes
        if number in self._resident:
            homes = replace(homes, optimizer=ON_DEVICE, whole=ON_DEVICE, gradients=ON_DEVICE)
        return replace(homes, parameters=homes.near) if number in self._near else homes

    def stay_whole(self, specs: Sequence[UnitSpec], layouts: Sequence[Sequence[FlatParam]], orders: Orders) -> set[int]:
        """Return the units that stay unsharded, by configuration, or because resharding would save no memory."""
        plan = self._plan
        if not plan.releases:
            return set()
        # A unit that only this rank has is not sharded.
        replicable = self._domains.main.world > 1 and self._homes.parameters is ON_DEVICE
        stay = {index for index, spec in enumerate(specs) if replicable and self._domains.of(spec.domain).world == 1}
        elements = 0
        for index, spec in enumerate(specs):
            if spec.size <= plan.persistent_elements and elements + spec.size <= plan.persistent_total:
                stay.add(index)
                elements += spec.size
        if plan.keeps_what_saves:
            whole = {i: sum(s.numel * s.dtype.itemsize for s in sections) for i, sections in enumerate(layouts)}
            shard = {
                i: sum(self._kept(s, self._domains.of(specs[i].domain)) * s.dtype.itemsize for s in sections)
                for i, sections in enumerate(layouts)
            }
            numels = {i: sum(s.numel for s in sections) for i, sections in enumerate(layouts)}
            stay |= best_whole(orders, whole, shard, numels, plan.ahead, stay)
        return stay

    def _kept(self, section: FlatParam, domain: Domain) -> int:
        if self._homes.parameters is not ON_DEVICE:
            return 0
        second = self._plan.secondary if self._update is not None else 1
        return section.size(self._plan.levels(domain).parameters) + (section.numel // second if second > 1 else 0)

    def build(self, number: int, spec: UnitSpec, layouts: Sequence[FlatParam], *, sharded: bool) -> Unit:
        """Lay out a unit in memory, fill it with the values of its parameters, and reshard it."""
        sections = []
        domain = self._domains.of(spec.domain)
        for layout in layouts:
            levels = self._plan.levels(domain)
            levels = levels if sharded else replace(levels, parameters=0)
            homes = self.homes_of(number)
            homes = homes if sharded else replace(homes, parameters=ON_DEVICE)
            if self._owned(layout):
                levels = replace(levels, optimizer=domain.depth)
            section = FlatParamStorage(
                layout,
                domain=domain,
                levels=levels,
                stepped=self._update is not None,
                device=self._device,
                # Frozen parameters, which may be integers, have no master weights.
                master_dtype=self._policy.master_dtype(layout.dtype) if layout.trainable else layout.dtype,
                accumulate_dtype=self._policy.accumulation_dtype(layout.dtype),
                accountant=self._accountant,
                homes=homes,
                label=spec.name,
            )
            sections.append(section)
            if not section.master_is_parameter and any(
                self._registry[slot.index].source_dtype.itemsize > layout.dtype.itemsize for slot in layout.slots
            ):
                section.widen_source(section.master_dtype)
        takes = sharded and self._update is not None
        unit = Unit(
            number,
            spec.name,
            spec.modules,
            spec.tensors,
            self._registry,
            sections,
            domain,
            take_over=weakly(self._model.take_over) if takes else None,
            allow_change=weakly(self._model.allow_change) if takes else None,
        )
        for section in sections:
            self._fill(unit, section)
        unit.attach()
        with acquiring(unit.acquisitions()):
            for section in sections:
                section.settle(keep_master=not self._owned(section.layout) and self._update is not None)
            if self._update is not None:
                self._update.capture(unit)
        for section in sections:
            section.forget_source()
        for parameter in unit.parameters:
            parameter.grad = None  # from earlier training; the first gradient would be added to it
            released.adopt(parameter, self._owner)
        unit.reshard()
        return unit

    def prepare_gathers(self, sharded: Sequence[Unit]) -> None:
        """Set up quantized or float8 weights and secondary shards (ZeRO++), if the plan has them."""
        if self._plan.quantized_weights:
            self._send_codes(sharded, UnitCodes)
        elif self._plan.float8_weights:
            weights, dtype = weights_to_gather(self._model.module)
            found = {tensor.index for tensor in map(self._registry.find, weights) if tensor is not None}
            self._send_codes(sharded, partial(Float8Codes, found, dtype))
        if self._plan.secondary > 1 and self._update is not None:
            ranks = self._domains.main.ranks
            groups = groups_of(ranks.nodes(), self._plan.secondary)
            _look_for_nodes(ranks.nodes(), groups)
            group = ranks.part(groups, "secondary")
            group.connect("gather")
            for unit in sharded:
                unit.keep_second(group)

    def _send_codes(self, sharded: Sequence[Unit], source: Callable[..., UnitCodes]) -> None:
        for unit in sharded:
            codes = source(unit.sections, self._registry, self._accountant)
            unit.codes = codes if codes.coded else None

    def _owned(self, layout: FlatParam) -> bool:
        return layout.whole and self._owners is not None and (layout.cut or not self._owners.replicated)

    def _fill(self, unit: Unit, section: FlatParamStorage) -> None:
        agreed = True
        for slot in section.layout.slots:
            values, same = whole_values(self._registry.parameters[slot.index])
            agreed = agreed and same
            section.source[slot.offset : slot.offset + slot.numel].copy_(values.reshape(-1))
        if not agreed:
            # The domain of a part has a group for reductions, which no pass uses yet.
            kind = "explicit" if unit.domain is self._domains.main else "reduce"
            unit.domain.ranks.broadcast(section.source, 0, f"{unit.name}.initial", kind).wait()
            if self._model.sharding.replicas is not None:
                replicas = self._model.sharding.replicas[0]
                replicas.spread(section.source, replicas.job.members[0], f"{unit.name}.initial")


def largest_sizes(registry: Registry, domains: Domains) -> list[int]:
    """Return the elements of each parameter on the rank with the largest part (all ranks call, with one result)."""
    own = [tensor.numel for tensor in registry]
    if not domains.others:
        return own
    # Equal lists are one object: messages grow with the number of different parts.
    versions = {id(sizes): sizes for sizes in domains.main.ranks.exchange(own, "sizes")}.values()
    if any(len(sizes) != len(own) for sizes in versions):
        return own  # `GlobalTensorIds` names the difference
    return [max(sizes) for sizes in zip(*versions, strict=True)]


def connect_domains(
    domains: Domains, units: Sequence[Unit], plan: Plan, *, steps: bool, whole_tensors: bool, registered: bool
) -> None:
    """Create the process groups of passes (all ranks call).

    `whole_tensors`: owners send some tensors to all ranks; `registered`: as in `Domain.connect`.
    """
    for domain in (domains.main, *domains.others.values()):
        tensors = [tensor for unit in units if unit.domain is domain for tensor in unit.tensors]
        if domain.world == 1 or not tensors:
            continue
        levels = plan.levels(domain)
        finest = domain.depth if whole_tensors else max(levels.optimizer if steps else 0, levels.parameters)
        trained = steps and any(tensor.trainable for tensor in tensors)
        domain.connect(finest, trained=trained, registered=registered)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, *, of_a_part: bool = False) -> None:
    """Raise UsageError for parameters of the optimizer outside of the model, because no rank would step them.

    `of_a_part`: `model` is a pipeline stage.
    """
    known = set(map(id, model.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                whole = "Put it into a module of the model, or give it an optimizer of its own"
                stage = "A rank of a pipeline has the parameters of its stage: pass a callable that makes the optimizer"
                raise UsageError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in "
                    f"the model ({type(model).__name__}). {stage if of_a_part else whole}"
                )


def warn_of_captured(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer with a `step` of its own has parameters outside of its groups, such as in a list.

    Its groups get other tensors, and a step of the parameters in the list has no effect.
    """
    if inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memory = {_memory(parameter) for parameter in stepped if parameter.numel()} - {None}
    others = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    for name, value in others.items():
        if any(isinstance(one, torch.Tensor) and _memory(one) in memory for one in tree_leaves(value)):
            warn_once(
                f"{type(optimizer).__name__} keeps parameters of the model in its attribute {name!r}, not only in "
                "its param_groups. Parameters are divided by replacing them in param_groups: if step() changes those "
                "that the optimizer keeps, that has no effect. Let it read self.param_groups each time"
            )


def _memory(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def check_domains(registry: Registry, domains: Domains, plan: Plan, *, compresses: bool) -> None:
    """Refuse methods that exchange values among all ranks, if some ranks share parameters of their own.

    Raises UsageError for parts built under zero.Init, ConflictError for compression and secondary shards.
    """
    for tensor, parameter in zip(registry, registry.parameters, strict=True):
        owner = released.owner_of(parameter)
        if isinstance(owner, PartStore) and not owner.agrees(parameter, tensor.ranks):
            raise UsageError(
                f"parameter {tensor.name!r} is declared as a part that only some ranks have, and was built under "
                "zero.Init, which gives all ranks the same values. Build the whole parameter there, and make it a "
                "part with shardwise.registry.narrow(), or build its layer outside of it"
            )
    for used, what in (
        (compresses, "lossy gradient reduction, which exchanges what it sends among all ranks"),
        (plan.secondary > 1, "zero_optimization.zero_hpz_partition_size, whose groups are of all ranks"),
    ):
        if domains.others and used:
            raise ConflictError(
                f"parameters that only some ranks share (declare_part) cannot be combined with {what}. Keep one of them"
            )


def _look_for_nodes(nodes: Sequence[str], groups: Sequence[Sequence[int]]) -> None:
    """Warn if groups of ranks, which share a secondary copy, span machines."""
    crossing = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
    if crossing:
        sizes = sorted({len(ranks) for ranks in by_machine(nodes).values()})
        warn_once(
            f"zero_optimization.zero_hpz_partition_size is {len(groups[0])}, and {len(crossing)} of {len(groups)} such "
            f"groups lie on several machines, which have {' or '.join(map(str, sizes))} ranks: backward passes gather "
            "between machines as without it, and memory is spent. Set it to a divisor of the ranks of each machine"
        )
