"""Memory preflight: does the plan of a dry run fit, for each tier and machine?

Before weights are sharded, one rank of each parameter layout makes a dry run (about 30 ms a unit), and every rank reads
its limits. Ranks exchange both, and so come to the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine.dryrun import MemoryPlan
from shardwise.engine.plans import (
    MARGIN,
    MemoryPlans,
    Offload,
    Planner,
    PlanningTarget,
    Room,
    SettingPlan,
    offloads,
)
from shardwise.engine.stepping import stepping_of
from shardwise.engine.traffic import Traffic, offload_traffic
from shardwise.memory import (
    Accountant,
    OutOfMemoryError,
    Tier,
    disk_limit,
    host_limits,
    memory_limit,
    module_bytes,
    resident_bytes,
)
from shardwise.memory.limits import existing
from shardwise.memory.watchdog import EXIT_CODE
from shardwise.registry import part_of
from shardwise.units import format_size
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config

NEAR = 0.9
"""Fraction of the available memory above which a plan gets a warning."""
SEARCH_S = 30.0
"""Time limit in seconds of the search for a setting that fits."""
WORTH_PLANNING = 1 << 18
"""Elements of a rank's parameters from which on a plan is made without a configured limit: about 4 MiB with Adam."""


@dataclass(frozen=True)
class Resource:
    """A limited resource as one rank sees it; `key` identifies it among ranks that share it. `tiers`, `directories`
    (empty: all): the planned bytes that count. `freed`: bytes that this rank frees when its model is sharded.
    """

    key: str
    limit: str
    tiers: list[str]
    free: int
    freed: int = 0
    directories: list[str] = field(default_factory=list)

    def needed(self, plan: MemoryPlan) -> int:
        """Return the bytes of a plan that count."""
        return Room(tuple(map(Tier, self.tiers)), 0, tuple(self.directories)).needed(plan)


@dataclass(frozen=True)
class Check:
    """Peak bytes that all ranks together need of a limited resource, and the bytes that are there."""

    limit: str
    tiers: tuple[str, ...]
    ranks: tuple[int, ...]
    needed: int
    there: int
    directories: tuple[str, ...] = ()

    @property
    def room(self) -> Room:
        """Bytes available to each rank."""
        return Room(tuple(map(Tier, self.tiers)), self.there // len(self.ranks), self.directories)

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]} needs" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks need"
        return (
            f"{' and '.join(self.tiers)}: {ranks} {format_size(self.needed)}, and {format_size(self.there)} are there "
            f"({self.limit})"
        )


@dataclass(frozen=True)
class Budget:
    """Result of the memory preflight. `planned`: bytes by tier of each rank; empty for ranks without a plan. `node`:
    ranks on this machine.
    """

    checks: tuple[Check, ...]
    planned: tuple[dict[str, int], ...]
    processes: tuple[int, ...]
    node: tuple[int, ...]
    traffic: tuple[Traffic, ...] = ()

    def exhaustion(self, rank: int, accountant: Accountant, checkpoint: str | None) -> str:
        """Return the watchdog's message when the machine's memory runs out; it allocates little memory."""
        rows = [f"{'rank':>6}{'process':>9}{'resident':>12}" + "".join(f"{tier.value:>12}" for tier in Tier)]
        for other in self.node:
            process = self.processes[other]
            planned = "".join(f"{format_size(self.planned[other].get(tier.value)):>12}" for tier in Tier)
            rows.append(f"{other:>6}{process:>9}{format_size(resident_bytes(process)):>12}{planned}")
        for tier in Tier:
            held = ", ".join(f"{c.value} {format_size(size)}" for c, size in accountant.live_in(tier).items() if size)
            rows.append(f"Rank {rank} holds on {tier.value}: {held or 'nothing'}.")
        last = f"Go on from {checkpoint}." if checkpoint else "This process has neither saved nor loaded a checkpoint."
        return "\n".join(
            [
                f"The kernel would soon kill a process without a word, so rank {rank} ends this job with exit code "
                f"{EXIT_CODE}. In memory now, and planned on each tier:",
                *rows,
                last,
            ]
        )


def is_limited(config: Config) -> bool:
    """Return True if the configuration sets a memory limit."""
    limits = config.memory_limits
    return any(limit is not None for limit in (limits.device, limits.host, limits.disk))


def is_wanted(config: Config, tiers: Iterable[str]) -> bool:
    """Return True if an engine with state on `tiers` gets a memory preflight."""
    return any(tier != "device" for tier in tiers) or is_limited(config) or config.memory_limits.watchdog is True


