"""Collectives for training scripts: torch.distributed's, written into the communication log.

They act on torch's process groups, and take torch's arguments and, by keyword, those of `Log`. Without any process
group `get_rank` and `get_world_size` answer for a group of one, and a collective raises UsageError.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardwise.comm.clocks import measure_by
from shardwise.comm.desync import check_call
from shardwise.comm.ledger import follow, followed, user_line, waiting
from shardwise.comm.logger import SETTINGS, comms_logger
from shardwise.comm.rank_status import TorchLaunch
from shardwise.comm.stragglers import MOST_PARTS, Stragglers, blame
from shardwise.compat import all_gather_single, reduce_scatter_single
from shardwise.device.streams import streams_of
from shardwise.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Group = ProcessGroup | None
P = ParamSpec("P")
SUM = ReduceOp.SUM
Tensors = list[Tensor]

_RENAMED = {"all_gather_into_tensor": all_gather_single, "reduce_scatter_tensor": reduce_scatter_single}
_BEGUN = ("isend", "irecv")  # operations that return at once
_ALIKE = ("op", "src", "dst")  # arguments other than tensors that are equal on all ranks of a collective


class Log(TypedDict, total=False):
    """Arguments for the communication log; `prof` records despite the settings, `debug` has no effect."""

    prof: bool
    log_name: str | None
    debug: Any


def is_available() -> bool:
    """Return True if torch was built with distributed support."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group (0 without a process group)."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group (1 without a process group)."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its machine."""
    from shardwise.comm.setup import local_rank

    return local_rank()


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Translate a rank of `group` into a global one."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> Any:
    """Return the default group."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the global ranks of a group."""
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def new_group(ranks: list[int] | None = None) -> Any:
    """Create a group; every rank of the default group must call it."""
    return dist.new_group(ranks)


def destroy_process_group(group: Group = None) -> None:
    """Destroy a group (None: the default group and with it all others)."""
    dist.destroy_process_group(group)


