"""Place of this process in the job, from the variables of its launcher.

Each launcher sets four facts (rank, number of ranks, rank on this machine, address of rank 0) under names of its own.
`discover` reads them without touching torch, the network or `os.environ`.

| source | rank, number of ranks | on this machine |
|---|---|---|
| torchrun, `shardwise run`, by hand | RANK, WORLD_SIZE | LOCAL_RANK, LOCAL_WORLD_SIZE or LOCAL_SIZE |
| Open MPI: OMPI_COMM_WORLD_... | RANK, SIZE | LOCAL_RANK, LOCAL_SIZE |
| MVAPICH: MV2_COMM_WORLD_... | RANK, SIZE | LOCAL_RANK, LOCAL_SIZE |
| Slurm: SLURM_... | PROCID, STEP_NUM_TASKS | LOCALID, STEP_TASKS_PER_NODE, NODEID |
| MPICH, Intel MPI | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS |
| no launcher | 0 of 1 | 0 of 1 |

The first row with a set rank and size counts. The rendezvous is at MASTER_ADDR and MASTER_PORT. Where a scheduler
leaves MASTER_ADDR out, the address is loopback for a job on one machine, and the first host of SLURM_STEP_NODELIST
under Slurm. Invariant: variables that do not describe one place are an error that names them; a process never becomes
rank 0 of 1 without notice.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import LaunchError

LOOPBACK = "127.0.0.1"
MEMORY_DIRECTORY = "SHARDWISE_MEMORY_DIRECTORY"
"""Variable with which `shardwise run` names a directory in memory that lives as long as the job."""
RECOVERY_FILE = "SHARDWISE_RECOVERY_FILE"
"""Variable with which `shardwise run` names a file; ranks of a restarted job write there when training continues."""
DEVICE_LIMIT = "SHARDWISE_DEVICE_LIMIT"
"""Variable that overrides `memory_limits.device`: most bytes of a rank on its device, as "2GiB"."""
CONFIG_OVERRIDE = "SHARDWISE_CONFIG_OVERRIDE"
"""Variable that names a JSON file of keys; they replace those of the configuration of each engine that trains."""
PROGRESS = "SHARDWISE_PROGRESS"
"""Variable with which `shardwise run` sets whether ranks show progress: "auto", or "off" despite the configuration."""
MACHINE = "SHARDWISE_MACHINE"
"""Variable that names the machine of a process; without it, processes that share a loopback interface share one."""


@dataclass(frozen=True)
class RankPlace:
    """Place of one process in a job.

    Attributes:
        rank: number of this process among all `world_size`, from 0.
        local_rank: number of this process on its machine, from 0; the index of its device.
        local_world_size: number of processes on this machine; None: unknown.
        master_addr: name or address of the machine of rank 0.
        master_port: TCP port of the rendezvous; None: unknown, 0: none needed.
        source: the launcher, in words.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str
    master_port: int | None
    source: str

    @property
    def single_machine(self) -> bool:
        """Whether all ranks are known to run on this machine."""
        return self.local_world_size == self.world_size


class _Scheme(NamedTuple):
    source: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


def _mpi(source: str, prefix: str) -> _Scheme:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _Scheme(source, *(f"{prefix}_COMM_WORLD_{name}" for name in names))


