"""ShardedModel: a user's module with its units, their memory, and everything that moves it.

This is the composition of the ZeRO strategy: registry, units, gatherer, reducer, hooks and update. The engine talks to
this one object. The order of the steps in `build` is the order in which memory must come and go: each unit is laid out,
filled, sharded and released before the next one is touched, so that at most one unit exists twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shardwise.boxes import Region
from shardwise.comm.communicator import Communicator
from shardwise.comm.compression import Compressor
from shardwise.comm.desync import RankState, inside_of
from shardwise.comm.domain import Domains
from shardwise.device.ranges import named
from shardwise.device.staging import Copied
from shardwise.errors import ConflictError, DesyncError, OffloadError, PeerLostError, UsageError
from shardwise.memory import (
    Accountant,
    Category,
    Tier,
    give_back_freed_memory,
    module_bytes,
    resident_bytes,
    virtual_bytes,
)
from shardwise.memory.places import ALL_AT_HAND, Borrowed, Homes, borrowed, in_turn
from shardwise.precision.dtypes import PrecisionPolicy
from shardwise.precision.norms import clip_coefficient
from shardwise.precision.tensornorms import NORMS
from shardwise.registry import HeldPart, LogicalTensor, Registry
from shardwise.utils.logging import logger, warn_once
from shardwise.zero.building import UnitBuilder
from shardwise.zero.parameters.guards import Guards
from shardwise.zero.parameters.init import PartStore
from shardwise.zero.parameters.memoryguard import MemoryGuard
from shardwise.zero.parameters.unsharded_access import Shown, Wholes
from shardwise.zero.passes.driver import Alone, Driver
from shardwise.zero.passes.gather import Gatherer, Phase, Touch, backward_order
from shardwise.zero.passes.hooks import Hooks
from shardwise.zero.passes.nopeers import NoPeers
from shardwise.zero.passes.plain import PlainGradients
from shardwise.zero.passes.reduce import Reducer
from shardwise.zero.passes.sidechannel import SideChannel
from shardwise.zero.passes.sums import GradientSums
from shardwise.zero.states import MovingStates
from shardwise.zero.units import released
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import ShardSlice, lay_out
from shardwise.zero.units.partition import find_units
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.presence import OffloadStateTypeEnum, Presence
from shardwise.zero.units.unit import FlatParamStorage, Unit, UnitState
from shardwise.zero.updates.comm_optimizer import CommUpdate
from shardwise.zero.updates.owner_sharded import WholeUpdate
from shardwise.zero.updates.segments import SegmentUpdate
from shardwise.zero.updates.tp_split import SplitTensors
from shardwise.zero.updates.update import StateKind, Stepping, Update

T = TypeVar("T")

_RESTART = "Restart the job from the last checkpoint"

_DESTROYED = (
    "the engine has been destroyed, and its model is a plain one again; pass the model to shardwise.initialize() for a "
    "new engine"
)


class Gathered(NamedTuple):
    """What `ShardedModel.gather` has gathered: units, and parameters that are whole tensors meanwhile.

    `versions` are the version counters of the latter.
    """

    units: list[Unit]
    shown: list[Shown]
    versions: list[int]


class ShardedModel:
    """See the module docstring.

    Args:
        module: the user's model; its parameters keep their identity and become views of unit buffers.
        optimizer: stepped on what this rank owns; None for a model that is only evaluated.
        stepping: what the optimizer has to be given.
        is_elementwise: whether an entry of the optimizer's state (value, elements of its parameter, name) has one value
            per element.
        plan: what is sharded.
        policy: dtypes.
        domains: the ranks that share the parameters.
        device: where parameters and state live.
        accountant: counts the bytes.
        prescale: factor on gradients before they are sent.
        compressor: reduces gradients with loss; None: exactly.
        leaves: modules to be kept in one unit each.
        homes: where each kind of state lives, as the plan says.
        wires: `id(parameter)` to the dtype in which its gradient travels, where neither its own nor the policy's.
        plain: without an optimizer, leave gradients in `.grad`: averaged over ranks (True) or summed; None: drop them.

    Attributes:
        domain: that of all ranks.
        comm: all ranks that step together.
        closed: why there is nothing here any more ("" while there is).
        failed: the error of a disk that has ended a pass or a step ("" if none has): the state is that of no step.
        stepped: a step has been taken.
        client_groups: the parameters that each of the optimizer's groups had before the engine.
        sums: forms norms of gradients and sums that travel with them; None for a model that is only evaluated.
        owners: the part of `update` that steps whole tensors; None if there is none.
        plain: averages gradients that are left in `.grad`; None: there is an optimizer, or they are dropped.
        copied: behind copies of what the optimizer steps that somebody has begun; None: there are none.
        wholes: puts tensors together of which ranks have parts.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        stepping: Stepping,
        is_elementwise: StateKind,
        plan: Plan,
        policy: PrecisionPolicy,
        domains: Domains,
        device: torch.device,
        accountant: Accountant,
        prescale: float = 1.0,
        compressor: Compressor | None = None,
        leaves: Iterable[nn.Module] = (),
        homes: Homes = ALL_AT_HAND,
        wires: Mapping[int, torch.dtype] | None = None,
        plain: bool | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.plan = plan
        self.policy = policy
        self.domain = domain = domains.main
        self.comm: Communicator = domain.ranks
        self.device = device
        self.accountant = accountant
        resident, addresses = resident_bytes(), virtual_bytes()
        if resident is not None and addresses is not None:
            accountant.process_bytes = max(0, resident - module_bytes(module))
            accountant.process_addresses = max(0, addresses - module_bytes(module))
        groups = optimizer.param_groups if optimizer is not None else []
        owners = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self.registry = Registry.of(module, compute_dtype=policy.compute_dtype, groups=owners, wires=wires)
        self._check_owners(groups)
        self.client_groups = [list(group["params"]) for group in groups]
        self.closed = self.failed = ""
        self._driver: Driver = Alone()
        self.units: list[Unit] = []
        self.presence = Presence()
        self.stepping = stepping
        self.update: Update | None = None
        self.owners: WholeUpdate | None = None
        specs = find_units(module, self.registry, plan.unit_cap, leaves, self._sizes(domains))
        self.numbering = GlobalTensorIds(self.registry, specs, domains, self.comm)
        self.wholes = Wholes(self.registry, self.numbering, self.comm, accountant)
        self.homes = homes
        self._check_domains(domains, compressor)
        cut = {index for index, place in enumerate(self.numbering.places) if place in self.numbering.cut}
        layouts = [
            lay_out(spec.tensors, domains.of(spec.domain).sizes, device.type, stepping.whole, cut) for spec in specs
        ]
        if optimizer is not None:
            parts = None
            if stepping.whole and self.numbering.cut:
                parts = SplitTensors(self.registry, self.numbering, specs, layouts, domains, accountant)
            self.update, self.owners = self._make_update(optimizer, is_elementwise, domains, parts)
        # Until a pass has been traced, the order of the modules stands for that of execution.
        forward, backward = list(range(len(specs))), backward_order([spec.modules for spec in specs], module)
        builder = UnitBuilder(
            self, self.registry, plan, policy, domains, device, accountant, self.update, self.owners, self.homes
        )
        builder.choose_places(specs)
        whole = builder.stay_whole(specs, layouts, (forward, backward))
        if domains.others:
            # Ranks may have parts of different sizes, and gather the same units.
            whole = whole.intersection(*self.comm.exchange(sorted(whole), "whole"))
        for index, (spec, sections) in enumerate(zip(specs, layouts, strict=True)):
            sharded_unit = plan.releases and index not in whole
            self.units.append(builder.build(index, spec, sections, sharded=sharded_unit))
        sharded = [unit for unit in self.units if unit.sharded]
        builder.prepare_gathers(sharded)
        self.channel: SideChannel | NoPeers | None = None
        if sharded:
            alone = self.comm.imagined or self.comm.world == 1
            self.channel = NoPeers() if alone else SideChannel(self.comm, sharded)
        self.gatherer = Gatherer(
            self.units,
            self.registry,
            self.channel,
            domain.gathers,
            self.presence,
            prefetch=plan.prefetch,
            prefetch_elements=plan.prefetch_elements,
            backward=self.update is not None,
        )
        self.reducer: Reducer | None = None
        self.sums: GradientSums | None = None
        if self.update is not None:
            for unit in sharded:
                unit.take_over = self._take_over
                unit.await_copies = self.await_copies
            self.reducer = Reducer(
                self.units,
                domain,
                accountant,
                plan=plan,
                wire_dtype=policy.wire_dtype,
                prescale=prescale,
                compressor=compressor,
                keeps_gradients=self.keeps_gradients,
                gatherer=self.gatherer,
                update=self.update,
                driver=self._driver,
                presence=self.presence,
            )
            self.gatherer.reducer = self.reducer
            self.sums = GradientSums(self.units, self.numbering, self.comm, device, accountant, self.reducer)
            self.update.bind(self.reducer.own_gradient, self._values_have_changed)
        if self.channel is not None:
            self.channel.on_want = self.gatherer.wanted
        self.hooks = Hooks(module, self.units, self.gatherer)
        self.plain = None if plain is None else PlainGradients(self.units, self.comm, accountant, averages=plain)
        layout = self._optimizer_layout()
        self.guards = Guards(module, self.registry, optimizer, self._absent, layout, drops=plain is None)
        self.places = MemoryGuard(module, self.registry, self.units)
        gradients = [] if self.reducer is None else self.reducer.gradients.values()
        self._states = MovingStates(self.units, self.update, gradients, device, accountant, self.presence)
        self._trainable = [p for p, t in zip(self.registry.parameters, self.registry, strict=True) if t.trainable]
        self._section_of = {
            slot.index: (unit, section)
            for unit in self.units
            for section in unit.sections
            for slot in section.layout.slots
        }
        self._set_order(forward, backward)
        self._connect(domains)
        accountant.construction_peak = accountant.peak_total
        accountant.reset_peak()
        self._order_agreed = self.stepped = False
        self.copied: Copied | None = None
        give_back_freed_memory()  # of the whole parameters, between the shards

    @property
    def driver(self) -> Driver:
        """Who runs the passes and steps."""
        return self._driver

    @driver.setter
    def driver(self, driver: Driver) -> None:
        self._driver = driver
        if self.reducer is not None:
            self.reducer.driver = driver

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients keep their memory from step to step.

        Where it is as large as the parameters, taking it from the system anew costs a CPU more time than anything that
        this library could save; DDP keeps its buckets, too. An accelerator's allocator has freed memory at hand.
        """
        return self.device.type == "cpu" and not self.plan.shard_optimizer

    # -- building ----------------------------------------------------------------------------------------------------

    def _sizes(self, domains: Domains) -> list[int]:
        """Return the elements of each parameter on the rank that has most of it, the same on all ranks (they all call).

        Ranks with the same sizes count as one: what is sent grows with the number of different parts.
        """
        own = [tensor.numel for tensor in self.registry]
        if not domains.others:
            return own
        versions = {id(sizes): sizes for sizes in self.comm.exchange(own, "sizes")}.values()
        if any(len(sizes) != len(own) for sizes in versions):
            return own  # the numbering of tensors says what differs
        return [max(sizes) for sizes in zip(*versions, strict=True)]

    def _connect(self, domains: Domains) -> None:
        """Make the process groups of passes (all ranks call), so that no pass waits for that."""
        for domain in (domains.main, *domains.others.values()):
            tensors = [tensor for unit in self.units if unit.domain is domain for tensor in unit.tensors]
            if domain.world == 1 or not tensors:
                continue
            levels = self.plan.levels(domain)
            whole = bool(self.stepping.whole) and self.plan.shard_optimizer  # owners send to all ranks
            finest = domain.depth if whole else max(levels.optimizer if self.update else 0, levels.parameters)
            trained = self.update is not None and any(tensor.trainable for tensor in tensors)
            domain.connect(finest, trained=trained)

    def _make_update(
        self,
        optimizer: torch.optim.Optimizer,
        is_elementwise: StateKind,
        domains: Domains,
        parts: SplitTensors | None,
    ) -> tuple[Update, WholeUpdate | None]:
        """Return what steps the parameters, and that part of it which steps whole tensors, if there is one."""
        stepping, common = self.stepping, (optimizer, self.units, self.registry)
        told = (self.accountant, is_elementwise)
        norms = stepping.norms or (stepping.communicates and hasattr(optimizer, NORMS))
        at_once = norms or stepping.communicates
        segments = SegmentUpdate(*common, self.comm, self.numbering, *told, norms=norms, at_once=at_once)
        if stepping.communicates:
            return CommUpdate(optimizer, segments, domains, self.numbering, self.accountant, self.plan), None
        if not stepping.whole:
            return Update(optimizer, [segments]), None
        replicated = not self.plan.shard_optimizer
        whole = WholeUpdate(
            *common,
            domains,
            self.numbering,
            parts,
            self.policy,
            *told,
            stepping,
            replicated=replicated,
            home=self.homes.whole,
        )
        only = len(stepping.whole) == len(optimizer.param_groups)
        return Update(optimizer, [whole] if only else [segments, whole]), whole

    def _check_owners(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise for parameters that the optimizer has and the model has not: no rank would ever step them."""
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if self.registry.find(parameter) is None:
                    raise UsageError(
                        f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                        f"not in the model ({type(self.module).__name__}). Put it into a module of the model, or give "
                        "it an optimizer of its own."
                    )

    def _check_domains(self, domains: Domains, compressor: Compressor | None) -> None:
        """Raise where something exchanges among all ranks what only some share."""
        for tensor, parameter in zip(self.registry, self.registry.parameters, strict=True):
            owner = released.owner_of(parameter)
            if isinstance(owner, PartStore) and not owner.agrees(parameter, tensor.ranks):
                raise UsageError(
                    f"parameter {tensor.name!r} is declared as a part that only some ranks have, and was built under "
                    "zero.Init, which gives all ranks the same values. Build the whole parameter there, and make it a "
                    "part with shardwise.registry.narrow(), or build its layer outside of it"
                )
        for asked, what in (
            (compressor is not None, "lossy gradient reduction, which exchanges what it sends among all ranks"),
            (self.plan.secondary > 1, "zero_optimization.zero_hpz_partition_size, whose groups are of all ranks"),
        ):
            if domains.others and asked:
                raise ConflictError(
                    f"parameters that only some ranks share (declare_part) cannot be combined with {what}. Keep one of "
                    "them"
                )

    def _absent(self, parameter: nn.Parameter) -> bool:
        """Whether the values of a parameter are on other ranks and using it would raise."""
        tensor = self.registry.find(parameter)
        if tensor is None or self.gatherer.phase is not Phase.IDLE:
            return False
        self.presence.require(f"parameter {tensor.name!r} cannot be used", values=True)
        return self.gatherer.absent(self._section_of[tensor.index][0])

    # -- passes ------------------------------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        grad_tensors: Sequence[torch.Tensor | None] | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Differentiate as `torch.autograd.backward` does, and take part in the reductions (all ranks call).

        Args:
            tensors: what is differentiated: losses, or outputs of which the gradients are known. There may be none, or
                none that depends on the model: then this rank contributes zeros.
            grad_tensors: their gradients; None for a scalar.
            retain_graph: as in torch.
        """
        self.hooks.settle()
        reducer = self.reducer
        passes = reducer.passes if reducer is not None else 0
        if self.plain is not None:
            self.plain.begin()
        if tensors:
            with named("backward"):
                torch.autograd.backward(tensors, grad_tensors, retain_graph=retain_graph)
        if self.plain is not None:
            self.plain.end()
        if reducer is not None and reducer.passes == passes:
            reducer.pass_over()

    # -- stepping ----------------------------------------------------------------------------------------------------

    def set_wire_dtype(self, dtype: torch.dtype) -> None:
        """Send gradients in another dtype from now on (between windows, on all ranks)."""
        self.policy = replace(self.policy, wire_dtype=dtype)
        if self.reducer is not None:
            self.reducer.wire_dtype = dtype
            self.reducer.find_alone()

    def gradient_factor(self, index: int) -> float | torch.Tensor:
        """Return what turns the accumulated gradient of a parameter into its mean (or sum), before clipping (all ranks
        call).
        """
        assert self.update is not None
        return self.driver.gradient_factor() / self.update.factor_in(self.section_of(index), index)

    def clip_factor(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        """Return the clipping coefficient for a global norm."""
        return clip_coefficient(norm, max_norm)

    def check_open(self, what: str) -> None:
        """Raise if everything has been taken off the model again.

        Raises:
            UsageError: it says that `what` cannot be done, and why.
        """
        if self.closed:
            raise UsageError(f"{what}: {self.closed}")

    def check_there(self, what: str, *, values: bool = False) -> None:
        """`check_open`, and raise if state has been moved off the device.

        Args:
            what: cannot be done then.
            values: it needs the parameters only.

        Raises:
            UsageError: see above.
        """
        self.check_open(what)
        if self.failed:
            raise UsageError(f"{what}: the state is incomplete, because a disk has failed before. {self.failed}")
        self.presence.require(what, values=values)

    @contextlib.contextmanager
    def noting_disk_errors(self) -> Iterator[None]:
        """Refuse everything after an error of a disk inside of the block, which is a pass or a step.

        Raises:
            OffloadError: it says to restart the job.
        """
        try:
            yield
        except OffloadError as error:
            if not self.failed:
                self.failed = f"{error}. {_RESTART}"
                error.args = (self.failed,)
            raise

    def check_can_step(self) -> None:
        """Raise where a step could not do what is expected of it; nothing has been changed then.

        Raises:
            UsageError: parameters are gathered for evaluation, have been frozen, unfrozen or added, or are others than
                they were.
        """
        if self.gatherer.suspended:
            raise UsageError(
                "step() inside gathered(): the gathered parameters would stay as they are; leave the block first"
            )
        self.places.check()
        self.guards.check_trained()

    def await_copies(self) -> None:
        """Have the device's next operations come behind copies of master weights and optimizer state that have begun.

        Whoever writes these calls it first; the host does not wait.
        """
        if self.copied is not None:
            self.copied.wait()

    def take_changes(self) -> None:
        """Take parameter values that the script has changed in place over into the master weights.

        Elements whose value is as it was keep the master's extra digits, except in parameters that have been loaded.
        Those of sharded units may be changed in a `GatheredParameters` block only, at whose end this is done. Masters
        that are on other ranks get the changes by `share_changes`.
        """
        self.await_copies()
        changed = self.guards.changed()
        if not changed or self.update is None:
            return
        for unit in self.units:
            if not unit.sharded and any(tensor.index in changed for tensor in unit.tensors):
                unit.finish_gather()
                with self.lent([unit]):
                    self.update.refresh(unit, self.guards.loaded)
        self.guards.note()

    def share_changes(self) -> None:
        """`take_changes`, also for masters that are on other ranks than the parameters (all ranks call)."""
        self.take_changes()
        if self.update is not None:
            self.update.share_changes()

    def step(self, factor: float | torch.Tensor = 1.0) -> None:
        """Step the optimizer with the accumulated gradients times `factor`, and start the all-gathers of the results.

        The gradients may be overwritten.
        """
        assert self.update is not None
        self.gatherer.let_go()
        self.finish_gathers()
        self.share_changes()
        with self.accountant.owning(Category.OTHER), self.guards.stepping(), named("step"):
            self.update.step(factor)
        if not self.stepped:
            self.stepped = True
            give_back_freed_memory()  # the optimizer's state has come to stay, among buffers that have gone
        self._values_have_changed()
        if self.comm.world > 1:
            for unit in self.units:
                unit.spread()
        self._shards_written()

    def _shards_written(self) -> None:
        """Let gathers, and peers that ask for shards, get the new values."""
        self.domain.gathers.follow()
        if self.channel is not None:
            self.channel.shards_written(self.domain.gathers.mark())

    def _values_have_changed(self) -> None:
        """Tell autograd, which may have saved parameters, that the engine has written new values into them."""
        for unit in self.units:
            unit.second_valid = False
        torch.autograd.graph.increment_version(self._trainable)
        self.guards.note()

    def check_branches(self) -> None:
        """Compare which units ranks have used since the last step, in which order and how often; one small all-reduce.

        Raises:
            DesyncError: the same on every rank, if they differ: what rank 0 has used, and the first rank that differs.
        """
        taken = self.comm.fingerprints(str(self.gatherer.branches), "strict_sync")
        self.gatherer.branches = 0
        others = [rank for rank, branches in enumerate(taken) if branches != taken[0]]
        if others:
            names = [unit.name for unit in self.units]
            used = []
            for rank in (0, others[0]):
                trace = self.comm.share_object(self.gatherer.trace, "strict_sync.trace", src=rank)
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
        """Forget the accumulated gradients; on the first call agree on the order of units with the other ranks.

        Args:
            applied: whether they have been stepped.
        """
        assert self.reducer is not None
        if self.update is not None:
            self.update.end_step()
        self.reducer.clear()
        if self.reducer.compressor is not None:
            self.reducer.compressor.end_step(applied)
        if not self._order_agreed:
            self._order_agreed = True
            traced = [self.gatherer.traced_order(), self.gatherer.traced_backward(), self.gatherer.untracked]
            order = self.comm.share_object(traced, "unit_order")
            assert isinstance(order, list)
            self._set_order(*order[:2])
            self.gatherer.launch_at_once(order[2])
            if self.reducer is not None:
                self.reducer.order_is_traced = True

    def _set_order(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        self.order = (list(forward), list(backward))
        self.gatherer.set_order(forward, backward)
        if self.reducer is not None:
            self.reducer.set_order(forward, backward)
            self.reducer.find_alone()

    def finish_gathers(self) -> None:
        """Wait for updated parameters that are still on their way."""
        for unit in self.units:
            unit.finish_gather()

    # -- access of single parameters ---------------------------------------------------------------------------------

    def section_of(self, index: int) -> FlatParamStorage:
        """Return the section that holds a parameter."""
        return self._section_of[index][1]

    def values_of(self, index: int) -> torch.Tensor:
        """Return the 1-D view of a gathered parameter in its unit's memory."""
        _, section = self._section_of[index]
        slot = next(slot for slot in section.layout.slots if slot.index == index)
        return section.full[slot.offset : slot.offset + slot.numel]

    def gradient_runs(self, index: int) -> list[tuple[int, int, torch.Tensor]] | None:
        """Return (start, stop, values) whose sum over ranks is the accumulated gradient, or None if there is none."""
        assert self.reducer is not None
        unit, section = self._section_of[index]
        gradients = self.reducer.gradients[unit.index]
        if self.reducer.partial:
            slot = next(slot for slot in section.layout.slots if slot.index == index)
            place = unit.sections.index(section)
            held = gradients.buffers.get(place)
            return (
                []
                if not isinstance(held, torch.Tensor) or index not in gradients.written  # sums are never in pieces
                else [(0, slot.numel, held[slot.offset : slot.offset + slot.numel])]
            )
        parts: list[tuple[tuple[int, int], torch.Tensor]] = []
        if gradients.accumulated:
            parts.append((section.own_range, section.own_gradient))
        if gradients.sums:  # over ranks of the inner dimensions
            ends = section.layout.range_of(section.domain.place, gradients.level)
            parts.append((ends, gradients.sums[unit.sections.index(section)]))
        if not parts:
            return None
        return [
            (p.start, p.stop, values[p.offset : p.offset + p.stop - p.start])
            for ends, values in parts
            for p in section.layout.pieces(*ends)
            if p.index == index
        ]

    def own_runs(
        self, index: int, runs: Iterable[tuple[int, int, torch.Tensor]]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Return the parts of what the optimizer has of a parameter that no other rank has (all, if each has all).

        Args:
            index: the parameter.
            runs: start, stop and values of each.
        """
        section = self.section_of(index)
        if section.levels.optimizer in (0, section.domain.depth):
            return list(runs)
        own = [p for p in section.layout.pieces(*section.own_range) if p.index == index]
        cuts = [(max(p.start, start), min(p.stop, stop), start, v) for start, stop, v in runs for p in own]
        return [(low, high, v[low - start : high - start]) for low, high, start, v in cuts if low < high]

    # -- what a lossy reduction keeps ----------------------------------------------------------------------------------

    @property
    def compressor(self) -> Compressor | None:
        """What reduces gradients with loss; None if they are reduced exactly, or there is nobody to send them to."""
        return None if self.reducer is None else self.reducer.compressor

    def reduced_layout(self) -> str:
        """Return what is the same in two runs if what their reductions keep is laid out alike: a fingerprint."""
        sections = [
            (unit.name, section.layout.numel, str(section.layout.dtype), section.layout.slots)
            for unit in self.units
            for section in unit.trainable
        ]
        return hashlib.sha256(repr((self.domain.sizes, sections)).encode()).hexdigest()

    def _optimizer_layout(self) -> str:
        """Return a fingerprint of the elements that the optimizer steps on this rank, in their order."""
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
        """Return the unit that a parameter belongs to."""
        return self._section_of[index][0]

    # -- checkpoints (shardwise.checkpoint.protocols.ShardedModel) -----------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of an unfinished accumulation window are held."""
        reducer = self.reducer
        return reducer is not None and (
            reducer.partial or any(g.accumulated or g.sums or g.buffers for g in reducer.gradients.values())
        )

    def rank_state(self) -> dict[str, Any] | None:
        """Return what the optimizer keeps on this rank alone, for the rank's part of a checkpoint; None if nothing."""
        return None if self.update is None else self.update.rank_state()

    def load_rank_state(self, state: dict[str, Any] | None) -> bool:
        """Take over what `rank_state` has returned on this rank; return False if it is of another layout."""
        return state is None if self.update is None else self.update.load_rank_state(state)

    def value_runs(self) -> dict[int, list[tuple[int, int, torch.Tensor]]]:
        """Return (start, stop, 1-D view) of the values that count on this rank, by parameter.

        Masters of trained parameters: what the optimizer steps here. Of the others this rank's range of the parameter.
        """
        self.presence.require("the engine's state cannot be read or written")
        self.take_changes()
        runs = {}
        for index, (section, own) in self._own_pieces().items():
            with self.shown(index):
                if section.layout.trainable and self.update is not None:
                    runs[index] = self.update.master_pieces(index)
                else:
                    runs[index] = [
                        (p.start, p.stop, section.own_values[p.offset : p.offset + p.stop - p.start]) for p in own
                    ]
        return runs

    def box_of(self, tensor: LogicalTensor) -> Region | None:
        """Return the box of a tensor that this rank's runs are of; None: all of it.

        Where the optimizer steps whole tensors that is all, on the rank that owns it, whatever part ranks have.
        """
        owned = self.update is not None and self.section_of(tensor.index).layout.cut
        return None if owned else tensor.box

    @contextlib.contextmanager
    def shown(self, index: int) -> Iterator[None]:
        """Let views be made of a parameter's values and state inside of the block, without there being any values."""
        with contextlib.ExitStack() as stack:
            for loans in self._section_of[index][1].away:
                stack.enter_context(loans.shown())
            for loans, _ in self.owners.borrowing() if self.owners is not None else ():
                stack.enter_context(loans.shown())
            yield

    def saved_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """Return the elements of each parameter that this rank saves; over all ranks each exactly once."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for index, (section, own) in self._own_pieces().items():
            if not self.numbering.counts[index] and not section.layout.cut:
                ranges[index] = []  # other ranks have the same
                continue
            alone = section.levels.optimizer == section.domain.depth
            if section.layout.trainable and self.update is not None and alone:
                ranges[index] = self.update.master_ranges(index)
            else:
                ranges[index] = [(piece.start, piece.stop) for piece in own]
        return ranges

    def parts_of(self, index: int) -> Sequence[HeldPart]:
        """Return the parts of tensors that ranks have at the place of this rank's parameter in the units.

        Each part is there once, in one order on all ranks. None where all ranks have the same tensors.
        """
        return self.wholes.parts_of(index)

    def _own_pieces(self) -> dict[int, tuple[FlatParamStorage, list[ShardSlice]]]:
        found: dict[int, tuple[FlatParamStorage, list[ShardSlice]]] = {}
        for unit in self.units:
            for section in unit.sections:
                found.update((slot.index, (section, [])) for slot in section.layout.slots)
                for piece in section.layout.pieces(*section.own_range):
                    found[piece.index][1].append(piece)
        return found

    def publish(self, units: Sequence[Unit] | None = None) -> None:
        """Bring all copies of the values up to date after `value_runs` have been written (all ranks call).

        Args:
            units: whose values have been written; None: all.
        """
        self.gatherer.let_go()
        for unit in self.units if units is None else units:
            unit.finish_gather()
            with self.lent([unit]):
                if self.update is not None:
                    self.update.publish(unit)
                unit.spread("explicit", everything=True)
                unit.finish_gather()
            if unit.sharded and unit.state is not UnitState.RELEASED:
                self.domain.gathers.follow()
                unit.gather_whole("explicit").wait()
                unit.rounded = False
        self._values_have_changed()
        self._shards_written()

    @property
    def away(self) -> bool:
        """Whether anything has to be lent before it can be read."""
        return any(section.away for unit in self.units for section in unit.sections) or bool(
            self.owners is not None and self.owners.borrowing()
        )

    def bring(self, tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
        """Read values that may live elsewhere, in their order, some of them at a time; the next are on their way then.

        Args:
            tensors: views of what this rank keeps, each with what stands for it.
            use: is called with what stands for those that are there now.
        """
        away = [loans for unit in self.units for section in unit.sections for loans in section.away]
        away += [loans for loans, _ in self.owners.borrowing()] if self.owners is not None else []
        lenders = {storage: loans for loans in away for storage in loans.storages}
        groups: list[tuple[list[T], list[Borrowed]]] = []
        for stands, tensor in tensors:
            lender = lenders.get(id(tensor.untyped_storage())) if lenders else None
            if not groups or (lender is not None and groups[-1][1] and groups[-1][1][0][0] is not lender):
                groups.append(([], []))
            groups[-1][0].append(stands)
            if lender is not None and not groups[-1][1]:
                groups[-1][1].append((lender, False))
        in_turn(groups, use)

    def lent_in_turn(self) -> Iterator[Collection[int]]:
        """Yield the parameters, some at a time, of which everything is on the device meanwhile and may be written."""
        if not self.away or (self.owners is not None and self.owners.borrowing()):
            with self.lent():  # tensors that are stepped whole are lent together
                yield range(len(self.registry))
            return
        for unit in self.units:
            with self.lent([unit]):
                yield {tensor.index for tensor in unit.tensors}

    # -- access ------------------------------------------------------------------------------------------------------

    def lent(self, units: Sequence[Unit] | None = None, *, written: bool = True) -> AbstractContextManager[None]:
        """Have all that units keep elsewhere on the device inside of the block; it may be written.

        Args:
            units: whose state; None: of all. Tensors that are stepped whole are lent all or none.
            written: False: it is only read.
        """
        self.presence.require("the engine's state cannot be read or written")
        wanted: list[Borrowed] = []
        for unit in self.units if units is None else units:
            wanted += unit.borrowing()
            gradients = None if self.reducer is None else self.reducer.gradients.get(unit.index)
            if gradients is not None and gradients.loans.away:
                wanted.append((gradients.loans, True))
        if self.owners is not None:
            wanted += self.owners.borrowing()
        return borrowed([(loans, written and writes) for loans, writes in wanted])

    def _take_over(self, unit: Unit) -> None:
        assert self.update is not None
        self.await_copies()
        with self.lent([unit]):
            self.update.refresh(unit)

    def units_of(self, parameters: Iterable[torch.Tensor]) -> list[Unit]:
        """Return the units of some parameters, each once; tensors that are not the model's are passed over."""
        wanted = {t.index for t in map(self.registry.find, parameters) if t is not None}
        return [unit for unit in self.units if any(tensor.index in wanted for tensor in unit.tensors)]

    def gather(self, parameters: Iterable[nn.Parameter]) -> Gathered:
        """Let parameters be whole outside of passes (all ranks must call): those that are parts are the whole tensors.

        Raises:
            UsageError: see `Wholes.assemble`.
        """
        parameters = list(parameters)
        units = self.gather_parts(parameters)
        try:
            shown = self.wholes.show(parameters)
            return Gathered(units, shown, [parameter._version for _, parameter, _ in shown])
        except BaseException:
            self.let_go(units)
            raise

    def discarded(self, gathered: Gathered) -> list[str]:
        """See `shardwise.zero.units.released.Owner`."""
        names = [name for unit in gathered.units for name in unit.changed()]
        for (tensor, parameter, _), version in zip(gathered.shown, gathered.versions, strict=True):
            if parameter._version != version and tensor.name not in names:
                names.append(tensor.name)
        return names

    def put_back(self, parameters: Iterable[nn.Parameter], gathered: Gathered, src: int | None) -> None:
        """End a `gather`.

        Args:
            parameters: those that were asked for.
            gathered: what `gather` returned; released again.
            src: global rank whose values become everybody's, masters included; None discards changes of what was
                gathered.

        Raises:
            UsageError: see `Unit.store_shard`.
        """
        parameters = list(parameters)
        for unit in self.units_of(parameter for _, parameter, _ in gathered.shown):
            unit.attach()
        if src is not None and gathered.shown:
            self.wholes.agree(gathered.shown, self.comm.group_rank(src) if src in self.comm.members else 0)
            for tensor, _, whole in gathered.shown:
                self.values_of(tensor.index).copy_(tensor.cut(whole).reshape(-1))
        self.put_parts_back(parameters, gathered.units, src)

    def gather_parts(self, parameters: Iterable[nn.Parameter], kind: str = "explicit") -> list[Unit]:
        """Gather the released units of some parameters outside of passes (all ranks must call); return those units.

        Parameters that are parts of tensors stay parts.

        Args:
            parameters: of the model.
            kind: with which collectives the gathers are in one order.
        """
        self.hooks.settle()
        self.presence.require("parameters cannot be gathered", values=True)
        wanted = self.units_of(parameters)
        self.gatherer.let_go(wanted)
        changed: list[Unit] = []
        try:
            for unit in wanted:
                unit.finish_gather()
                if unit.state is UnitState.RELEASED:
                    self._fill_now(unit, kind)
                    unit.pins += 1
                    changed.append(unit)
        except BaseException:
            self.let_go(changed)
            raise
        return changed

    def _fill_now(self, unit: Unit, kind: str) -> None:
        self.domain.gathers.follow()
        with self.domain.gathers.aside():
            for section in unit.sections:
                section.allocate()
        try:
            unit.gather_whole(kind).wait()
        except BaseException:
            for section in unit.sections:
                section.free()
            raise
        unit.rounded = False
        unit.fill_done()
        unit.expose()

    def let_go(self, gathered: Sequence[Unit]) -> None:
        """Release what `gather_parts` returned."""
        for unit in gathered:
            unit.pins -= 1
            unit.release()

    def put_parts_back(self, parameters: Iterable[nn.Parameter], gathered: Sequence[Unit], src: int | None) -> None:
        """End a `gather_parts`.

        Args:
            parameters: those that were asked for.
            gathered: what `gather_parts` returned; released again.
            src: global rank whose values become everybody's, masters included; None discards changes.

        Raises:
            UsageError: see `Unit.store_shard`.
        """
        try:
            if src is not None:
                self.presence.require("changed parameters cannot be stored")
                for unit in self.units_of(parameters):
                    ranks = unit.domain.ranks
                    root = ranks.group_rank(src) if src in ranks.members else 0
                    for section in unit.sections:
                        ranks.broadcast(section.full, root, f"{unit.name}.modified").wait()
                    unit.store_shard()
                    if self.update is not None:
                        self._take_over(unit)
                if self.update is not None:
                    self.update.share_changes()
        finally:
            self._shards_written()
            for unit in gathered:
                unit.note()  # whatever else has been changed is not to be kept
            self.let_go(gathered)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Gather everything once: passes inside need no communication, so that their number may differ by rank."""
        gathered = self.gather_parts(self.registry.parameters)
        self.gatherer.suspended = True
        try:
            yield
        finally:
            self.gatherer.suspended = False
            self.let_go(gathered)

    # -- state off the device for a while ----------------------------------------------------------------------------

    def offload_states(self, kinds: Collection[OffloadStateTypeEnum], *, pinned: bool, wait: bool) -> None:
        """Move state that lives on the device to the host, until `reload_states` (all ranks call, between passes).

        Args:
            kinds: what is moved; what has been moved before, or lives elsewhere anyway, stays there.
            pinned: page-lock memory of the host.
            wait: return when the memory of the device is free.

        Raises:
            UsageError: a pass is under way, parameters are gathered, or the optimizer averages over ranks itself.
        """
        self.hooks.settle()
        if self.update is not None:
            self.update.check_movable("engine.offload_states()")
        if self.gatherer.phase is not Phase.IDLE or self.gatherer.suspended or any(unit.pins for unit in self.units):
            raise UsageError(
                "engine.offload_states(): a pass is under way, or parameters are gathered (GatheredParameters, "
                "engine.gathered()). Call it between steps, outside of such blocks"
            )
        self.gatherer.let_go()
        self.finish_gathers()
        self.await_copies()
        if OffloadStateTypeEnum.lp_params in kinds:
            self._meet("offload_states()")
        self._states.offload(kinds, pinned=pinned, wait=wait)
        if wait:
            give_back_freed_memory()  # to whoever has use for it, in this process or in another

    def reload_states(self, *, wait: bool) -> None:
        """Bring back what `offload_states` has moved (all ranks call).

        Args:
            wait: return when everything is there; else the device goes on when it is.
        """
        parameters = OffloadStateTypeEnum.lp_params in self.presence.away
        self._states.reload(wait=wait)
        self._shards_written()
        if parameters:
            self._meet("reload_states()")

    def _meet(self, where: str) -> None:
        """Wait for the other ranks: one that is still in a pass may ask this one for its shards."""
        if self.channel is not None:
            self.comm.barrier(where)

    def state_tiers(self, kind: OffloadStateTypeEnum) -> set[Tier]:
        """Return on what state of a kind lies now; nothing if there is none of it."""
        return self._states.tiers(kind)

    # -- shardwise.zero.units.released.Owner ---------------------------------------------------------------------------

    @property
    def in_pass(self) -> bool:
        """See `shardwise.zero.units.released.Owner`."""
        return self.gatherer.phase is not Phase.IDLE

    def touch(self, parameter: nn.Parameter, what: str) -> Touch | None:
        """See `shardwise.zero.units.released.Owner`."""
        return self.gatherer.touch(parameter, what)

    def end_touch(self, parameter: nn.Parameter, token: Any, result: object) -> None:
        """See `shardwise.zero.units.released.Owner`."""
        self.gatherer.end_touch(parameter, token, result)

    def kept(self, parameter: nn.Parameter) -> int:
        """See `shardwise.zero.units.released.Owner`."""
        tensor = self.registry.find(parameter)
        assert tensor is not None
        unit, section = self._section_of[tensor.index]
        if not unit.sharded:
            return tensor.numel
        pieces = section.layout.pieces(section.shard_range.start, section.shard_range.stop)
        return sum(piece.stop - piece.start for piece in pieces if piece.index == tensor.index)

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        """See `shardwise.zero.units.released.Owner`: a parameter that is not here is not moved, and says so once."""
        if dtype != parameter.dtype or not self._absent(parameter):
            return None
        warn_once(
            f"{type(self.module).__name__} is moved to {device}: parameters that are sharded stay on {self.device}, "
            "with the engine. Call engine.destroy(), which makes the model whole, before moving it"
        )
        return parameter

    def replace(self, parameter: nn.Parameter, other: nn.Parameter) -> bool:
        """See `shardwise.zero.units.released.Owner`."""
        return other is parameter

    def close(self, why: str = _DESTROYED) -> None:
        """Take everything off the model and the optimizer, and give all memory back that is not theirs.

        Parameters are plain and whole afterwards, with memory of their own. The optimizer has them in its groups again
        and no state: its segments are gone. A second call does nothing.

        Args:
            why: told whoever uses the engine afterwards.

        Raises:
            DesyncError: ranks have gone on with training; the parameters stay sharded. If an exception is being handled
                here, that is a warning instead.
        """
        if self.closed:
            return
        self._states.reload(wait=False)
        self.closed = why
        try:
            apart = self._end_together()
        except BaseException:
            if self.channel is not None:
                self.channel.close()  # the peers are told
            raise
        self.hooks.remove()
        self.guards.remove()
        if self.plain is not None:
            self.plain.remove()
        self._give_optimizer_back()
        if self.reducer is not None:
            self.reducer.remove()
            self.reducer.clear()
        while self.units and not apart:
            unit = self.units[0]
            self.gather_parts(unit.parameters, "gather")  # all ranks have ended all passes
            for parameter in unit.parameters:
                released.disown(parameter)
                parameter.data = parameter.data.clone()
            for section in unit.sections:
                section.drop()
            unit.take_over = unit.await_copies = None
            del self.units[0]
        if self.channel is not None:
            if not apart:
                # Groups gather by themselves: one may come here while another still asks where its ranks are.
                self.comm.barrier("destroy()")
            self.channel.close()
        self.domain.close()
        if self.failed or not apart:
            self.homes.close()
        self._cut_references()
        if apart:
            message = f"{apart} The parameters of {type(self.module).__name__} stay sharded"
            if sys.exc_info()[1] is None and not self.failed:
                raise DesyncError(message)
            logger.warning(message)  # what is on its way through this rank is nearer to the cause

    def _end_together(self) -> str:
        """End passes and gathers that are under way, once all ranks are here; return why they cannot be ended."""
        if self.failed:
            return self.failed
        # An exception that is on its way through this rank may have spared the others: then they are elsewhere.
        failure = sys.exc_info()[1]
        where = inside_of("destroy()", failure)
        apart = ""
        if failure is None or self.channel is None:
            try:
                self.hooks.settle()
                self.finish_gathers()
            except DesyncError as error:
                if self.channel is None:
                    raise
                failure = error  # a peer is here already, and has left out what is to be ended
        if self.channel is not None:
            phase = self.gatherer.phase.value
            try:
                apart = self.channel.end_together(where, phase, cut_short=failure is not None)
            except (DesyncError, PeerLostError) as error:
                if failure is None:
                    raise
                apart = str(error)  # a peer has gone; what has led here is nearer to the cause
            if apart:
                RankState("ends", where).publish()
            elif failure is not None:
                self.hooks.settle()
                self.finish_gathers()
        return apart

    def _give_optimizer_back(self) -> None:
        if self.update is not None:
            self.update.detach()
        if self.owners is not None:
            self.owners.loans.clear()
        self.update = self.owners = None
        if self.optimizer is not None:
            vars(self.optimizer).pop(NORMS, None)
            self.optimizer.state.clear()
            for group, parameters in zip(self.optimizer.param_groups, self.client_groups, strict=False):
                group["params"] = parameters

    def _cut_references(self) -> None:
        """Leave no cycle that holds the model: memory is given back at once, not when Python looks for cycles."""
        if self.channel is not None:
            self.channel.on_want = _ignore
        self.driver = Alone()
        self.gatherer.close()
        self._states.close()
        self.reducer = None
        self.channel = self.sums = None
        self._section_of = {}


def _ignore(*_: Any) -> None:
    """Nobody listens."""
