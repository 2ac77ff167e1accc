"""Memory preflight: planned memory of each tier against its limits, before weights are sharded.

One rank of each machine and parameter layout makes a dry run (about 30 ms a unit); every rank reads its limits. Ranks
exchange both, and so come to the same result. The preflight runs if state is offloaded and not tiny, or a limit is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine.dryrun import MemoryPlan
from shardwise.engine.plans import (
    MARGIN,
    UNNAMED,
    MemoryPlans,
    Offload,
    Planner,
    PlanningTarget,
    Room,
    SettingPlan,
    offloads,
    search,
)
from shardwise.engine.stepping import stepping_of
from shardwise.engine.traffic import Traffic
from shardwise.errors import OffloadError
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
from shardwise.memory.report import readable
from shardwise.memory.watchdog import EXIT_CODE, Watchdog
from shardwise.offload import Disks
from shardwise.registry import part_of
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config

NEAR = 0.9
"""Fraction of the available memory above which a plan gets a warning."""
SEARCH_S = 30.0
"""Time limit in seconds of the search for a setting that fits."""
WORTH_PLANNING = 16 << 20
"""Bytes of a rank from which on a plan is made without a configured limit."""
MOST_AN_ELEMENT = 64
"""Upper bound of the bytes, of all categories, that a rank holds for a parameter element."""
WORTH_MEASURING = 16 << 20
"""Bytes a step from which on the speed of a disk or of copies is measured."""

_NEAR_TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class Claim:
    """Peak bytes that one rank needs of a limited resource; `key` identifies it among ranks that share it. `tiers`,
    `directories` (empty: all): those that count. `freed`: bytes that this rank frees when its model is sharded.
    """

    key: str
    limit: str
    tiers: list[str]
    free: int
    freed: int
    needed: int
    directories: list[str] = field(default_factory=list)


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
        return Room(tuple(Tier(name) for name in self.tiers), self.there // len(self.ranks), self.directories)

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]} needs" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks need"
        return (
            f"{' and '.join(self.tiers)}: {who} {readable(self.needed)}, and {readable(self.there)} are there "
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


def wanted(config: Config, places: Iterable[str]) -> bool:
    """Whether the configuration requires a memory preflight; `places` are the tiers of state."""
    return any(place != "device" for place in places) or _by_hand(config) or config.memory_limits.watchdog is True


def make(subject: PlanningTarget, job: Communicator) -> Budget:
    """Plan memory before sharding (all ranks call); an OutOfMemoryError on all ranks, if any limit is too small."""
    config = subject.resolution.config
    numel = sum(parameter.numel() for parameter in subject.module.parameters())
    nodes = job.nodes()
    known = job.exchange({"process": os.getpid(), "numel": numel}, "budget")
    processes = tuple(each["process"] for each in known)
    here = tuple(rank for rank, node in enumerate(nodes) if node == nodes[job.rank])
    # Ranks may hold different parts of the model: the largest decides for all.
    if not _by_hand(config) and max(each["numel"] for each in known) * MOST_AN_ELEMENT < WORTH_PLANNING:
        return Budget((), tuple({} for _ in known), processes, here)
    planner = Planner(subject)
    plan, why = _planned(subject, planner, job, nodes)
    claims = [] if plan is None else claims_of(subject, plan, job.rank, nodes[job.rank])
    told = job.exchange(
        {
            "planned": {} if plan is None else _by_tier(plan),
            "claims": [vars(claim) for claim in claims],
            "moved": {} if plan is None else {tier.value: list(plan.moved[tier]) for tier in (Tier.HOST, Tier.DISK)},
        },
        "budget",
    )
    checks = checks_of([[Claim(**claim) for claim in each["claims"]] for each in told])
    if plan is None and job.rank == 0:
        logger.warning("whether this fits has not been planned: %s", why)
    short = [check for check in checks if check.needed > check.there]
    if short:
        raise _refusal(subject, job, planner, checks, short)
    if job.rank == 0:
        for check in checks:
            if check.needed > NEAR * check.there:
                logger.warning("memory will be short, before activations are counted: %s", check)
    moved = [{tier: tuple(sizes) for tier, sizes in each["moved"].items()} for each in told]
    traffic = _traffic(config, subject.device, job, moved, plan)
    return Budget(tuple(checks), tuple(each["planned"] for each in told), processes, here, traffic)


def _planned(
    subject: PlanningTarget, planner: Planner, job: Communicator, nodes: Sequence[str]
) -> tuple[MemoryPlan | None, str]:
    """Return the plan of this rank, or the reason for its absence (all ranks call). Among ranks of a machine with equal
    parameters one makes the dry run, because it keeps all cores busy for seconds.
    """
    parts = job.fingerprints(_parts(subject, job.rank), "budget.parts")
    first = next(r for r, node in enumerate(nodes) if (node, parts[r]) == (nodes[job.rank], parts[job.rank]))
    own: list[Any] | None = None
    if first == job.rank:
        plan: MemoryPlan | None = None
        try:
            plan, why = planner.window(subject.setting)
        except Exception as error:  # an optimizer of the user's own, which runs in the dry run
            why = f"a dry run of the engine failed ({type(error).__name__}: {error})"
        own = [None if plan is None else plan.as_json(), why]
    told, why = job.exchange(own, "budget.plans")[first]
    return None if told is None else MemoryPlan.of_json(told), str(why)


def _parts(subject: PlanningTarget, rank: int) -> str:
    groups = {id(p): number for number, group in enumerate(subject.groups) for p in group}
    sizes = [
        (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, groups.get(id(parameter)))
        for parameter in subject.module.parameters()
    ]
    shared = [len(part_of(p).ranks or ()) for p in subject.module.parameters()]
    # Unsharded tensors are each stepped on one rank: plans differ by rank.
    return repr((sizes, shared, rank if stepping_of(subject.optimizer).whole else -1))


def _by_hand(config: Config) -> bool:
    limits = config.memory_limits
    return any(limit is not None for limit in (limits.device, limits.host, limits.disk))


def _by_tier(plan: MemoryPlan) -> dict[str, int]:
    return {Tier.DEVICE.value: plan.total, **{tier.value: size for tier, size in plan.elsewhere.items()}}


# -- while training goes on --------------------------------------------------------------------------------------------


def watches(config: Config, places: Iterable[str]) -> bool:
    """Whether the memory watchdog runs; `places` are the tiers of state."""
    asked = config.memory_limits.watchdog
    return any(place in ("host", "pageable") for place in places) if asked is None else asked


class Watched:
    """Memory watchdog of this machine, on its first rank; `checkpoint` returns the newest checkpoint, or None."""

    def __init__(self, budget: Budget, rank: int, accountant: Accountant) -> None:
        self.checkpoint: Callable[[], str | None] = lambda: None
        self._budget = budget
        self._rank = rank
        self._accountant = accountant
        self._watchdog = Watchdog(self, Watched.told)
        if rank == budget.node[0]:
            self._watchdog.start()

    def told(self) -> str:
        """Return the watchdog's report when memory runs out; it allocates little memory."""
        budget, path = self._budget, self.checkpoint()
        rows = [f"{'rank':>6}{'process':>9}{'resident':>12}" + "".join(f"{tier.value:>12}" for tier in Tier)]
        for rank in budget.node:
            held = resident_bytes(budget.processes[rank])
            planned = "".join(f"{readable(budget.planned[rank].get(tier.value)):>12}" for tier in Tier)
            rows.append(f"{rank:>6}{budget.processes[rank]:>9}{readable(held):>12}{planned}")
        held_now = []
        for tier in Tier:
            sizes = ", ".join(
                f"{c.value} {readable(size)}" for c, size in self._accountant.live_in(tier).items() if size
            )
            held_now.append(f"Rank {self._rank} holds on {tier.value}: {sizes or 'nothing'}.")
        return "\n".join(
            [
                "The kernel would soon kill a process without a word, so "
                f"rank {self._rank} ends this job with exit code {EXIT_CODE}. In memory now, and planned on each tier:",
                *rows,
                *held_now,
                f"Go on from {path}." if path else "This process has neither saved nor loaded a checkpoint.",
            ]
        )

    def close(self) -> None:
        """Stop the watchdog."""
        self._watchdog.close()


