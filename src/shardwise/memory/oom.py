"""Out-of-memory (OOM) errors: detection, and one error with requested bytes, limit and held bytes.

No collective, because no rank may wait for one that is about to exit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType, FunctionType

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.memory.accountant import Accountant, Category, Tier
from shardwise.memory.limits import MemoryLimit, engine_room, memory_limit, more_addresses
from shardwise.memory.process import give_back_freed_memory
from shardwise.memory.report import MemoryReport
from shardwise.units import format_size, parse_size

_REQUESTED = re.compile(r"tried to allocate (\d+(?:\.\d+)?(?: [KMGT]iB)?)", re.IGNORECASE)
_ADVICE = (
    "To find a setting that fits, call print(engine.memory_plans(batch)) before training (it plans stages, micro-"
    "batches and ranks on tensors without memory), or run shardwise plan. Further ways: offload_optimizer and "
    "offload_param, recomputed activations (shardwise.checkpointing), parameters in 16 bits."
)
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


class OutOfMemoryError(ShardwiseError, torch.OutOfMemoryError, MemoryError):
    """Memory has run out in the engine, or a plan does not fit: requested bytes, memory in use, and remedies.

    Handlers of PyTorch's `OutOfMemoryError`, of its `RuntimeError` for a CPU, and of `MemoryError` catch it.

    Attributes:
        requested: bytes of the failed allocation, None if unknown.
        suggestion: configuration keys with which `initialize()` would fit after a refused plan; None if unknown.
    """

    requested: int | None = None
    suggestion: dict[str, object] | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error is an OOM error that has not been converted yet.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1"))
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ")), is_out_of_memory(OutOfMemoryError())
    (False, False)
    """
    if isinstance(error, ShardwiseError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def requested_bytes(error: BaseException) -> int | None:
    """Return the requested bytes of an OOM error, or None if it does not state them.

    >>> requested_bytes(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."))
    4096
    >>> requested_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has ..."))
    21495808
    """
    found = _REQUESTED.search(str(error))
    return None if found is None else parse_size(found[1])


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of an error's frames, which hold activations. The traceback keeps its lines."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        for frame, _ in traceback.walk_tb(current.__traceback__):
            _clear_module_call(frame)
        pending.extend((current.__cause__, current.__context__))


def _clear_module_call(frame: FrameType) -> None:
    """Clear the arguments of a module's call, because `nn.Module` keeps them in closure cells of this call: a cleared
    frame still references its function, and the function its cells.
    """
    if frame.f_code.co_filename != nn.modules.module.__file__:
        return
    for held in gc.get_referents(frame):
        if isinstance(held, FunctionType) and held.__code__ is frame.f_code and "<locals>" in held.__qualname__:
            for cell in held.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty already
                    del cell.cell_contents


@dataclass(frozen=True)
class OomContext:
    """Context of an out-of-memory error in the user's call `where`.

    Attributes:
        setting: stage, batch sizes and ranks, as text.
        processes: of the job on this machine.
        report: returns the memory report with planned activations; None while the engine is built.
        graph: the full autograd graph may be held.
        stepping: optimizer state may be uncounted yet.
    """

    where: str
    setting: str
    device: torch.device
    accountant: Accountant
    rank: int
    processes: int
    report: Callable[[], MemoryReport] | None = None
    graph: bool = False
    stepping: bool = False


@contextlib.contextmanager
def reporting_oom(context: Callable[[], OomContext]) -> Iterator[None]:
    """Turn an out-of-memory error of the block into an `OutOfMemoryError`; only then call `context`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise oom_error(error, context()) from error


def oom_error(error: BaseException, context: OomContext) -> OutOfMemoryError:
    """Return the `OutOfMemoryError` for an out-of-memory error."""
    accountant = context.accountant
    live = accountant.live
    clear_frames(error)  # they hold activations, and the dry run of the report needs a little memory itself
    give_back_freed_memory()
    first = str(error).strip().splitlines() or [type(error).__name__]
    requested = requested_bytes(error)
    lines = [
        f"rank {context.rank} has run out of memory in {context.where}: {first[0]}",
        f"Setting: {context.setting}. Requested: {'unknown' if requested is None else format_size(requested)}.",
    ]
    try:
        limit = memory_limit(context.device, context.processes)  # before the report, which loads parts of PyTorch
        with more_addresses():
            report = None if context.report is None else context.report()
            lines += [_limit_line(context, limit, report), _held(context, live, report)]
    except (Exception, MemoryError) as failure:  # out of memory again, or a failing client optimizer
        lines.append(f"{_sizes(live)} Not planned ({type(failure).__name__}: {failure}).")
    raised = OutOfMemoryError("\n".join([*lines, _ADVICE]))
    raised.requested = requested
    return raised


def over_limit(context: OomContext, limit: int) -> OutOfMemoryError:
    """Return the error for a peak above `limit` (`memory_limits.device`), although memory was available."""
    peak = context.accountant.peak_total
    lines = [
        f"rank {context.rank} has held {format_size(peak)} on its device up to the end of {context.where}, "
        f"{format_size(peak - limit)} more than memory_limits.device allows ({format_size(limit)}).",
        f"Setting: {context.setting}.",
        _held(context, context.accountant.live, None if context.report is None else context.report()),
        _ADVICE,
    ]
    return OutOfMemoryError("\n".join(lines))


def _limit_line(context: OomContext, limit: MemoryLimit | None, report: MemoryReport | None) -> str:
    if limit is None:
        return "Limit: unknown."
    accountant, uncounted = context.accountant, 0
    if report is not None and context.graph and not accountant.tracked:
        uncounted += report.row(Category.ACTIVATIONS).planned or 0
    if report is not None and context.stepping:
        planned = report.row(Category.OPTIMIZER).planned or 0
        uncounted += max(0, planned - accountant.live[Category.OPTIMIZER])
    tiers = (Tier.DEVICE, Tier.HOST) if context.device.type == "cpu" else (Tier.DEVICE,)
    shared = f", shared with {limit.sharers - 1} other processes of the job" if limit.sharers > 1 else ""
    reserved = ""
    if limit.address_space and not os.environ.get("MALLOC_ARENA_MAX"):
        reserved = (
            " It counts addresses that are only reserved, too: the C library reserves 64 MiB for each thread, unless "
            "MALLOC_ARENA_MAX=1 is set."
        )
    room = engine_room(limit, accountant, context.device, tiers, uncounted)
    return (
        f"Limit: {limit.name}, {format_size(limit.total)}, of which {format_size(limit.used)} are in use "
        f"now that the failed call has ended{shared}. "
        f"There is room for {format_size(room)} of the engine's tensors and activations.{reserved}"
    )


def _sizes(live: dict[Category, int]) -> str:
    held = ", ".join(f"{category.value} {format_size(size)}" for category, size in live.items() if size)
    return f"Held when it happened: {held or 'nothing'}."


def _held(context: OomContext, live: dict[Category, int], report: MemoryReport | None) -> str:
    if report is None:
        return _sizes(live)
    known = {category.value: size for category, size in live.items()}
    if not context.accountant.tracked:
        del known[Category.ACTIVATIONS.value]
    rows = tuple(replace(row, live=known.get(row.name)) for row in report.rows)
    return replace(report, rows=rows, total=replace(report.total, live=sum(live.values()))).render().rstrip()
