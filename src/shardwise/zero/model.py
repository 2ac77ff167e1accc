"""ShardedModel: a user's module with its units, their memory, passes and updates.

The engine talks to this object, which combines registry, units, unsharder, reducer, hooks and update. Because the
constructor fills and shards one unit after the other, at most one unit exists twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression import Compressor
from shardwise.comm.desync import RankState, inside_of
from shardwise.comm.domain import Domains
from shardwise.comm.replicas import Replicas
from shardwise.compat import without_overrides
from shardwise.device.ranges import named
from shardwise.device.staging import Copied
from shardwise.errors import DesyncError, OffloadError, PeerLostError, UsageError
from shardwise.memory import (
    Accountant,
    Category,
    give_back_freed_memory,
    module_bytes,
    resident_bytes,
    virtual_bytes,
)
from shardwise.memory.places import ALL_AT_HAND, ON_DEVICE, Homes
from shardwise.precision.dtypes import PrecisionPolicy
from shardwise.precision.norms import clip_coefficient
from shardwise.precision.tensornorms import NORMS
from shardwise.registry import Registry
from shardwise.utils.logging import logger
from shardwise.zero.build import (
    UnitBuilder,
    check_domains,
    check_optimizer,
    connect_domains,
    largest_sizes,
    warn_of_captured,
)
from shardwise.zero.owner import ParameterOwner
from shardwise.zero.parameters.guards import Guards
from shardwise.zero.parameters.init import PartStore
from shardwise.zero.parameters.memoryguard import MemoryGuard
from shardwise.zero.parameters.unsharded_access import Wholes
from shardwise.zero.passes.calls import UnitCalls
from shardwise.zero.passes.driver import Alone, Driver
from shardwise.zero.passes.hooks import Hooks
from shardwise.zero.passes.model_pass import Part, Pass, backward_order
from shardwise.zero.passes.order import Chunk, Phase
from shardwise.zero.passes.peer_shards import NoPeers, PeerShards
from shardwise.zero.passes.plain import PlainGradients
from shardwise.zero.passes.reduce import CopiesElsewhere, Reducer
from shardwise.zero.passes.sidechannel import SideChannel
from shardwise.zero.passes.sums import GradientSums
from shardwise.zero.passes.unshard import Unsharder
from shardwise.zero.state import ShardedState
from shardwise.zero.states import MovingStates
from shardwise.zero.units import released
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import lay_out
from shardwise.zero.units.partition import find_units
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.presence import Presence
from shardwise.zero.units.unit import Unit, UnitState
from shardwise.zero.updates.comm_optimizer import CommUpdate
from shardwise.zero.updates.local_sgd import LocalSgdUpdate, check_local
from shardwise.zero.updates.owner_sharded import WholeUpdate
from shardwise.zero.updates.segments import SegmentUpdate
from shardwise.zero.updates.tp_split import SplitTensors
from shardwise.zero.updates.update import StateKind, Stepping, Update

if TYPE_CHECKING:
    from shardwise.config.schema.local import LocalSGD

T = TypeVar("T")

_RESTART = "Restart the job from the last checkpoint"

_WATCHED_EVERY = 16
"""Windows after which changes that no version counter shows are looked for again, after the first two windows."""

_DESTROYED = (
    "the engine has been destroyed, and its model is a plain one again; pass the model to shardwise.initialize() for a "
    "new engine"
)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        stepping: requirements of the optimizer.
        compressor: reduces gradients with loss; None: exactly.
        leaves: modules that stay in one unit each.
        wires: wire dtypes of gradients by `id(parameter)`, where they differ from the policy's.
        plain: without an optimizer, leave gradients in `.grad`, averaged over ranks (True) or summed; None: drop them.
        norm_group: ranks over which squares of gradients are summed, and that save together; None: the pass group.
        copies: by `id(parameter)`, parameters that ranks outside of the pass group have, too.
        chunks: parts of the model that run in passes of their own; none: the model is one.
        place: coordinate of this rank in each dimension of the mesh, and the size of the dimension.
        replicas: replicas that step on their own between exchanges, with the settings; None: gradients are reduced over
            all ranks.
        registered: buffers of collectives are in memory that the backend has registered.
    """

    stepping: Stepping
    is_elementwise: StateKind
    plan: Plan
    policy: PrecisionPolicy
    domains: Domains
    device: torch.device
    accountant: Accountant
    prescale: float = 1.0
    compressor: Compressor | None = None
    leaves: Sequence[nn.Module] = ()
    homes: Homes = ALL_AT_HAND
    wires: Mapping[int, torch.dtype] | None = None
    plain: bool | None = None
    norm_group: Communicator | None = None
    copies: Mapping[int, CopiesElsewhere] = field(default_factory=dict)
    chunks: Sequence[nn.Module] = ()
    place: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    replicas: tuple[Replicas, LocalSGD] | None = None
    registered: bool = False