# -- available memory -------------------------------------------------------------------------------------------------


def claims_of(subject: PlanningTarget, plan: MemoryPlan, rank: int, node: str) -> list[Claim]:
    """Return this rank's need of every limited resource."""
    config, device = subject.resolution.config, subject.device
    limits = config.memory_limits
    cpu = device.type == "cpu"
    found: list[Claim] = []

    def claim(
        key: str, name: str, tiers: Sequence[Tier], free: int, freed: int = 0, directories: Sequence[str] = ()
    ) -> None:
        room = Room(tuple(tiers), 0, tuple(directories))
        needed = room.taken(plan)
        found.append(Claim(key, name, [tier.value for tier in tiers], max(0, free), freed, needed, list(directories)))

    if limits.device is not None:
        claim(f"device of {rank}", "memory_limits.device", (Tier.DEVICE,), limits.device)
    if not cpu:
        limit, held = memory_limit(device), module_bytes(subject.module, device.type)
        if limit is not None:
            taken = torch.cuda.memory_allocated(device) - held
            claim(f"cuda of {rank}", limit.name, (Tier.DEVICE,), limit.share - taken - held, held)
    near = _NEAR_TIERS if cpu else (Tier.HOST,)
    if limits.host is not None:
        played = cpu and limits.device is not None  # treat the device as separate memory
        claim(f"host key of {node}", "memory_limits.host", (Tier.HOST,) if played else near, limits.host)
    freed = min(module_bytes(subject.module, "cpu"), resident_bytes() or 0)
    for limit in host_limits():
        who = f"process of {rank}" if limit.address_space else f"{limit.name} of {node}"
        claim(who, limit.name, near, limit.total - limit.used, freed)
    paths = sorted({str(path) for path in (*plan.files, *_directories(config))})
    if limits.disk is not None:
        claim(f"disk key of {node}", "memory_limits.disk", (Tier.DISK,), limits.disk)
    devices: dict[int, list[str]] = {}
    for path in paths:
        try:
            devices.setdefault(os.stat(existing(Path(path))).st_dev, []).append(path)
        except OSError:
            continue
    for number, directories in devices.items():
        limit = disk_limit(Path(directories[0]))
        if limit is not None:
            free = limit.total - limit.used
            claim(f"disk {number} of {node}", limit.name, (Tier.DISK,), free, directories=directories)
    return found


