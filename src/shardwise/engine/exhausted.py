"""What is said when memory runs out: what was asked for, the limit, what is held, and the setting that would have fit.

All of it is this rank's own knowledge: no collective, so that no rank waits for one that is about to leave. The search
for a setting ends after `SEARCH_S` seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.engine.plans import (
    MARGIN,
    MemoryPlans,
    Offload,
    Planner,
    Room,
    Setting,
    SettingPlan,
    Subject,
    offloads,
    search,
)
from shardwise.memory import (
    Accountant,
    Category,
    MemoryLimit,
    MemoryReport,
    OutOfMemoryError,
    Tier,
    asked_bytes,
    give_back_freed_memory,
    host_limits,
    is_out_of_memory,
    let_go_of_frames,
    like_cross_entropy,
    memory_limit,
    resident_bytes,
    virtual_bytes,
)
from shardwise.memory.limits import more_addresses
from shardwise.memory.report import readable

SEARCH_S = 30.0
_SHOWN = 12


@dataclass(frozen=True)
class Circumstances:
    """Where memory has run out.

    Attributes:
        where: the call of the user's.
        subject: what is trained, and how.
        accountant: knows what is held.
        rank: this process's.
        batch: the micro-batch that was being computed, as shapes; None if there was none.
        graph: a whole graph of activations may be held.
        stepping: optimizer state may have been made that nobody has counted yet.
        report: makes the engine's table; None where there is no engine yet.
    """

    where: str
    subject: Subject
    accountant: Accountant
    rank: int
    batch: Any = None
    graph: bool = False
    stepping: bool = False
    report: Callable[[], MemoryReport] | None = None


@contextlib.contextmanager
def explaining(circumstances: Callable[[], Circumstances]) -> Iterator[None]:
    """Turn an error that says that memory has run out into one that says what would have fitted.

    Args:
        circumstances: asked if it has.

    Raises:
        OutOfMemoryError: see there.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explained(error, circumstances()) from error


def explained(error: BaseException, at: Circumstances) -> OutOfMemoryError:
    """Return the error to be raised from one that says that memory has run out."""
    live = at.accountant.live
    # The pass is over. What its calls held is given back before the search, which needs a little memory itself.
    let_go_of_frames(error)
    give_back_freed_memory()
    first = str(error).strip().splitlines() or [type(error).__name__]
    asked = asked_bytes(error)
    lines = [
        f"rank {at.rank} has run out of memory in {at.where}: {first[0]}",
        f"Setting: {at.subject.setting}. Asked for: {'unknown' if asked is None else readable(asked)}.",
    ]
    planner = Planner(at.subject, at.batch, like_cross_entropy)
    suggestion = None
    try:
        limit, room = room_for(at, planner)
        lines.append(_limit_line(limit, room))
        rooms = None if room is None else rooms_at(at, room)
        with more_addresses():
            lines.append(_table(at, live))
            plans, found = searched(at, planner, rooms)
            lines += [plans, advice(found, at.subject)]
        suggestion = None if found is None else found.setting.config
    except (Exception, MemoryError) as failure:  # no memory for this either, or an optimizer of the user's own
        held = ", ".join(f"{category.value} {readable(size)}" for category, size in live.items() if size)
        lines.append(f"Held: {held or 'nothing'}. Other settings not planned ({type(failure).__name__}: {failure}).")
    told = OutOfMemoryError("\n".join(lines))
    told.asked, told.suggestion = asked, suggestion
    return told


def over_limit(at: Circumstances, limit: int) -> OutOfMemoryError:
    """Return the error to be raised when more was held on the device than it may be, though there was memory for it.

    Args:
        at: what is known.
        limit: of the bytes that the accountant counts there.
    """
    held = at.accountant.peak_total
    lines = [
        f"rank {at.rank} has held {readable(held)} on its device up to the end of {at.where}, {readable(held - limit)} "
        f"more than memory_limits.device allows ({readable(limit)}).",
        f"Setting: {at.subject.setting}.",
        _table(at, at.accountant.live),
    ]
    told = OutOfMemoryError()
    planner = Planner(at.subject, at.batch, like_cross_entropy)
    try:
        plans, found = searched(at, planner, [Room((Tier.DEVICE,), limit), *_host_room(at)])
        lines += [plans, advice(found, at.subject)]
        told.suggestion = None if found is None else found.setting.config
    except Exception as failure:  # an optimizer of the user's own, which runs in the dry run
        lines.append(f"Other settings not planned ({type(failure).__name__}: {failure}).")
    told.args = ("\n".join(lines),)
    return told


def rooms_at(at: Circumstances, room: int | None) -> list[Room]:
    """Return the bytes that there are for the engine of this process.

    Args:
        at: what is known.
        room: what `room_for` has found.
    """
    if room is None:
        return []
    if at.subject.device.type == "cpu":
        return [Room((Tier.DEVICE, Tier.HOST), room)]
    return [Room((Tier.DEVICE,), room), *_host_room(at)]


def _host_room(at: Circumstances) -> list[Room]:
    """Return what there is on the host for what does not live on the device."""
    limit = min(host_limits(_processes(at)), key=lambda limit: limit.share, default=None)
    if limit is None:
        return []
    ours = sum(at.accountant.live_in(Tier.HOST).values())
    cpu = at.subject.device.type == "cpu"
    ours += at.accountant.total if cpu else 0
    tiers = (Tier.DEVICE, Tier.HOST) if cpu else (Tier.HOST,)
    return [Room(tiers, max(0, limit.share - limit.own + ours))]


def _processes(at: Circumstances) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or at.subject.setting.ranks)