TORCH_LAYOUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SCHEDULERS = (
    _mpi("Open MPI", "OMPI"),
    _mpi("MVAPICH", "MV2"),
    # Only processes that srun has started have the step's variables; a batch script has SLURM_NTASKS, too.
    _Scheme("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    _Scheme("MPI (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def discover(env: Mapping[str, str] = os.environ, *, schedulers: bool = True) -> RankPlace:
    """Return this process's place from environment variables; an empty value counts as not set.

    Args:
        env: the variables.
        schedulers: also look for MPI and Slurm when the variables of torchrun are not set.

    Raises:
        LaunchError: variables are missing, are no numbers, or contradict each other.

    >>> discover({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
    ...           "MASTER_PORT": "29500"}).rank
    1
    >>> discover({}).world_size
    1
    """
    env = {name: value for name, value in env.items() if value != ""}
    place = _from_torch_layout(env) or (from_scheduler(env) if schedulers else None)
    if place is None:
        if any(name in env for name in TORCH_LAYOUT):
            _require(env, ("RANK", "WORLD_SIZE"))
        place = RankPlace(0, 1, 0, 1, LOOPBACK, 0, "no launcher")
    return place


def is_loopback(host: str) -> bool:
    """Return True if a host name or address can only mean this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("node1")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_torch_layout(env: Mapping[str, str]) -> RankPlace | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    rank, world_size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ("RANK", "WORLD_SIZE")
    _require(env, needed)
    address = env.get("MASTER_ADDR", LOOPBACK)
    port = _port(env) if "MASTER_PORT" in env else 0
    size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "LOCAL_SIZE"
    one_machine = world_size == 1 or is_loopback(address)
    local_size = _number(env, size_name) if size_name in env else (world_size if one_machine else None)
    if size_name == "LOCAL_SIZE" and local_size is not None:
        # Scripts set it to the number of devices of the machine, of which they may use some.
        local_size = min(local_size, world_size)
    own = _local_rank(env, rank, world_size, local_size, ("LOCAL_RANK", size_name, "WORLD_SIZE"), one_machine)
    source = "torchrun or shardwise run" if "TORCHELASTIC_RUN_ID" in env else "the environment"
    return RankPlace(rank, world_size, own, local_size, address, port, source)


def from_scheduler(env: Mapping[str, str]) -> RankPlace | None:
    """Return this process's place from the variables of MPI or Slurm, or None without them."""
    for scheme in _SCHEDULERS:
        if scheme.rank not in env or scheme.world_size not in env:
            continue
        rank, world_size = _rank_and_size(env, scheme.rank, scheme.world_size)
        if scheme.source == "Slurm":
            size_name, local_size = "SLURM_STEP_TASKS_PER_NODE", _slurm_local_size(env, world_size)
        else:
            size_name = scheme.local_world_size
            local_size = _number(env, size_name) if size_name in env else (1 if world_size == 1 else None)
        names = scheme.local_rank, size_name, scheme.world_size
        own = _local_rank(env, rank, world_size, local_size, names, local_size == world_size)
        address = _scheduler_master(env, scheme, local_size == world_size)
        port = _port(env) if "MASTER_PORT" in env else None
        return RankPlace(rank, world_size, own, local_size, address, port, scheme.source)
    return None


def _scheduler_master(env: Mapping[str, str], scheme: _Scheme, single_machine: bool) -> str:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if single_machine:
        return LOOPBACK
    if scheme.source == "Slurm" and "SLURM_STEP_NODELIST" in env:
        return first_slurm_host(env["SLURM_STEP_NODELIST"])
    raise LaunchError(
        f"{scheme.source} has started this process on one of several machines, but MASTER_ADDR is not set, "
        "so the ranks cannot meet. Export it on all ranks with the name of rank 0's machine (mpirun -x "
        "MASTER_ADDR=host ...)."
    )


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list in its compact form.

    >>> first_slurm_host("gpu[07-09,12],login1"), first_slurm_host("node3")
    ('gpu07', 'node3')
    """
    match = re.match(r"(?:[^,\[\]]+|\[[^\[\]]+\])+", nodelist)
    if match is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST={nodelist!r} is not a node list such as node[1-4]. Set MASTER_ADDR to the "
            "name of rank 0's machine."
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _slurm_local_size(env: Mapping[str, str], world_size: int) -> int | None:
    """Return the tasks on this node. "4(x2),3" means two nodes of four tasks and one of three."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        return 1 if world_size == 1 else None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        return counts[0]
    if "SLURM_NODEID" not in env:
        return None
    node = _number(env, "SLURM_NODEID")
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={text} names {len(counts)} nodes.")
    return counts[node]


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    _require(env, (rank_name, size_name))
    rank, size = _number(env, rank_name), _number(env, size_name)
    if size < 1:
        raise LaunchError(f"{size_name}={size}: a job has at least one process.")
    if rank >= size:
        raise LaunchError(f"{rank_name}={rank} is not below {size_name}={size}: ranks count from 0.")
    return rank, size


def _local_rank(
    env: Mapping[str, str],
    rank: int,
    world_size: int,
    local_size: int | None,
    names: tuple[str, str, str],
    one_machine: bool,
) -> int:
    """Return the rank on this machine. `names`: variables of that rank, of `local_size` and of `world_size`."""
    name, size_name, world_name = names
    if name not in env and not one_machine:
        raise LaunchError(
            f"Rank {rank} of several machines has no variable {name}, so the device of this process is unknown. Set "
            f"{', '.join(TORCH_LAYOUT)}, as torchrun does; LOCAL_RANK is the process's number on its machine."
        )
    local_rank = _number(env, name) if name in env else rank
    if local_size is not None and not 1 <= local_size <= world_size:
        raise LaunchError(f"{size_name}={local_size} does not lie between 1 and {world_name}={world_size}.")
    if local_size is not None and local_rank >= local_size:
        raise LaunchError(f"{name}={local_rank} is not below {size_name}={local_size}: ranks count from 0.")
    return local_rank


def _require(env: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        present = [f"{name}={env[name]}" for name in TORCH_LAYOUT if name in env]
        raise LaunchError(
            f"The place of this process in the job is unclear. Set: {', '.join(present)}. Not set: "
            f"{', '.join(missing)}. Start it with `shardwise run`, torchrun, srun or mpirun, or set all of "
            f"{', '.join(TORCH_LAYOUT)}; without any of them it runs alone."
        )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(f"{name}={env[name]!r} is not a number from 0 up.")
    return value


def _port(env: Mapping[str, str]) -> int:
    value = _number(env, "MASTER_PORT")
    if not 1 <= value < 2**16:
        raise LaunchError(f"MASTER_PORT={value} is not a TCP port (1 to 65535).")
    return value