def _directories(config: Config) -> list[Path]:
    path = Offload.of(config).path
    return [] if path == UNNAMED else [Path(path).expanduser()]


def checks_of(claims: Sequence[Sequence[Claim]]) -> list[Check]:
    """Add up the claims of all ranks, by resource."""
    shared: dict[str, list[tuple[int, Claim]]] = {}
    for rank, own in enumerate(claims):
        for claim in own:
            shared.setdefault(claim.key, []).append((rank, claim))
    found = []
    for members in shared.values():
        first = members[0][1]
        # Ranks have read the free bytes at different times.
        there = min(claim.free for _, claim in members) + sum(claim.freed for _, claim in members)
        needed = sum(claim.needed for _, claim in members)
        directories = tuple(dict.fromkeys(path for _, claim in members for path in claim.directories))
        ranks = tuple(rank for rank, _ in members)
        found.append(Check(first.limit, tuple(first.tiers), ranks, needed, there, directories))
    return found


# -- search for a fit --------------------------------------------------------------------------------------------------


def _refusal(
    subject: PlanningTarget, job: Communicator, planner: Planner, checks: Sequence[Check], short: Sequence[Check]
) -> OutOfMemoryError:
    """Return the error that all ranks raise; rank 0 searches for settings that fit, the others wait."""
    said: Any = None
    if job.rank == 0:
        said = _refused(subject, planner, checks, short)
    said = job.share_object(said, "budget")
    error = OutOfMemoryError(said["text"])
    error.suggestion = said["suggestion"]
    return error