def _collective(
    counted: str | None = None, *, needed: bool = True, by: str = "all"
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Return a decorator of a signature, whose function calls torch.distributed's of that name with these arguments.

    The function checks the call, watches the wait, and records the end if the log wants it. `counted` names the
    argument with recorded bytes. Without a process group the function raises if `needed`, else does nothing. `by`:
    "all" ranks call with the same shapes, "each" rank with its own, or only "two" ranks call.
    """

    def decorate(declared: Callable[P, Any]) -> Callable[P, Any]:
        name = declared.__name__
        passed = [argument for argument in inspect.signature(declared).parameters if argument != "log"]
        signature = _spelled_out(inspect.signature(declared))

        @functools.wraps(declared)
        def collective(*args: P.args, **kwargs: P.kwargs) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not is_initialized():
                if not needed:
                    return None
                missing = "there is no process group; call shardwise.init_distributed() first"
                raise UsageError(f"shardwise.comm.{name}: {missing}")
            value = None if counted is None else given[counted]
            if by != "two":
                rest = {argument: given[argument] for argument in _ALIKE if argument in given}
                check_call(name, value if by == "all" else None, given["group"], rest)
            tensors = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Tensor)]
            device = tensors[0].device if tensors and followed() is not None and not tensors[0].is_cpu else None
            logged, requested = given.get("log_name") or name, bool(given.get("prof"))
            record, line = None, ""
            if requested or comms_logger.wants(logged):
                size, world, line = sum(one.nbytes for one in tensors), get_world_size(given["group"]), user_line()
                record = functools.partial(
                    comms_logger.append, name, size, world=world, line=line, name=logged, requested=requested
                )
                if not (given.get("async_op") or name in _BEGUN):
                    _await_device(whole=False)  # because its earlier work is no part of the time
            launch = _RENAMED.get(name) or getattr(dist, name)
            start = time.perf_counter()
            work = launch(*(given[argument] for argument in passed))
            if device is not None:
                line = line or user_line()
            if hasattr(work, "wait"):
                return _Pending(work, TorchLaunch.of(name, given, line), device, start, record)
            if device is not None:
                follow(TorchLaunch.of(name, given, line), streams_of(device))
            if record is not None:
                _await_device()
                record(time.perf_counter() - start)
            return work

        collective.__signature__ = signature  # type: ignore[attr-defined]
        collective.__annotations__ = {item.name: item.annotation for item in signature.parameters.values()}
        collective.__annotations__["return"] = signature.return_annotation
        return collective

    return decorate


def _await_device(*, whole: bool = True) -> None:
    """Wait for the GPU; not `whole`: for the current stream, because others may wait for what is not launched yet."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        (torch.cuda if whole else torch.cuda.current_stream()).synchronize()


def _of_log(*, prof: bool = False, log_name: str | None = None, debug: Any = None) -> None:
    """Carry the signature of `Log`."""


def _spelled_out(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        parameters[-1:] = inspect.signature(_of_log).parameters.values()
    return signature.replace(parameters=parameters)


@dataclass(eq=False)
class _Pending:
    """torch's `Work`, with the same methods; the stall watchdog knows its wait. Keeps no tensors."""

    _work: Any
    _launch: TorchLaunch
    _followed: torch.device | None
    _start: float
    _record: Callable[[float | None], None] | None

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with waiting(self._launch, time.perf_counter()):
            result = self._work.wait(*args, **kwargs)
        if self._followed is not None:
            follow(self._launch, streams_of(self._followed))
        if self._record is not None:
            # On a device only the stream has waited.
            self._record(None if torch.cuda.is_initialized() else time.perf_counter() - self._start)
        self._followed = self._record = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@_collective("tensor")
def all_reduce(tensor: Tensor, op: Any = SUM, group: Group = None, async_op: bool = False, **log: Unpack[Log]) -> Any:
    """Reduce a tensor over ranks, in place."""


@_collective("tensor")
def reduce(
    tensor: Tensor, dst: int, op: Any = SUM, group: Group = None, async_op: bool = False, **log: Unpack[Log]
) -> Any:
    """Reduce a tensor to global rank `dst`, in place."""


@_collective("tensor")
def broadcast(tensor: Tensor, src: int, group: Group = None, async_op: bool = False, **log: Unpack[Log]) -> Any:
    """Copy global rank `src`'s tensor to all ranks, in place."""


@_collective("tensor_list")
def all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Group = None, async_op: bool = False, **log: Unpack[Log]
) -> Any:
    """Gather equally shaped tensors of all ranks into a list."""


@_collective("output_tensor")
def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: Group = None, async_op: bool = False, **log: Unpack[Log]
) -> Any:
    """Gather equally shaped tensors of all ranks into one, rank-major."""


@_collective("input_list")
def reduce_scatter(
    output: Tensor, input_list: Tensors, op: Any = SUM, group: Group = None, async_op: bool = False, **log: Unpack[Log]
) -> Any:
    """Reduce a list of tensors over ranks; rank r keeps entry r."""


@_collective("tensor")
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = SUM,
    group: Group = None,
    async_op: bool = False,
    **log: Unpack[Log],
) -> Any:
    """Reduce a tensor over ranks; rank r keeps its r-th part."""


@_collective("tensor", by="each")
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    **log: Unpack[Log],
) -> Any:
    """Send part r of `tensor` to rank r."""


@_collective("input_tensor_list", by="each")
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
    **log: Unpack[Log],
) -> Any:
    """Send entry r of the input list to rank r."""


@_collective("tensor")
def gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    **log: Unpack[Log],
) -> Any:
    """Gather equally shaped tensors on global rank `dst`."""


@_collective("tensor")
def scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    **log: Unpack[Log],
) -> Any:
    """Give entry r of global rank `src`'s list to rank r."""


@_collective("tensor", by="two")
def send(tensor: Tensor, dst: int, group: Group = None, tag: int = 0, **log: Unpack[Log]) -> Any:
    """Send a tensor to global rank `dst`."""


@_collective("tensor", by="two")
def recv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, **log: Unpack[Log]) -> Any:
    """Receive a tensor from global rank `src` (None: any rank)."""