def has_watchdog(config: Config, tiers: Iterable[str]) -> bool:
    """Return True if the memory watchdog runs for an engine with state on `tiers`."""
    configured = config.memory_limits.watchdog
    return any(tier in ("host", "pageable") for tier in tiers) if configured is None else configured


def preflight(target: PlanningTarget, job: Communicator) -> Budget:
    """Plan memory before sharding (all ranks call); an OutOfMemoryError on all ranks, if any limit is too small."""
    config = target.resolution.config
    numel = sum(parameter.numel() for parameter in target.module.parameters())
    known = job.exchange({"process": os.getpid(), "numel": numel, "layout": _layout(target, job.rank)}, "preflight")
    nodes, processes = job.nodes(), tuple(each["process"] for each in known)
    here = tuple(rank for rank, node in enumerate(nodes) if node == nodes[job.rank])
    # Ranks may hold different parts of the model: the largest decides for all.
    if not is_limited(config) and max(each["numel"] for each in known) < WORTH_PLANNING:
        return Budget((), tuple({} for _ in known), processes, here)
    planner = Planner(target)
    # One rank of each layout makes the dry run, because it keeps all cores busy for seconds.
    first: dict[str, int] = {}
    makers = [first.setdefault(each["layout"], rank) for rank, each in enumerate(known)]
    plan, why = None, ""
    if makers[job.rank] == job.rank:
        try:
            plan, why = planner.window(target.setting)
        except Exception as error:  # an optimizer of the user's own, which runs in the dry run
            why = f"a dry run of the engine failed ({type(error).__name__}: {error})"
    resources = [vars(one) for one in resources_of(target, job.rank, nodes[job.rank])]
    gathered = job.exchange(
        {"plan": None if plan is None else vars(plan), "why": why, "resources": resources}, "preflight"
    )
    made = {rank: gathered[rank]["plan"] for rank in first.values()}
    plans = [None if made[rank] is None else MemoryPlan(**made[rank]) for rank in makers]
    checks = checks_of([[Resource(**one) for one in each["resources"]] for each in gathered], plans)
    if job.rank == 0 and (missing := [rank for rank, one in made.items() if one is None]):
        logger.warning("whether this fits has not been planned: %s", gathered[missing[0]]["why"])
    short = [check for check in checks if check.needed > check.there]
    if short:
        raise _refusal(target, job, planner, checks, short)
    if job.rank == 0:
        for check in checks:
            if check.needed > NEAR * check.there:
                logger.warning("memory will be short, before activations are counted: %s", check)
    planned = tuple({} if one is None else {Tier.DEVICE.value: one.total, **one.elsewhere} for one in plans)
    traffic = offload_traffic(config, target.device, job, [one for one in plans if one is not None])
    return Budget(tuple(checks), planned, processes, here, traffic)


def _layout(target: PlanningTarget, rank: int) -> str:
    """Return a digest that is equal on ranks with equal plans."""
    groups = {id(p): number for number, group in enumerate(target.groups) for p in group}
    parameters = [
        (tuple(p.shape), str(p.dtype), p.requires_grad, groups.get(id(p)), len(part_of(p).ranks or ()))
        for p in target.module.parameters()
    ]
    # Unsharded tensors are each stepped on one rank: plans differ by rank.
    text = repr((parameters, rank if stepping_of(target.optimizer).whole else -1))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def resources_of(target: PlanningTarget, rank: int, node: str) -> list[Resource]:
    """Return the limited resources of this rank."""
    config, device, module = target.resolution.config, target.device, target.module
    limits, cpu = config.memory_limits, target.device.type == "cpu"
    on_device, on_host, on_disk = ([tier.value] for tier in Tier)
    near = [*on_device, *on_host] if cpu else on_host
    found = []
    if limits.device is not None:
        found.append(Resource(f"device of {rank}", "memory_limits.device", on_device, limits.device))
    limit = None if cpu else memory_limit(device)
    if limit is not None:
        free, held = limit.share - torch.cuda.memory_allocated(device), module_bytes(module, device.type)
        found.append(Resource(f"cuda of {rank}", limit.name, on_device, free, held))
    if limits.host is not None:
        separate = cpu and limits.device is not None  # the device is taken for separate memory
        found.append(Resource(f"host of {node}", "memory_limits.host", on_host if separate else near, limits.host))
    held = min(module_bytes(module, "cpu"), resident_bytes() or 0)
    for limit in host_limits():
        owner = f"process of {rank}" if limit.address_space else f"{limit.name} of {node}"
        found.append(Resource(owner, limit.name, near, limit.total - limit.used, held))
    if limits.disk is not None:
        found.append(Resource(f"disk of {node}", "memory_limits.disk", on_disk, limits.disk))
    devices: dict[int, list[str]] = {}
    for path in _swap_directories(config):
        try:
            devices.setdefault(os.stat(existing(Path(path))).st_dev, []).append(path)
        except OSError:
            continue
    for number, directories in devices.items():
        limit = disk_limit(Path(directories[0]))
        if limit is not None:
            free = limit.total - limit.used
            found.append(Resource(f"disk {number} of {node}", limit.name, on_disk, free, directories=directories))
    return found


