"""The out-of-memory error: requested bytes, limit, held bytes, and how to find a setting that fits.

No collective, because no rank may wait for one that is about to exit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.engine.plans import (
    Planner,
    PlanningTarget,
    Room,
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

_ADVICE = (
    "To find a setting that fits, call print(engine.memory_plans(batch)) before training (it plans stages, micro-"
    "batches and ranks on tensors without memory), or run shardwise plan. Further ways: offload_optimizer and "
    "offload_param, recomputed activations (shardwise.checkpointing), parameters in 16 bits."
)


@dataclass(frozen=True)
class OomContext:
    """Context of an out-of-memory error in the user's call `where`; `batch`: shapes of the micro-batch, or None.
    `graph`: the full autograd graph may be held. `stepping`: optimizer state may be uncounted yet.
    """

    where: str
    subject: PlanningTarget
    accountant: Accountant
    rank: int
    batch: Any = None
    graph: bool = False
    stepping: bool = False
    report: Callable[[], MemoryReport] | None = None


@contextlib.contextmanager
def explaining(circumstances: Callable[[], OomContext]) -> Iterator[None]:
    """Turn an out-of-memory error of the block into an `OutOfMemoryError`; only then call `circumstances`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explained(error, circumstances()) from error


def explained(error: BaseException, at: OomContext) -> OutOfMemoryError:
    """Return the `OutOfMemoryError` for an out-of-memory error."""
    live = at.accountant.live
    # Free the memory of the failed pass, because the search needs a little memory itself.
    let_go_of_frames(error)
    give_back_freed_memory()
    first = str(error).strip().splitlines() or [type(error).__name__]
    asked = asked_bytes(error)
    lines = [
        f"rank {at.rank} has run out of memory in {at.where}: {first[0]}",
        f"Setting: {at.subject.setting}. Asked for: {'unknown' if asked is None else readable(asked)}.",
    ]
    try:
        lines.append(_limit_line(*room_for(at, Planner(at.subject, at.batch, like_cross_entropy))))
        with more_addresses():
            lines.append(_table(at, live))
    except (Exception, MemoryError) as failure:  # out of memory again, or a failing client optimizer
        held = ", ".join(f"{category.value} {readable(size)}" for category, size in live.items() if size)
        lines.append(f"Held: {held or 'nothing'}. Not planned ({type(failure).__name__}: {failure}).")
    raised = OutOfMemoryError("\n".join([*lines, _ADVICE]))
    raised.asked = asked
    return raised


def over_limit(at: OomContext, limit: int) -> OutOfMemoryError:
    """Return the error for a peak above `limit` (`memory_limits.device`), although memory was available."""
    held = at.accountant.peak_total
    lines = [
        f"rank {at.rank} has held {readable(held)} on its device up to the end of {at.where}, {readable(held - limit)} "
        f"more than memory_limits.device allows ({readable(limit)}).",
        f"Setting: {at.subject.setting}.",
        _table(at, at.accountant.live),
        _ADVICE,
    ]
    return OutOfMemoryError("\n".join(lines))


def rooms_at(at: OomContext, room: int | None) -> list[Room]:
    """Return the bytes available to the engine of this process; `room` is the result of `room_for`."""
    if room is None:
        return []
    if at.subject.device.type == "cpu":
        return [Room((Tier.DEVICE, Tier.HOST), room)]
    return [Room((Tier.DEVICE,), room), *_host_room(at)]


def _host_room(at: OomContext) -> list[Room]:
    limit = min(host_limits(_processes(at)), key=lambda limit: limit.share, default=None)
    if limit is None:
        return []
    ours = sum(at.accountant.live_in(Tier.HOST).values())
    cpu = at.subject.device.type == "cpu"
    ours += at.accountant.total if cpu else 0
    tiers = (Tier.DEVICE, Tier.HOST) if cpu else (Tier.HOST,)
    return [Room(tiers, max(0, limit.share - limit.own + ours))]


def _processes(at: OomContext) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or at.subject.setting.ranks)


def room_for(at: OomContext, planner: Planner) -> tuple[MemoryLimit | None, int | None]:
    """Return this process's memory limit, and the bytes of it available to engine and activations: all but the usage
    before the engine or, if larger, beyond all known engine memory.
    """
    setting, accountant = at.subject.setting, at.accountant
    limit = memory_limit(at.subject.device, _processes(at))
    if limit is None:
        return None, None
    # Measured before planning, because planning loads parts of PyTorch.
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


def _table(at: OomContext, live: dict[Category, int]) -> str:
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