def _refused(
    subject: PlanningTarget, planner: Planner, checks: Sequence[Check], short: Sequence[Check]
) -> dict[str, Any]:
    now = Offload.of(subject.resolution.config)
    lines = [
        "initialize(): this does not fit. Planned by a dry run, before any weight was spread, without activations "
        "(they depend on the batch):",
        *(f"  {check}" for check in short),
        f"Setting: {replace(subject.setting, offload=now)}.",
    ]
    rooms = tightest([check.room for check in checks])
    found = None
    try:
        plans, complete = search(planner, subject.setting.moved(offloads(now.path), now), rooms, SEARCH_S)
        found = next((plan for plan in plans if plan.fits), None)
        notes = [f"Fits: planned, and {MARGIN:.0%} more, on every tier. The first line is the setting that does not."]
        if not complete:
            notes.append(f"The search was ended after {SEARCH_S:.0f} s.")
        own = planner.plan(subject.setting, rooms)
        lines.append(MemoryPlans((own, *plans), None, tuple(notes)).render(width=140).rstrip())
        lines.append(_advised(found, plans, subject))
    except Exception as failure:  # an optimizer of the user's own, which runs in the dry run
        lines.append(f"Other settings not planned ({type(failure).__name__}: {failure}).")
    return {"text": "\n".join(lines), "suggestion": None if found is None else found.setting.config}


def _advised(found: SettingPlan | None, plans: Sequence[SettingPlan], subject: PlanningTarget) -> str:
    if found is None:
        for plan in plans:
            if plan.fits is None and plan.elsewhere.get(Tier.DISK.value):
                room = readable(int(plan.elsewhere[Tier.DISK.value] * (1 + MARGIN)))
                keys = json.dumps(plan.setting.config)
                return f"With {room} of a disk for each rank this would fit: {plan.setting}. Set {keys}."
    return _advice(found, subject)


def _advice(found: SettingPlan | None, subject: PlanningTarget) -> str:
    if found is None:
        return (
            "No setting that was looked at is known to fit (stages up to 3, micro-batches down to 1, more ranks at the "
            "same global batch; state on the host or on a disk where that helps). What remains: activations recomputed "
            "in the model (torch.utils.checkpoint), parameters in 16 bits, a smaller model or global batch, or more "
            "memory."
        )
    setting, now = found.setting, subject.setting
    ranks = f" on {setting.ranks} ranks" if setting.ranks != now.ranks else ""
    return f"The cheapest setting that fits: {setting}. Set{ranks} {json.dumps(setting.config)}."


def tightest(rooms: Sequence[Room]) -> list[Room]:
    """Return the smallest room for each set of tiers and directories."""
    found: dict[tuple[Any, ...], Room] = {}
    for room in rooms:
        kind = (room.tiers, room.directories)
        if kind not in found or room.size < found[kind].size:
            found[kind] = room
    return list(found.values())


# -- offload traffic ---------------------------------------------------------------------------------------------------


def _traffic(
    config: Config,
    device: torch.device,
    job: Communicator,
    moved: Sequence[dict[str, tuple[int, ...]]],
    plan: MemoryPlan | None,
) -> tuple[Traffic, ...]:
    found = []
    for tier in (Tier.DISK, *((Tier.HOST,) if device.type == "cuda" else ())):
        sizes = [each.get(tier.value, (0, 0)) for each in moved]
        if max(sum(size) for size in sizes) < WORTH_MEASURING:
            continue
        directory = next(iter(plan.files), None) if plan is not None else None
        speeds = job.exchange(_measured(config, device, tier, directory), "speed")
        slowest = [min(speed[side] for speed in speeds if speed is not None) for side in (0, 1)] if any(speeds) else []
        if not slowest:
            continue
        read, written = max(sizes, key=sum)
        traffic = Traffic(tier.value, read, written, slowest[0], slowest[1])
        found.append(traffic)
        if job.rank == 0:
            logger.info("%s", traffic)
    return tuple(found)


def _measured(config: Config, device: torch.device, tier: Tier, directory: Path | None) -> tuple[float, float] | None:
    from shardwise.offload.measure import MEASURED, copy_speed, disk_speed  # it loads NumPy

    try:
        if tier is Tier.HOST:
            return copy_speed(device, MEASURED)
        options = Disks.of(config, 0).options
        return None if directory is None or options is None else disk_speed(directory, options, MEASURED)
    except OffloadError as error:
        logger.warning("the disk was not measured: %s", error)
        return None