def _swap_directories(config: Config) -> list[str]:
    zero = config.zero_optimization
    paths = [one.nvme_path for one in (zero.offload_optimizer, zero.offload_param) if one is not None]
    return sorted({str(Path(path).expanduser()) for path in paths if path and path.lower() != "none"})


def checks_of(resources: Sequence[Sequence[Resource]], plans: Sequence[MemoryPlan | None]) -> list[Check]:
    """Add up the needs of all ranks with a plan, by resource."""
    shared: dict[str, list[tuple[int, Resource, int]]] = {}
    for rank, (own, plan) in enumerate(zip(resources, plans, strict=True)):
        if plan is not None:
            for one in own:
                shared.setdefault(one.key, []).append((rank, one, one.needed(plan)))
    found = []
    for members in shared.values():
        ranks, ones, needs = zip(*members, strict=True)
        # Ranks have read the free bytes at different times.
        there = max(0, min(one.free for one in ones)) + sum(one.freed for one in ones)
        directories = tuple(dict.fromkeys(path for one in ones for path in one.directories))
        found.append(Check(ones[0].limit, tuple(ones[0].tiers), ranks, sum(needs), there, directories))
    return found


# -- a plan that does not fit ------------------------------------------------------------------------------------------


def _refusal(
    target: PlanningTarget, job: Communicator, planner: Planner, checks: Sequence[Check], short: Sequence[Check]
) -> OutOfMemoryError:
    """Return the error that all ranks raise; rank 0 searches for settings that fit, the others wait."""
    local = _search(target, planner, checks, short) if job.rank == 0 else None
    found: Any = job.share_object(local, "preflight")
    error = OutOfMemoryError(found[0])
    error.suggestion = found[1]
    return error


def _search(
    target: PlanningTarget, planner: Planner, checks: Sequence[Check], short: Sequence[Check]
) -> tuple[str, dict[str, Any] | None]:
    now = Offload.of(target.resolution.config)
    lines = [
        "initialize(): this does not fit. Planned by a dry run, before any weight was sharded, without activations "
        "(they depend on the batch):",
        *(f"  {check}" for check in short),
        f"Setting: {replace(target.setting, offload=now)}.",
    ]
    rooms = list(dict.fromkeys(check.room for check in checks))
    notes = [f"Fits: planned, and {MARGIN:.0%} more, on every tier. The first line is the setting that does not."]
    found, deadline = None, time.monotonic() + SEARCH_S
    try:
        plans = [planner.plan(target.setting, rooms)]
        for setting in target.setting.offloaded(offloads(now.path), now):
            if time.monotonic() > deadline:
                notes.append(f"The search was ended after {SEARCH_S:.0f} s.")
                break
            plans.append(planner.plan(setting, rooms))
            if plans[-1].fits:
                found = setting
                break
        lines.append(MemoryPlans(tuple(plans), None, tuple(notes)).render(width=140).rstrip())
        lines.append(
            f"The cheapest setting that fits: {found}. Set {json.dumps(found.config)}." if found else _advice(plans[1:])
        )
    except Exception as failure:  # an optimizer of the user's own, which runs in the dry run
        lines.append(f"Other settings not planned ({type(failure).__name__}: {failure}).")
    return "\n".join(lines), None if found is None else found.config


def _advice(plans: Sequence[SettingPlan]) -> str:
    for plan in plans:
        on_disk = plan.elsewhere.get(Tier.DISK.value)
        if plan.fits is None and on_disk:
            return (
                f"With {format_size(int(on_disk * (1 + MARGIN)))} of a disk for each rank this would fit: "
                f"{plan.setting}. Set {json.dumps(plan.setting.config)}."
            )
    return (
        "None of these settings is known to fit (higher stages; state on the host or on a disk). What remains: "
        "parameters in 16 bits, more ranks, a smaller model, or more memory."
    )
