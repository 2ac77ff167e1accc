"""Start and end of `torch.distributed` for this process, under any launcher or none.

Invariant: the only process-wide changes are torch's default process group, its end with the process, and, for jobs on
one machine, the variable that keeps Gloo on the loopback interface. An existing process group is adopted; one of Gloo
ends with the process, too.

Because, with torch 2.13, a process that ends while threads of a Gloo group run may abort after all of its work, groups
are destroyed at exit; `groups.forget` releases other references to them. A process that raises exits at once: with a
collective in flight it would wait for its peers, and they for it, until the limit for a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise.comm.desync import publish_end
from shardwise.comm.environment import LOOPBACK, TORCH_LAYOUT, RankPlace, discover, from_scheduler
from shardwise.comm.groups import forget, made_well
from shardwise.comm.rendezvous import join, meet, private_keys
from shardwise.device.choice import device_index
from shardwise.errors import LaunchError

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=10)
_OVERLAP = 12030  # CUDA from which kernels of different communicators may overlap though they are launched in order
TIMEOUT_VARIABLES = ("SHARDWISE_TIMEOUT", "DEEPSPEED_TIMEOUT")

_log = logging.getLogger("shardwise")
_started = False  # the process group was started here, not by the script


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group, or adopt the existing one.

    Without a launcher the process becomes rank 0 of 1, and no port is opened. The order of arguments is that of
    DeepSpeed's function of the same name.

    Args:
        dist_backend: torch's name of the backend; None: "nccl" if CUDA is available, else "gloo".
        auto_mpi_discovery: also read the variables of MPI and Slurm when those of torchrun are not set.
        distributed_port: port of the rendezvous where the launcher names none.
        verbose: log one line on rank 0 (logger "shardwise", level INFO).
        timeout: limit for one collective; None: SHARDWISE_TIMEOUT or DEEPSPEED_TIMEOUT (minutes), else 10 min.
        init_method: a torch URL ("env://", "tcp://host:port", "file:///path") instead of the launcher's address.
        dist_init_required: False refuses to start a process group; None and True start one if there is none.
        config: has no effect: the communication log that it may enable begins with `initialize`.
        rank: of this process, if no launcher has started it; together with `world_size`.
        world_size: number of processes.

    Raises:
        LaunchError: the place of this process is unclear or contradictory, the backend is missing, or the port is
            taken.

    Example:
        >>> init_distributed(dist_backend="gloo")
        >>> dist.get_world_size()
        1
        >>> destroy()
    """
    del config
    _order_launches()
    if (rank < 0) != (world_size < 0):
        raise LaunchError(f"rank={rank} and world_size={world_size}: give both or neither.")
    if is_initialized():
        _check_adopted(rank, world_size)
        _at_exit()
        return
    if dist_init_required is False:
        raise LaunchError(
            "dist_init_required=False, but there is no process group. Call "
            "torch.distributed.init_process_group or shardwise.init_distributed() first, or leave "
            "dist_init_required out."
        )
    timeout = timeout_from_environment() if timeout is None else timeout
    place = _place(rank, world_size, auto_mpi_discovery, init_method)
    backend = _backend(dist_backend, place)
    if place.single_machine:
        _keep_gloo_on_loopback()
    store: dist.Store
    if init_method in (None, "env://"):
        store = join(place, place.master_port or distributed_port, timeout)
    else:
        store = private_keys(next(rendezvous(init_method, place.rank, place.world_size, timeout=timeout))[0])
    meet(store, place.rank, range(place.world_size), timeout)
    device = None
    if "nccl" in backend:
        if torch.cuda.device_count() == 1:
            _check_own_device(dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), place)
        device = _take_own_device(place)

    def start(attempt: int) -> dist.ProcessGroup:
        own = dist.PrefixStore(f"attempt{attempt}", store)
        dist.init_process_group(
            backend, store=own, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=device
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    made_well(start, store, range(place.world_size), "default")
    global _started
    _started = True
    _at_exit()
    if verbose and place.rank == 0:
        ranks = f"{place.world_size} rank{'s' * (place.world_size > 1)}"
        _log.info("%s on %s, found through %s", ranks, backend, place.source)


def is_initialized() -> bool:
    """Return True if this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def local_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's number on its machine, which is the index of its device.

    In a script that starts processes without a launcher the number is LOCAL_RANK, or else the rank, as on one machine.

    Raises:
        LaunchError: the place of this process is unclear or contradictory.
    """
    if not is_initialized() or env.get("RANK") or env.get("WORLD_SIZE"):
        return discover(env).local_rank
    # LOCAL_RANK may be set without RANK and WORLD_SIZE; where the ranks have met no longer matters.
    found = {name: value for name, value in env.items() if value and name not in TORCH_LAYOUT}
    place = from_scheduler({**found, "MASTER_ADDR": LOOPBACK})
    if place is not None:
        return place.local_rank
    given = env.get("LOCAL_RANK") or str(dist.get_rank())
    if not given.isdecimal():
        raise LaunchError(f"LOCAL_RANK={given!r} is not a number from 0 up.")
    return int(given)


def destroy() -> None:
    """End the default process group and all others, if any. Every rank should call it."""
    if is_initialized():
        dist.destroy_process_group()


@functools.cache
def _at_exit() -> None:
    atexit.register(_end_with_process)


def _end_with_process() -> None:
    forget()
    if not is_initialized():
        return
    if dist.get_world_size() > 1:
        publish_end()
        # The interpreter keeps an uncaught exception here.
        if getattr(sys, "last_value", None) is not None:
            # The traceback is printed. Collectives in flight can only end if the peers see this process gone.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    if _started or dist.get_backend() == "gloo":
        destroy()


def timeout_from_environment(env: Mapping[str, str] = os.environ) -> timedelta:
    """Return the limit for one collective: SHARDWISE_TIMEOUT, else DEEPSPEED_TIMEOUT, in minutes, else ten minutes.

    Raises:
        LaunchError: the variable does not hold a positive number.

    >>> timeout_from_environment({"DEEPSPEED_TIMEOUT": "30"})
    datetime.timedelta(seconds=1800)
    """
    name = next((name for name in TIMEOUT_VARIABLES if env.get(name)), None)
    if name is None:
        return DEFAULT_TIMEOUT
    try:
        limit = timedelta(minutes=float(env[name]))
    except (ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise LaunchError(f"{name}={env[name]!r} is not a positive number of minutes.")
    return limit


def _place(rank: int, world_size: int, schedulers: bool, init_method: str | None) -> RankPlace:
    env = dict(os.environ)
    if rank >= 0:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
            if env.get(name, "") not in ("", str(value)):
                raise LaunchError(
                    f"{name.lower()}={value} was given, but {name}={env[name]} is set in the environment. "
                    "Leave the argument out, or unset the variable."
                )
            env[name] = str(value)
    if init_method is None or init_method == "env://":
        return discover(env, schedulers=schedulers)
    if not env.get("RANK") or not env.get("WORLD_SIZE"):
        raise LaunchError(
            f"init_method={init_method!r} says where the ranks meet, but not which rank this is: give rank= "
            "and world_size=, or set RANK and WORLD_SIZE."
        )
    # Only the address is the URL's; a path (file:///...) may lie on a disk that several machines share.
    host = urlsplit(init_method).hostname or socket.gethostname()
    env["MASTER_ADDR"], env["MASTER_PORT"] = host, str(DEFAULT_PORT)
    env.setdefault("LOCAL_RANK", env["RANK"])
    return discover(env)


def _backend(requested: str | None, place: RankPlace) -> str:
    if requested is None:
        if not torch.cuda.is_available():
            return "gloo"
        if device_index(place.local_rank) >= torch.cuda.device_count():
            raise LaunchError(
                f"Rank {place.rank} is process {place.local_rank} of its machine, which has "
                f"{torch.cuda.device_count()} CUDA devices: NCCL needs one per process. Start fewer "
                "processes, or "
                'pass dist_backend="gloo".'
            )
        return "nccl"
    for name in (part.rpartition(":")[2] for part in requested.split(",")):
        if not dist.is_backend_available(name):
            raise LaunchError(
                f"dist_backend={requested!r}: this build of torch ({torch.__version__}) has no backend {name!r}. "
                'Leave dist_backend out to take "nccl" on CUDA and "gloo" elsewhere.'
            )
    return requested


def _order_launches() -> None:
    """Make NCCL run kernels of several communicators in the order of the host's launches (from NCCL 2.26).

    Because ranks may interleave all-gathers and reduce-scatters differently, and kernels that hold all channels of the
    device would wait for each other.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None or "NCCL_LAUNCH_ORDER_IMPLICIT" in os.environ:
        return
    if ordered_kernels_overlap():
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    else:
        _log.warning(
            "torch's CUDA (%s) or the driver's is older than 12.3: NCCL could run ordered collectives of different "
            "groups only one after the other. NCCL_LAUNCH_ORDER_IMPLICIT is not set, and pipelines launch no receive "
            "ahead. Update the driver",
            torch.version.cuda,
        )


@functools.cache
def ordered_kernels_overlap() -> bool:
    """Return True if kernels that NCCL launches in order may overlap: torch's CUDA and the driver's are from 12.3."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    driver = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    return min(1000 * int(major) + 10 * int(minor), driver.value) >= _OVERLAP


def _take_own_device(place: RankPlace) -> torch.device | None:
    """Make this rank's device the current one, and return it; None: the script has chosen another than device 0.

    Because the first CUDA tensor of every rank, and torch's barrier, would use device 0.
    """
    if not torch.cuda.is_available():
        return None
    index = device_index(place.local_rank)
    if torch.cuda.is_initialized() and torch.cuda.current_device() not in (0, index):
        return None
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_own_device(store: dist.Store, place: RankPlace) -> None:
    """Refuse a process if its only visible CUDA device belongs to another process of the job."""
    device = torch.cuda.get_device_properties(0)
    # Not a count: a script may end its process group and start another, on a store that goes on.
    owner = store.compare_set(f"device/{socket.gethostname()}/{device.uuid}", "", str(place.rank)).decode()
    if owner != str(place.rank):
        raise LaunchError(
            f"Rank {place.rank} is process {place.local_rank} of its machine and sees one CUDA device ({device.name}, "
            f"{device.uuid}), which rank {owner} has taken: NCCL needs one per process. Start fewer processes, make "
            'more devices visible (CUDA_VISIBLE_DEVICES), or pass dist_backend="gloo".'
        )


def _keep_gloo_on_loopback() -> None:
    """Keep Gloo off the interface of the host's name, which the network can reach."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _check_adopted(rank: int, world_size: int) -> None:
    if rank >= 0 and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise LaunchError(
            f"rank={rank} and world_size={world_size} were given, but this process already is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}. Leave the arguments out to use the existing "
            "process group."
        )