def room_for(at: Circumstances, planner: Planner) -> tuple[MemoryLimit | None, int | None]:
    """Return the limit of this process, and what of it there is for the engine and its activations.

    The rest is the process's own: what it had before the engine, or, if that is more now, what it has beyond all that
    is known to be the engine's.
    """
    setting, accountant = at.subject.setting, at.accountant
    limit = memory_limit(at.subject.device, _processes(at))
    if limit is None:
        return None, None
    # Measured before anything is planned, because planning loads parts of PyTorch.
    if at.subject.device.type == "cuda":
        used, before = torch.cuda.memory_allocated(at.subject.device), 0
    elif limit.address_space:
        used, before = virtual_bytes() or 0, accountant.process_addresses or 0
    else:
        used, before = resident_bytes() or 0, accountant.process_bytes or 0
    ours = accountant.total
    if at.subject.device.type == "cpu":
        ours += sum(accountant.live_in(Tier.HOST).values())
    if at.graph and at.batch is not None and not accountant.tracked:
        ours += planner.plan(setting).peaks.get(Category.ACTIVATIONS.value, 0)
    if at.stepping:
        planned = planner.plan(setting).peaks
        ours += max(0, planned.get(Category.OPTIMIZER.value, 0) - accountant.live[Category.OPTIMIZER])
    return limit, max(0, limit.share - max(before, used - ours))


def _limit_line(limit: MemoryLimit | None, room: int | None) -> str:
    if limit is None or room is None:
        return "Limit: unknown."
    shared = f", shared with {limit.sharers - 1} other processes of the job" if limit.sharers > 1 else ""
    reserved = ""
    if limit.address_space and not os.environ.get("MALLOC_ARENA_MAX"):
        reserved = (
            " It counts addresses that are only reserved, too: the C library reserves 64 MiB for each thread, unless "
            "MALLOC_ARENA_MAX=1 is set."
        )
    return (
        f"Limit: {limit.name}, {readable(limit.total)}, of which {readable(limit.used)} are in use "
        f"now that the failed call has ended{shared}. "
        f"There is room for {readable(room)} of the engine's tensors and activations."
        f"{reserved}"
    )


def _table(at: Circumstances, live: dict[Category, int]) -> str:
    if at.report is None:
        held = ", ".join(f"{category.value} {readable(size)}" for category, size in live.items() if size)
        return f"Held when it happened: {held or 'nothing'}."
    report = at.report()
    tracked = at.accountant.tracked
    rows = tuple(
        replace(row, live=live[category] if tracked or category is not Category.ACTIVATIONS else None)
        for row, category in zip(report.rows, Category, strict=True)
    )
    total = replace(report.total, live=sum(live.values()))
    return replace(report, rows=rows, total=total).render().rstrip()


def searched(
    at: Circumstances,
    planner: Planner,
    rooms: Sequence[Room] | None,
    seconds: float | None = None,
    first: str = "The first line is the setting that ran out of memory.",
) -> tuple[str, SettingPlan | None]:
    """Return the table of the settings looked at, and the cheapest that fits.

    Args:
        at: what is known.
        planner: of what is trained.
        rooms: bytes that there are; None: that is not known.
        seconds: of the search; None: `SEARCH_S`.
        first: says what the first line is.
    """
    seconds = SEARCH_S if seconds is None else seconds
    setting = at.subject.setting
    own = planner.plan(setting, rooms or ())
    if rooms is None:
        plans, complete = [planner.plan(other) for other in setting.dearer()[:_SHOWN]], True
    else:
        plans, complete = search(planner, _settings(at.subject, rooms), rooms, seconds)
    found = next((plan for plan in plans if plan.fits), None)
    notes = [f"Fits: planned, and {MARGIN:.0%} more. {first}"]
    if not complete:
        notes.append(f"The search was ended after {seconds:.0f} s.")
    if len(plans) > _SHOWN:
        notes.append(f"{len(plans) - _SHOWN} settings between the first and the last ones are left out.")
        plans = [*plans[: _SHOWN // 2], *plans[-_SHOWN // 2 :]]
    if at.batch is None:
        notes.append("Activations are not in it: no batch was being computed.")
    room = min((room.size for room in rooms or () if Tier.DEVICE in room.tiers), default=None)
    return MemoryPlans((own, *plans), room, tuple(notes)).render(width=140).rstrip(), found


def _settings(subject: Subject, rooms: Sequence[Room]) -> list[Setting]:
    """Return what is tried; with state elsewhere only if the device has memory of its own, or is taken to."""
    found = subject.setting.dearer()
    if any(room.tiers == (Tier.DEVICE,) for room in rooms):
        now = Offload.of(subject.resolution.config)
        found += subject.setting.moved(offloads(now.path), now)
    return sorted(found, key=lambda setting: setting.cost)


def advice(found: SettingPlan | None, subject: Subject, does: str = "would have fitted") -> str:
    """Say which setting to take.

    Args:
        found: the cheapest that fits; None: none is known.
        subject: what is trained, and how.
        does: what it does, in words.
    """
    if found is None:
        return (
            "No setting that was looked at is known to fit (stages up to 3, micro-batches down to 1, more ranks at the "
            "same global batch; state on the host or on a disk where that helps). What remains: activations recomputed "
            "in the model (torch.utils.checkpoint), parameters in 16 bits, a smaller model or global batch, or more "
            "memory."
        )
    setting, now = found.setting, subject.setting
    ranks = f" on {setting.ranks} ranks" if setting.ranks != now.ranks else ""
    return f"The cheapest setting that {does}: {setting}. Set{ranks} {json.dumps(setting.config)}."