@_collective("tensor", by="two")
def isend(tensor: Tensor, dst: int, group: Group = None, tag: int = 0, **log: Unpack[Log]) -> Any:
    """Send a tensor to global rank `dst` without blocking."""


@_collective("tensor", by="two")
def irecv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, **log: Unpack[Log]) -> Any:
    """Receive a tensor from global rank `src` without blocking."""


@_collective(needed=False)
def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None, **log: Unpack[Log]) -> Any:
    """Block until all ranks of the group are here."""


@_collective()
def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False, **log: Unpack[Log]
) -> Any:
    """Barrier (Gloo only) that names missing ranks on failure."""


@_collective()
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Gather picklable objects of all ranks (trusted peers only, as in torch)."""


@_collective()
def broadcast_object_list(object_list: list[Any], src: int, group: Group = None, device: Any = None) -> None:
    """Copy global rank `src`'s picklable objects to all ranks (trusted peers only, as in torch)."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print the communication log on rank 0; every rank must call it.

    Args:
        show_straggler: also print each rank's time in communication, and the ranks that others have waited for in the
            newest collectives of engines (`shardwise.comm.stragglers`).
        return_dict: return the summary as a dictionary.
    """
    barrier(log_name="log_summary_barrier")
    times: list[float] = []
    found = None
    if show_straggler:
        found = straggler_summary()
        rows = [row for sizes in comms_logger.summary().values() for row in sizes.values()]
        times = _of_all(sum(row["total_latency_ms"] for row in rows))
    if get_rank() == 0:
        print(comms_logger.table(), flush=True)
        for rank, value in enumerate(times):
            print(f"rank {rank}: {value:.2f} ms in communication", flush=True)
        if found is not None and found.collectives:
            print(found.table(), flush=True)
    barrier(log_name="log_summary_barrier")
    if not return_dict:
        return None
    late = {} if found is None else {"stragglers": found.as_dict()}
    return {"summary": comms_logger.summary(), "straggler_analysis": [float(value) for value in times], **late}


def _of_all(value: Any) -> list[Any]:
    # As objects, because torch puts their bytes on a device that the group serves.
    gathered = [value] * get_world_size()
    if is_initialized():
        dist.all_gather_object(gathered, value)
    return gathered


def straggler_summary() -> Stragglers:
    """Return the seconds for which ranks waited for each other in the newest collectives of engines (all ranks call).

    The communication log must be on; `engine.stragglers()` reads an engine's ledger, which always is.
    """
    own = comms_logger.parts()[-max(1, MOST_PARTS // get_world_size()) :]
    clock = measure_by(lambda left, had: _of_all((left, had))[0], get_rank(), rounds=16)
    own = [part._replace(launched=part.launched + clock.offset, finished=part.finished + clock.offset) for part in own]
    gathered = _of_all((clock.uncertainty, own))
    return blame({rank: parts for rank, (_, parts) in enumerate(gathered)}, max(unknown for unknown, _ in gathered))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the communication log; a configuration's `comms_logger` section is applied first.

    Args:
        deepspeed_config: a configuration as that of an engine, or as for `initialize`.
        enabled, prof_all, prof_ops, verbose, debug: as of `CommsLogger.configure`.
    """
    section = getattr(deepspeed_config, "comms_logger", None)
    if deepspeed_config is not None and not hasattr(deepspeed_config, "comms_logger"):
        from shardwise.config.read import load
        from shardwise.config.schema.observe import CommsLoggerOptions

        written = load(deepspeed_config).get("comms_logger")
        section = written and CommsLoggerOptions.model_validate(written)
    if section is not None:
        given = {name: getattr(section, name, None) for name in SETTINGS}
        comms_logger.configure(**{**given, "path": given["path"] or None})  # "" leaves an earlier engine's file open
    comms_logger.configure(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def reset_log() -> None:
    """Clear the communication log."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Return True if the communication log is not empty."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Return the number of recorded calls."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Return the recorded operation names."""
    return comms_logger.get_operation_names()