class ShardedModel:
    """A module whose parameters are sharded; see the module docstring.

    `optimizer` steps this rank's master weights; None: the model is only evaluated, without `sums`.

    Attributes:
        comm: the pass group: ranks that run the same units.
        engine: the engine, while it lives; None: not built yet.
        closed: why the model is no longer sharded ("" while it is).
        failed: error of a disk in a pass or step, which leaves the state inconsistent ("" if none).
        client_groups: parameters of each optimizer group before the engine.
        owners: part of `update` that steps unsharded tensors; None if there is none.
        copied: event after running copies of master weights and optimizer state; None: no copies run.
        wholes: assembles tensors of which ranks have parts.
        values_version: how often the engine has written parameters.
        pinned: number of sharded units that blocks of the script keep unsharded.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, sharding: Sharding) -> None:
        self.module = module
        self.optimizer = optimizer
        self.engine: weakref.ref[Any] | None = None
        self.stepped = False
        self.values_version = self._windows = 0
        self._driver: Driver = Alone()
        self.build(sharding)

    def build(self, sharding: Sharding, sources: Mapping[int, torch.dtype] | None = None) -> None:
        """Build the units, their passes and updates from plain parameters, or from shards of `zero.Init`.

        Args:
            sharding: see above.
            sources: dtypes in the user's model by `id(parameter)`, where parameters have been in units before.
        """
        self.sharding = sharding
        self.plan, self.policy, self.stepping = sharding.plan, sharding.policy, sharding.stepping
        self.device, self.accountant, self.homes = sharding.device, sharding.accountant, sharding.homes
        self.domain = sharding.domains.main
        self.comm: Communicator = self.domain.ranks
        self.closed = self.failed = ""
        self.pinned = 0
        self.presence = Presence()
        self._order_agreed = self._watched = False
        self.copied: Copied | None = None
        self._note_process()
        orders = self._build_units(sources)
        self._build_passes()
        self._build_guards()
        self._watch()
        self._note_resident()
        self.model_pass.set_order([orders] * len(self.model_pass.chunks))
        # Owners of unsharded tensors send to all ranks.
        whole_tensors = bool(self.stepping.whole) and self.plan.shard_optimizer
        steps = self.update is not None
        connect_domains(
            sharding.domains,
            self.units,
            self.plan,
            steps=steps,
            whole_tensors=whole_tensors,
            registered=sharding.registered,
        )
        self.accountant.construction_peak = self.accountant.peak_total
        self.accountant.reset_peak()
        give_back_freed_memory()  # freed pages of the original parameters lie between the shards

    def _note_process(self) -> None:
        resident, addresses, accountant = resident_bytes(), virtual_bytes(), self.accountant
        if resident is not None and accountant.process_bytes is None:
            accountant.process_bytes = max(0, resident - module_bytes(self.module))
            accountant.process_addresses = max(0, addresses - module_bytes(self.module))

    def _build_units(self, sources: Mapping[int, torch.dtype] | None) -> tuple[list[int], list[int]]:
        """Lay out, fill, shard and reshard one unit after the other; return their first forward and backward order."""
        module, optimizer = self.module, self.optimizer
        sharding, plan, domains = self.sharding, self.plan, self.sharding.domains
        groups = optimizer.param_groups if optimizer is not None else []
        owners = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self.registry = registry = Registry.of(
            module, compute_dtype=self.policy.compute_dtype, groups=owners, wires=sharding.wires, sources=sources
        )
        if optimizer is not None:
            check_optimizer(optimizer, module)
            if not self.stepping.communicates:  # else it has memory of its own for steps without an engine
                warn_of_captured(optimizer)
        self.client_groups = [list(group["params"]) for group in groups]
        specs = find_units(module, registry, plan.unit_cap, sharding.leaves, largest_sizes(registry, domains))
        self.numbering = numbering = GlobalTensorIds(registry, specs, domains, self.comm)
        for parameter, tensor in zip(registry.parameters, registry, strict=True):
            copies = sharding.copies.get(id(parameter))
            if copies is not None and not copies.counted:
                numbering.counts[tensor.index] = False
        self.wholes = Wholes(registry, numbering, self.comm, self.accountant)
        check_domains(registry, domains, plan, compresses=sharding.compressor is not None)
        whole, cut = self.stepping.whole, {i for i, place in enumerate(numbering.places) if place in numbering.cut}
        layouts = [lay_out(s.tensors, domains.of(s.domain).sizes, self.device.type, whole, cut) for s in specs]
        self.units: list[Unit] = []
        self.update: Update | None = None
        self.owners: WholeUpdate | None = None
        if optimizer is not None:
            parts = None
            if whole and numbering.cut:
                parts = SplitTensors(registry, numbering, specs, layouts, domains, self.accountant)
            self.update, self.owners = self._make_update(optimizer, sharding.is_elementwise, domains, parts)
        # Until a pass has been traced, the order of the modules is used.
        orders = list(range(len(specs))), backward_order([spec.modules for spec in specs], module)
        builder = UnitBuilder(self, domains, self.homes)
        builder.choose_places(specs)
        stay = builder.stay_whole(specs, layouts, orders)
        if domains.others:
            # Ranks may have parts of different sizes, but unshard the same units.
            stay = stay.intersection(*self.comm.exchange(sorted(stay), "whole"))
        for index, (spec, sections) in enumerate(zip(specs, layouts, strict=True)):
            self.units.append(builder.build(index, spec, sections, sharded=plan.releases and index not in stay))
        self._gathered_after_steps = [unit for unit in self.units if unit.is_updated_elsewhere and self.comm.world > 1]
        builder.prepare_gathers([unit for unit in self.units if unit.sharded])
        self._trainable = [p for p, t in zip(registry.parameters, registry, strict=True) if t.trainable]
        self._section_of = {
            slot.index: (unit, section)
            for unit in self.units
            for section in unit.sections
            for slot in section.layout.slots
        }
        return orders

    def _build_passes(self) -> None:
        sharding, plan, domain, accountant = self.sharding, self.plan, self.domain, self.accountant
        sharded = [unit for unit in self.units if unit.sharded]
        self.channel: PeerShards | None = None
        if sharded:
            one_rank = self.comm.imagined or self.comm.world == 1
            self.channel = NoPeers() if one_rank else SideChannel(self.comm, sharded)
        chunks, calls = self._find_chunks(), UnitCalls()
        unsharder = Unsharder(
            chunks[0],
            self.channel,
            domain.gathers,
            prefetch=plan.prefetch,
            prefetch_elements=plan.prefetch_elements,
            backward_follows=self.update is not None,
        )
        self.reducer: Reducer | None = None
        self.sums: GradientSums | None = None
        if self.update is not None:
            self.reducer = Reducer(
                self.units,
                domain,
                accountant,
                plan=plan,
                wire_dtype=self.policy.wire_dtype,
                prescale=sharding.prescale,
                compressor=sharding.compressor,
                keeps_gradients=self.keeps_gradients,
                chunks=chunks,
                calls=calls,
                unsharder=unsharder,
                update=self.update,
                driver=self._driver,
                copies={
                    tensor.index: sharding.copies[id(parameter)].ranks
                    for parameter, tensor in zip(self.registry.parameters, self.registry, strict=True)
                    if id(parameter) in sharding.copies
                },
            )
            self.sums = GradientSums(
                self.units,
                self.numbering,
                self.comm,
                sharding.norm_group or self.comm,
                self.device,
                accountant,
                self.reducer,
            )
            self.update.bind(self.reducer.own_gradient, self.values_changed)
        if self.channel is not None:
            self.channel.on_want(unsharder.on_peer_blocked)
        self.model_pass = Pass(chunks, calls, unsharder, self.reducer, self.registry, self.presence)
        self.hooks = Hooks(self.module, self.units, self.model_pass)

    def _find_chunks(self) -> list[Chunk]:
        parts = [set(part.modules()) for part in self.sharding.chunks or [self.module]]
        known = set().union(*parts)
        return [
            Chunk([u for u in self.units if not part.isdisjoint(u.modules) or known.isdisjoint(u.modules)])
            for part in parts
        ]

    def _build_guards(self) -> None:
        averages = self.sharding.plain
        self.plain = (
            None if averages is None else PlainGradients(self.units, self.comm, self.accountant, averages=averages)
        )
        layout, drops = self._optimizer_layout(), averages is None
        self.guards = Guards(self.module, self.registry, self.optimizer, self.is_absent, layout, drops=drops)
        self.places = MemoryGuard(self.module, self.registry, self.units)
        self.moving = MovingStates(self)

    @property
    def owner(self) -> ParameterOwner:
        """Unshards parameters for the script."""
        return ParameterOwner(self)

    @property
    def state(self) -> ShardedState:
        """Reads and writes values, gradients and optimizer state."""
        return ShardedState(self)

    @property
    def unsharder(self) -> Unsharder:
        """Unshards the units in passes."""
        return self.model_pass.unsharder

    @property
    def order(self) -> tuple[list[int], list[int]]:
        """Indices of all units in the forward and in the backward order."""
        forward, backward = zip(*(chunk.order.indices for chunk in self.model_pass.chunks), strict=True)
        return list(dict.fromkeys(chain(*forward))), list(dict.fromkeys(chain(*backward[::-1])))

    @property
    def driver(self) -> Driver:
        """The engine's part in passes and steps."""
        return self._driver

    @driver.setter
    def driver(self, driver: Driver) -> None:
        self._driver = driver
        if self.reducer is not None:
            self.reducer.driver = driver

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients keep their memory between steps: a CPU's allocator, unlike a device's, caches none."""
        return self.device.type == "cpu" and not self.plan.shard_optimizer

    # -- building ----------------------------------------------------------------------------------------------------

    def _make_update(
        self,
        optimizer: torch.optim.Optimizer,
        is_elementwise: StateKind,
        domains: Domains,
        parts: SplitTensors | None,
    ) -> tuple[Update, WholeUpdate | None]:
        stepping, common = self.stepping, (optimizer, self.units, self.registry)
        if self.sharding.replicas is not None:
            check_local(domains, self.plan, stepping)
        state_args = (self.accountant, is_elementwise)
        norms = stepping.norms or (stepping.communicates and hasattr(optimizer, NORMS))
        at_once = norms or stepping.communicates
        segments = SegmentUpdate(*common, self.comm, self.numbering, *state_args, norms=norms, at_once=at_once)
        if stepping.communicates:
            return CommUpdate(optimizer, segments, domains, self.accountant, self.plan), None
        if self.sharding.replicas is not None:
            return LocalSgdUpdate(optimizer, segments, *self.sharding.replicas, self.accountant), None
        if not stepping.whole:
            return Update(optimizer, [segments]), None
        replicated = not self.plan.shard_optimizer
        whole = WholeUpdate(
            *common,
            domains,
            self.numbering,
            parts,
            self.policy,
            *state_args,
            stepping,
            replicated=replicated,
            home=self.homes.whole,
        )
        only = len(stepping.whole) == len(optimizer.param_groups)
        return Update(optimizer, [whole] if only else [segments, whole]), whole

    def is_absent(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter is sharded and its use now would raise."""
        tensor = self.registry.find(parameter)
        if tensor is None or self.model_pass.order.phase is not Phase.IDLE:
            return False
        self.presence.require(f"parameter {tensor.name!r} cannot be used", values=True)
        return self.unsharder.is_resharded(self._section_of[tensor.index][0])

    # -- passes ------------------------------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        grad_tensors: Sequence[torch.Tensor | None] | None = None,
        *,
        retain_graph: bool = False,
        part: Part = Part.WHOLE,
    ) -> None:
        """Differentiate like `torch.autograd.backward` (all ranks call; zeros if no tensor depends on the model)."""
        self.hooks.settle()
        reducer = self.reducer
        passes = reducer.passes if reducer is not None else 0
        if self.plain is not None:
            self.plain.begin()
        self.model_pass.begin_part(part)
        try:
            if tensors:
                with named("backward"):
                    torch.autograd.backward(tensors, grad_tensors, retain_graph=retain_graph)
            if self.plain is not None:
                self.plain.end()
            if reducer is not None and reducer.passes == passes:
                self.model_pass.join_backward()
        finally:
            self.model_pass.begin_part(Part.WHOLE)

    # -- stepping ----------------------------------------------------------------------------------------------------

    def set_wire_dtype(self, dtype: torch.dtype) -> None:
        """Change the wire dtype of gradients (between windows, on all ranks)."""
        self.policy = replace(self.policy, wire_dtype=dtype)
        if self.reducer is not None:
            self.reducer.wire_dtype = dtype
            self.reducer.find_separate()

    def gradient_factor(self, index: int) -> float | torch.Tensor:
        """Return the factor from an accumulated gradient to its mean (or sum) before clipping (all ranks call)."""
        assert self.update is not None
        return self.driver.gradient_factor() / self.update.factor_in(self.section_of(index), index)

    def clip_factor(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        """Return the clipping coefficient for a global norm."""
        return clip_coefficient(norm, max_norm)

    def check_open(self, what: str) -> None:
        """Raise UsageError, with `what` and the reason, if the engine has been destroyed."""
        if self.closed:
            raise UsageError(f"{what}: {self.closed}")

    def check_there(self, what: str, *, values: bool = False) -> None:
        """Raise UsageError if the engine is destroyed, or state (`values`: parameters) is incomplete or elsewhere."""
        self.check_open(what)
        if self.failed:
            partial = "" if self.update is None else self.update.partial
            cause = "a step was cut short" if partial and self.failed.startswith(partial) else "a disk has failed"
            raise UsageError(f"{what}: the state is incomplete, because {cause} before. {self.failed}")
        self.presence.require(what, values=values)

    @contextlib.contextmanager
    def noting_disk_errors(self) -> Iterator[None]:
        """Mark the state as incomplete after an OffloadError in the block, whose message then advises a restart, and
        after any error that has ended a step between two units.
        """
        try:
            yield
        except OffloadError as error:
            if not self.failed:
                self.failed = f"{error}. {_RESTART}"
                error.args = (self.failed,)
            raise
        except BaseException:
            if self.update is not None and self.update.partial and not self.failed:
                self.failed = f"{self.update.partial}. {_RESTART}"
            raise

    def check_can_step(self) -> None:
        """Raise UsageError before a step if parameters are gathered for evaluation, or were frozen or replaced."""
        if self.model_pass.unsharder.suspended or self.pinned:
            raise UsageError(
                "step() inside gathered() or GatheredParameters: the gathered parameters would stay as they are; leave "
                "the block first"
            )
        self.places.check()
        self.guards.check_trained()

    def await_copies(self) -> None:
        """Make the current stream wait for copies of master weights and optimizer state, before each write to these."""
        if self.copied is not None:
            self.copied.wait()

    def allow_change(self, unit: Unit) -> None:
        """Raise UsageError before values are written that differ by rank, and `await_copies`."""
        if self.update is not None:
            self.update.check_agreed(f"parameters of unit {unit.name!r}")
        self.await_copies()

    def take_changes(self) -> None:
        """Copy in-place changes of parameters to this rank's master weights; unchanged elements keep their digits.

        Loaded parameters are copied whole. The end of a `GatheredParameters` block takes over changes of sharded units.
        """
        if self.copied is not None:
            self.copied.wait()
        changed = self.guards.changed()
        if not changed or self.update is None:
            return
        for unit in self.units:
            if not unit.sharded and any(tensor.index in changed for tensor in unit.tensors):
                unit.wait_for_unshard()
                with self.state.acquired([unit]):
                    self.update.refresh(unit, self.guards.loaded)
                unit.note_values()
        self.guards.note()

    def share_changes(self) -> None:
        """Take changes over, also into master weights on other ranks (all ranks call)."""
        self.take_changes()
        if self.update is not None:
            self.update.share_changes()

    def step(self, factor: float | torch.Tensor = 1.0) -> None:
        """Step with the gradients times `factor`, which may be overwritten; start the all-gathers of the results."""
        assert self.update is not None
        self.unsharder.reshard_kept()
        self.finish_gathers()
        self.share_changes()
        with self.accountant.owning(Category.OTHER), self.guards.stepping(), named("step"):
            self.update.step(factor)
        if not self.stepped:
            self.stepped = True
            give_back_freed_memory()  # the new optimizer state lies among freed buffers
        self.values_changed()
        for unit in self._gathered_after_steps:
            unit.all_gather_update()
        self.shards_written()

    @property
    def local(self) -> LocalSgdUpdate | None:
        """The update of replicas that step on their own; None: all ranks step together."""
        return self.update if isinstance(self.update, LocalSgdUpdate) else None

    def exchange_replicas(self, step: int | None) -> bool:
        """Exchange the units that are due after a step between replicas (None: all); return False if none is due.

        With `overlap_steps` their parameters change at a later step. All ranks call.
        """
        local = self.local
        if local is None or not local.acts(step):
            return False
        due = local.due(step)
        self.finish_gathers()
        self.await_copies()
        for exchange in (local.continue_exchange, local.begin_exchange):
            with self.accountant.owning(Category.OTHER), named("exchange replicas"):
                changed = exchange(due, step)
            if changed:
                self.state.publish([self.units[index] for index in changed])
        return bool(due)

    def shards_written(self) -> None:
        """Make all-gathers and fetches of peers wait for the new values of the shards."""
        self.domain.gathers.follow()
        if self.channel is not None:
            self.channel.shards_written(self.domain.gathers.mark())

    def values_changed(self) -> None:
        """Increment the version counters of parameters that the engine has written, for autograd's checks."""
        for unit in self.units:
            unit.second_valid = False
        self.values_version += 1
        torch.autograd.graph.increment_version(self._trainable)
        self.guards.note()
        self._note_resident()

    def _unsharded_between_passes(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.sharded and unit.state is UnitState.UNSHARDED]

    def _note_resident(self) -> None:
        for unit in self._unsharded_between_passes() if self._watched else ():
            unit.note_values()

    def look_for_lost(self) -> float | torch.Tensor:
        """Return a positive number if the window has changed parameters such that the step overwrites the changes.

        No version counter shows them (`p.data.copy_(...)`), so all values are read, in some windows only.
        """
        if self._watched:
            changed = self.guards.changed()
            for unit in self._unsharded_between_passes():  # an all-gather may still fill those that no pass has used
                if not any(tensor.index in changed for tensor in unit.tensors):
                    unit.look_for_lost()
        found = [unit.lost for unit in self.units if unit.lost is not None]
        self._windows += 1
        self._watch()
        return torch.stack(found).sum().double() if found else 0.0

    def take_lost(self) -> list[str]:
        """Return the names of units with lost changes, and forget these."""
        names = [unit.name for unit in self.units if unit.lost is not None and bool(unit.lost)]
        for unit in self.units:
            unit.lost = None
        return names

    def _watch(self) -> None:
        """Decide whether the window that begins is watched."""
        self._watched = self.update is not None and (self._windows < 2 or self._windows % _WATCHED_EVERY == 0)
        for unit in self.units:
            unit.watch(self._watched)

    def check_branches(self) -> None:
        """Compare the units that ranks have used since the last step, their order and counts, in one small all-reduce.

        Raises DesyncError on every rank, with the units of rank 0 and of the first rank that differs.
        """
        usages = [chunk.usage for chunk in self.model_pass.chunks]
        taken = self.comm.fingerprints(str([usage.branches for usage in usages]), "strict_sync")
        for usage in usages:
            usage.branches = 0
        others = [rank for rank, branches in enumerate(taken) if branches != taken[0]]
        if others:
            names = [unit.name for unit in self.units]
            used = []
            for rank in (0, others[0]):
                own = [index for usage in usages for index in usage.first_uses]
                trace = self.comm.share_object(own, "strict_sync.trace", src=rank)
                assert isinstance(trace, list)
                used.append([names[index] for index in trace])
            if used[0] == used[1]:
                shown = f"Both have used {used[0]} first in this order, and some of them another number of times"
            else:
                shown = "Units in order of first use in the last forward pass: "
                shown += f"rank 0 {used[0]}, rank {others[0]} {used[1]}"
            raise DesyncError(
                f"strict_sync: ranks {others} have not taken the same branches of the model as rank 0 since the last "
                f"step. {shown}. Without strict_sync this is allowed: what a rank has not used contributes a zero "
                "gradient."
            )

    def give_up_step(self) -> None:
        """Drop the gradients of the window."""
        if self.update is not None:
            self.update.end_step()

    def end_window(self, applied: bool) -> None:
        """Drop the accumulated gradients (stepped if `applied`); the first call agrees on the order of units."""
        assert self.reducer is not None
        if self.update is not None:
            self.update.end_step()
        self.reducer.clear()
        if self.reducer.compressor is not None:
            self.reducer.compressor.end_step(applied)
        if not self._order_agreed:
            self._order_agreed = True
            usages = [chunk.usage for chunk in self.model_pass.chunks]
            traced = [[usage.forward_order(), usage.backward_order(), sorted(usage.untracked)] for usage in usages]
            orders = self.comm.share_object(traced, "unit_order")
            assert isinstance(orders, list)
            self.model_pass.set_order([(forward, backward) for forward, backward, _ in orders], traced=True)
            self.unsharder.launch_first({index for *_, untracked in orders for index in untracked})
        self.model_pass.end_window()

    def finish_gathers(self) -> None:
        """Wait for the all-gathers of updated parameters."""
        for unit in self.units:
            unit.wait_for_unshard()

    def section_of(self, index: int) -> FlatParamStorage:
        """Return the flat parameter that holds a parameter."""
        return self._section_of[index][1]

    @property
    def compressor(self) -> Compressor | None:
        """Compressor of gradients; None: reductions are exact, or there is only one rank."""
        return None if self.reducer is None else self.reducer.compressor

    def reduced_layout(self) -> str:
        """Return a fingerprint of the layout of the reductions' state, equal in runs with the same layout."""
        sections = [
            (unit.name, section.layout.numel, str(section.layout.dtype), section.layout.slots)
            for unit in self.units
            for section in unit.trainable
        ]
        return hashlib.sha256(repr((self.domain.sizes, sections)).encode()).hexdigest()

    def _optimizer_layout(self) -> str:
        sections = [
            (
                section.master_start,
                section.master_stop,
                [(self.registry[s.index].name, s) for s in section.layout.slots],
            )
            for unit in self.units
            for section in unit.trainable
        ]
        rank = self.comm.rank if self.plan.shard_optimizer else 0
        return hashlib.sha256(repr((rank, sections)).encode()).hexdigest()

    def unit_of(self, index: int) -> Unit:
        """Return the unit of a parameter."""
        return self._section_of[index][0]

    def take_over(self, unit: Unit) -> None:
        """Copy unsharded values that have been changed in place to the master weights."""
        assert self.update is not None
        self.await_copies()
        with self.state.acquired([unit]):
            self.update.refresh(unit)

    def units_of(self, parameters: Iterable[torch.Tensor]) -> list[Unit]:
        """Return the units of some parameters, each once; tensors outside of the model are ignored."""
        wanted = {t.index for t in map(self.registry.find, parameters) if t is not None}
        return [unit for unit in self.units if any(tensor.index in wanted for tensor in unit.tensors)]

    def close(self, why: str = _DESTROYED) -> None:
        """Restore a plain model and optimizer, and free the engine's memory; later calls do nothing.

        Parameters become plain and unsharded, with memory of their own. The optimizer has them in its groups again, and
        no state. Later uses of the engine show `why`. Raises DesyncError if other ranks go on with training, and leaves
        parameters sharded; while an exception is handled, it logs a warning instead.
        """
        if self.closed:
            return
        self.moving.bring_back()
        self.closed = why
        reason = self._disassemble("destroy()", {})
        self.driver = Alone()
        self.domain.close()
        for domain in self.sharding.domains.others.values():
            domain.deregister()
        if self.failed or not reason:
            self.homes.close()
        if reason:
            message = f"{reason} The parameters of {type(self.module).__name__} stay sharded"
            if sys.exc_info()[1] is None and not self.failed:
                raise DesyncError(message)
            logger.warning(message)  # the exception that this rank handles is nearer to the cause

    def disassemble(self, resized: Collection[nn.Parameter] = ()) -> dict[int, torch.dtype]:
        """Take the parameters out of their units; `build` follows (all ranks call).

        Parameters of units that stay unsharded become plain. The others become shards, as under `zero.Init`, so that
        one unit at most is unsharded. The optimizer has parameters in its groups, and no state. Gradients are dropped.
        Parameters `resized` keep the values that the script has given them.
        Returns the dtypes in the user's model by `id(parameter)`. Raises DesyncError if other ranks go on with
        training.
        """
        self.check_there("the model cannot be rebuilt")
        self.closed = "refresh() has failed, and the model is neither sharded nor complete. " + _RESTART
        place = None if self.homes.parameters is ON_DEVICE else torch.device("cpu")
        stores = {id(unit.domain): PartStore(unit.domain.ranks, place=place) for unit in self.units if unit.sharded}
        present = set(map(id, self.module.parameters()))
        found = {
            id(p): tensor.source_dtype
            for tensor, p in zip(self.registry, self.registry.parameters, strict=True)
            if id(p) in present
        }
        with without_overrides():
            values = [(parameter, parameter.data) for parameter in resized]
        reason = self._disassemble("refresh()", stores)
        if reason:
            raise DesyncError(reason)
        for parameter, given in values:
            owner = released.owner_of(parameter)
            if isinstance(owner, PartStore):
                owner.forget(parameter)
                released.disown(parameter)
            parameter.data = given
        return found

    def _disassemble(self, what: str, stores: Mapping[int, PartStore]) -> str:
        """Return parameters and optimizer to the script, or parameters to the store of their domain.

        Returns the reason if other ranks are elsewhere and parameters stay sharded, or "".
        """
        try:
            reason = self._end_together(what)
        except BaseException:
            if self.channel is not None:
                self.channel.close()  # notifies the peers
            raise
        self.hooks.remove()
        self.model_pass.close()
        self.guards.remove()
        if self.plain is not None:
            self.plain.remove()
        self._give_optimizer_back()
        if self.reducer is not None:
            self.reducer.clear()
        present = set(map(id, self.module.parameters()))
        while self.units and not reason:
            unit = self.units[0]
            store = stores.get(id(unit.domain)) if unit.sharded else None
            self.state.gather_parts(unit.parameters, "gather")  # all ranks have ended all passes
            for tensor, parameter in zip(unit.tensors, unit.parameters, strict=True):
                released.disown(parameter)
                if store is None or id(parameter) not in present:
                    parameter.data = parameter.data.clone()
                else:
                    store.names[parameter] = repr(tensor.name)
                    store.split(parameter)
            for section in unit.sections:
                section.drop()
            unit.sharded = False  # a block of the script that has gathered it leaves it alone
            del self.units[0]
        if self.channel is not None:
            if not reason:
                # Groups gather independently: a fast one may be here while others still all-gather.
                self.comm.barrier(what)
            self.channel.close()
        self._cut_references()
        return reason

    def _end_together(self, what: str) -> str:
        """End running passes and all-gathers, once all ranks are here; return the reason if that is impossible."""
        if self.failed:
            return self.failed
        # After an exception on this rank only, the other ranks are elsewhere.
        failure = sys.exc_info()[1]
        where = inside_of(what, failure)
        reason = ""
        if failure is None or self.channel is None:
            try:
                self.hooks.settle()
                self.finish_gathers()
                if self.local is not None and failure is None:
                    self.local.settle()
            except DesyncError as error:
                if self.channel is None:
                    raise
                failure = error  # a peer is in destroy() already, and does not take part
        if self.channel is not None:
            phase = self.model_pass.order.phase.value
            try:
                reason = self.channel.end_together(where, phase, cut_short=failure is not None)
            except (DesyncError, PeerLostError) as error:
                if failure is None:
                    raise
                reason = str(error)  # a peer is lost; the exception here is nearer to the cause
            if reason:
                RankState("ends", where).publish()
            elif failure is not None:
                self.hooks.settle()
                self.finish_gathers()
                if self.local is not None:
                    self.local.settle()
        return reason

    def _give_optimizer_back(self) -> None:
        if self.update is not None:
            self.update.detach()
        if self.owners is not None:
            self.owners.tiered.clear()
        self.update = self.owners = None
        if self.optimizer is not None:
            vars(self.optimizer).pop(NORMS, None)
            self.optimizer.state.clear()
            for group, parameters in zip(self.optimizer.param_groups, self.client_groups, strict=False):
                group["params"] = parameters

    def _cut_references(self) -> None:
        """Break reference cycles: memory is freed at once instead of by Python's garbage collector."""
        if self.channel is not None:
            self.channel.on_want(None)
        self.moving.close()
        self.reducer = None
        self.channel = self.sums = None
        self._section_of = {}
