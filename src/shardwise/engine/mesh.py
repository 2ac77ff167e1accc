"""Mesh of an engine: groups of ranks and domains, from the configuration, a client's DeviceMesh or an `mpu`.

    8 ranks, tensor parallelism of 2, sequence parallelism of 2
    tensor     [0 1][2 3][4 5][6 7]    each has a shard of every tensor-parallel matrix
    sequence   [0 2][1 3][4 6][5 7]    each has a range of the same sequences' tokens
    data       [0 4][1 5][2 6][3 7]    each gets different samples

Ranks that exchange most are consecutive. State is sharded over all ranks that have the same parameter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint.places import LAYERS, SAMPLES
from shardwise.comm.coded import coded, decoded
from shardwise.comm.communicator import members_of
from shardwise.comm.compression import BlockCode, Compressor, Feedback, Hops, QuantizedReduction
from shardwise.comm.compression.registry import build
from shardwise.comm.domain import REPLICATE, Arrangement, Domain, Domains, dimension_names
from shardwise.comm.environment import discover
from shardwise.comm.machines import by_machine, groups_of, split_by, topology
from shardwise.comm.rendezvous import own_address
from shardwise.comm.replicas import Replicas
from shardwise.config.checks import excluded
from shardwise.errors import ConfigError, ConflictError, LaunchError, NotBuiltError, UsageError
from shardwise.parallel.sequence import SequenceGroup, across
from shardwise.parallel.tensor.dtensors import line_of
from shardwise.parallel.tensor.entry import divided_over
from shardwise.registry import DomainKey, part_of
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config

_NAMES = {
    "replicate": ("replicate", "dp_replicate", "ddp", "hsdp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "hsdp_shard", "dp", "data", "data_parallel"),
    "sequence": ("sp", "seq", "sequence", "ulysses", "sequence_parallel"),
    "tensor": ("tp", "tensor", "model", "mp", "tensor_parallel", "model_parallel"),
}
"""Accepted names of mesh dimensions, by kind, from the outermost to the innermost."""

_STAGES = ("pp", "pipe", "pipeline", "pipeline_parallel")
"""Accepted names of the dimension of pipeline ranks, which is outside of all others."""

_MPU = "initialize(mpu=...)"


def local_ranks(world: int) -> int:
    """Return the number of ranks on this machine, from the launcher's variables; `world` if they do not have it."""
    try:
        place = discover(os.environ)
    except LaunchError:  # the script has created the process group
        return world
    return (place.local_world_size if place.world_size == world else None) or world


@dataclass(frozen=True)
class RankGrid:
    """Groups of each mesh dimension, by ranks in the job.

    >>> RankGrid.of(4, tensor=2).data
    [[0, 2], [1, 3]]
    """

    tensor: list[list[int]]
    sequence: list[list[int]]
    data: list[list[int]]

    @classmethod
    def of(cls, world: int, *, tensor: int = 1, sequence: int = 1) -> RankGrid:
        """Return the grid of `world` consecutive ranks from the sizes, which divide it."""
        share = tensor * sequence
        starts = range(0, world, share)
        return cls(
            [list(range(first, first + tensor)) for first in range(0, world, tensor)],
            [list(range(start + place, start + share, tensor)) for start in starts for place in range(tensor)],
            [list(range(place, world, share)) for place in range(share)],
        )


@dataclass(frozen=True)
class RequestedParallelism:
    """Parallelism requested by arguments of `initialize`; None: as configured.

    Attributes:
        where: source of the request, for messages.
        size, tensor: ranks of a sequence-parallel group, and of a tensor-parallel group.
        stages: ranks of a pipeline. Other ranks here are then those of the first stage.
        lines: sequence-parallel groups, by ranks in the job; None: consecutive ranks.
        own, own_tensor: global ranks of this rank's groups, if the caller has made them.
        arrangement: HSDP groups of a mesh; None without replicas.
        shard: ranks over which a mesh shards state.
    """

    where: str = ""
    size: int | None = None
    tensor: int | None = None
    lines: list[list[int]] | None = None
    own: list[int] | None = None
    group: SequenceGroup | None = None
    own_tensor: list[int] | None = None
    arrangement: Arrangement | None = None
    shard: int | None = None
    stages: int | None = None


def requested_by(mpu: Any, mesh: Any, model: nn.Module, members: Sequence[int]) -> RequestedParallelism:
    """Return the parallelism that arguments of `initialize` and the model's DTensors or layers request.
    `mesh`: a DeviceMesh, or sizes (data, sequence) or (data, sequence, tensor). `members`: global ranks of the engine.
    """
    found = RequestedParallelism() if mesh is None else _of_mesh(mesh, members)
    if found.size is None and found.tensor is None:
        found = _of_mpu(mpu, found)
    line, group = line_of(model), divided_over(model)
    if line is not None:
        where, size = "a model of DTensors", len(line)
    elif group is not None:
        where, size = "a model that has been divided", group.size
    else:
        return found
    if found.tensor not in (None, size):
        raise ConflictError(
            f"{found.where} says that {found.tensor} ranks have a copy of the model, and the model is divided over "
            f"{size}; pass the mesh that it was divided with"
        )
    where = where if found.size is None and found.tensor is None else found.where
    return replace(found, where=where, tensor=size, own_tensor=line or found.own_tensor)


# -- a mesh ------------------------------------------------------------------------------------------------------------


def _of_mesh(mesh: Any, members: Sequence[int]) -> RequestedParallelism:
    if isinstance(mesh, (tuple, list)):
        return _of_numbers(mesh, len(members))
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            "initialize(mesh=...) expects a torch.distributed.device_mesh.DeviceMesh, or a pair of numbers "
            "(ranks with data of their own, ranks that share a sequence), or three (and ranks that have a copy of the "
            f"model), got {type(mesh).__name__} {mesh!r}"
        )
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or ("replicate", "shard")[max(0, 2 - ranks.ndim) :]
    where = f"initialize(mesh=...): a mesh of {dict(zip(names, ranks.shape, strict=False))}"
    place = next((place for place, name in enumerate(names) if name in _STAGES), None)
    if place is None:
        return _of_ranks(mesh, ranks, names, where, members)
    stages, others = ranks.shape[place], [name for name in names if name != names[place]]
    if ranks.movedim(place, 0).flatten().tolist() != list(members):
        sizes = [stages, *(size for dim, size in enumerate(ranks.shape) if dim != place)]
        raise UsageError(
            f"{where} has ranks {ranks.tolist()}, and the engine {list(members)}: the ranks of a pipeline stage are "
            f"adjacent. {_would_do(mesh, [names[place], *others], sizes)}"
        )
    first = list(members)[: len(members) // stages]
    found = RequestedParallelism(where)
    if others:
        found = _of_ranks(mesh, ranks.select(place, 0), others, where, first)
    return replace(found, stages=stages)


def _of_ranks(
    mesh: DeviceMesh, ranks: torch.Tensor, names: Sequence[str], where: str, members: Sequence[int]
) -> RequestedParallelism:
    kinds = [next((kind for kind, known in _NAMES.items() if name in known), "") for name in names]
    if "" in kinds or len(set(kinds)) < ranks.ndim:
        raise UsageError(
            f"{where} is not supported: it may have one dimension each of pipeline ({', '.join(_STAGES)}), "
            + ", ".join(f"{kind} ({', '.join(known)})" for kind, known in _NAMES.items())
        )
    sizes = [ranks.shape[kinds.index(kind)] if kind in kinds else 1 for kind in _NAMES]
    replicas, _, sequence, tensor = sizes
    order = [kinds.index(kind) for kind in _NAMES if kind in kinds]
    flat = ranks.permute(order).flatten().tolist()
    if kinds == ["tensor"] and tensor < len(members):
        _check_slice(mesh, where, flat, members)
        return RequestedParallelism(where, tensor=tensor)
    if sorted(flat) != sorted(members):
        raise UsageError(f"{where} has ranks {flat}; the engine has ranks {list(members)}, each once")
    numbers = {rank: number for number, rank in enumerate(members)}
    grid = torch.tensor([numbers[rank] for rank in flat], device="cpu").view(sizes)
    if "tensor" in kinds or {"replicate", "sequence"} <= set(kinds):
        if flat != list(members):
            raise UsageError(
                f"{where}: its ranks {ranks.tolist()} lie otherwise than they have to: the ranks of a copy of the "
                "model are neighbours, then those that share a sequence, then the others. "
                + _would_do(mesh, [names[place] for place in order], [ranks.shape[place] for place in order])
            )
    elif any(bool((grid.diff(dim=dim) < 0).any()) for dim in ([2] if "sequence" in kinds else [0, 1])):
        raise UsageError(f"{where}: ranks must ascend along each of its dimensions, found {ranks.tolist()}")
    arrangement = None if replicas == 1 else Arrangement.of([[row] for row in grid.flatten(1).tolist()])
    others = {"sequence", "tensor"} & set(kinds)
    return RequestedParallelism(
        where,
        sequence if others else None,
        tensor if "tensor" in kinds else None,
        grid.view(-1, sequence).tolist() if others == {"sequence"} else None,
        arrangement=arrangement,
        shard=None if others and replicas == 1 else len(members) // replicas,
    )


def _of_numbers(mesh: Sequence[Any], world: int) -> RequestedParallelism:
    where = f"initialize(mesh={tuple(mesh)!r})"
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in mesh)
    if len(mesh) not in (2, 3) or not whole:
        raise UsageError(
            f"{where}: expected two numbers, ranks with data of their own and ranks that share a sequence, or a third: "
            "ranks that have a copy of the model among them"
        )
    if math.prod(mesh) != world:
        raise ConflictError(f"{where}: {' x '.join(map(str, mesh))} ranks, but the number of ranks is {world}")
    return RequestedParallelism(where, mesh[1], mesh[2] if len(mesh) == 3 else None)


def _check_slice(mesh: DeviceMesh, where: str, ranks: Sequence[int], members: Sequence[int]) -> None:
    """Raise a UsageError unless the ranks of a tensor-parallel dimension, taken from a larger mesh, are consecutive."""
    world, tensor = len(members), len(ranks)
    if not any(list(ranks) == list(members[first : first + tensor]) for first in range(0, world, tensor)):
        raise UsageError(
            f"{where} has ranks {list(ranks)} of {world}, which have to be neighbours, from a multiple of {tensor} on. "
            f"{_would_do(mesh, ['dp', 'tp'], [max(1, world // tensor), tensor])}"
        )


def _would_do(mesh: DeviceMesh, names: Sequence[str], sizes: Sequence[int]) -> str:
    return f"This would do: init_device_mesh({mesh.device_type!r}, {tuple(sizes)}, mesh_dim_names={tuple(names)})"


# -- a model-parallel unit ---------------------------------------------------------------------------------------------

_MODEL_PARALLEL = ("tensor_model_parallel", "slice_parallel", "model_parallel")
"""Names of the tensor-parallel group in an mpu's methods; the first existing one is used."""

_PIPELINE = ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size")


def _of_mpu(mpu: Any, mesh: RequestedParallelism) -> RequestedParallelism:
    sequence, tensor = _sequence_size(mpu), model_parallel_size(mpu)
    if sequence > 1 and tensor > 1:
        raise NotBuiltError(
            f"{_MPU}: ranks share sequences ({sequence}) and a copy of the model ({tensor}), which an mpu cannot say "
            "here. Pass a mesh with the dimensions dp, sp and tp as mesh"
        )
    if tensor > 1:
        return replace(mesh, where=_MPU, tensor=tensor, own_tensor=members_of(_of_unit(mpu, "group")()))
    if sequence == 1:
        return mesh
    group = mpu if isinstance(mpu, SequenceGroup) else None
    own = members_of(mpu.get_sequence_parallel_group()) if group is None else group.members
    return replace(mesh, where=_MPU, size=sequence, own=own, group=group)


def model_parallel_size(mpu: Any) -> int:
    """Return the number of ranks of an mpu's tensor-parallel group; a NotBuiltError for pipeline stages."""
    for name in _PIPELINE if mpu is not None else ():
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            raise NotBuiltError(
                f"{_MPU}: mpu.{name}() is {size}: the stages of a unit are not taken over. Pass a "
                "shardwise.pipe.PipelineModule, whose stages the engine places itself, and no mpu"
            )
    size = int(_of_unit(mpu, "world_size", lambda: 1)())
    if size > 1 and not all(map(callable, (_of_unit(mpu, "group"), getattr(mpu, "get_data_parallel_group", None)))):
        raise UsageError(
            f"{_MPU}: {size} ranks have a copy of the model, and the unit does not say which: it needs "
            "get_tensor_model_parallel_group() (or get_model_parallel_group()) and get_data_parallel_group()"
        )
    return size


def _of_unit(mpu: Any, what: str, default: Any = None) -> Any:
    methods = [f"get_{name}_{what}" for name in _MODEL_PARALLEL]
    return next((getattr(mpu, method) for method in methods if hasattr(mpu, method)), default)


def _sequence_size(mpu: Any) -> int:
    return int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())


def group_of(mpu: Any) -> Any:
    """Return the process group of all ranks of an mpu; None: the default group."""
    if mpu is None or model_parallel_size(mpu) > 1:
        return None
    if _sequence_size(mpu) > 1 or not hasattr(mpu, "get_data_parallel_group"):
        return getattr(mpu, "get_sequence_data_parallel_group", lambda: None)()
    return mpu.get_data_parallel_group()


# -- the groups --------------------------------------------------------------------------------------------------------


def grid_of(job: Communicator, sequence: int, tensor: int, requested: RequestedParallelism, mpu: Any) -> RankGrid:
    """Return the groups of each mesh dimension: those that a caller has made, otherwise consecutive ranks (all ranks
    call).
    """
    where, grid = requested.where, RankGrid.of(job.world, tensor=tensor, sequence=sequence)
    alone = [[rank] for rank in range(job.world)]
    if tensor > 1 and requested.own_tensor is not None:
        copies = _tensor_lines(job, requested.own_tensor, where, mpu)
        if copies != grid.tensor:
            if sequence > 1:
                raise UsageError(
                    f"{where}: the ranks that have a copy of the model among them are {copies}; with sequences that "
                    f"{sequence} ranks share (sequence_parallel_size) they have to be neighbours: {grid.tensor}"
                )
            return RankGrid(copies, alone, across(copies))
    lines = requested.lines
    if sequence > 1 and requested.own is not None:
        lines = _exchanged_lines(job, requested.own, where, "share sequences")
    if sequence == 1 or lines is None:
        return grid
    if tensor == 1:
        return RankGrid(alone, lines, across(lines))
    if sorted(lines) != sorted(grid.sequence):
        raise UsageError(
            f"{where}: the ranks that share sequences are {lines}; with {tensor} ranks to a copy of the model, "
            f"which are neighbours, they have to be {grid.sequence}"
        )
    return grid


def mesh_place(grid: RankGrid, rank: int, stage: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Return coordinate and size of each dimension of the mesh at a rank of a pass group; `stage` is that of layers."""
    lines = {SAMPLES: grid.data, "sequence": grid.sequence, "tensor": grid.tensor}
    found = {LAYERS: stage}
    for name, groups in lines.items():
        own = next(list(line) for line in groups if rank in line)
        found[name] = own.index(rank), len(own)
    return found


def _tensor_lines(job: Communicator, own: Sequence[int], where: str, mpu: Any) -> list[list[int]]:
    lines = _exchanged_lines(job, own, where, "have a copy of the model among them")
    if any(line != sorted(line) for line in lines):
        raise UsageError(f"{where}: ranks of a copy of the model must ascend, found {lines}")
    if where == _MPU:
        place = next(line for line in lines if job.rank in line).index(job.rank)
        column, data = [job.members[line[place]] for line in lines], members_of(mpu.get_data_parallel_group())
        if column != data:
            raise UsageError(
                f"{_MPU}: get_data_parallel_group() has ranks {data} here, and the ranks at this place of all copies "
                f"of the model are {column}, by the groups that all ranks name: expected {job.world} ranks to be "
                "model-parallel groups x data-parallel groups (without further dimensions, such as context)"
            )
    return lines


def _exchanged_lines(job: Communicator, own: Sequence[int], where: str, what: str) -> list[list[int]]:
    """Exchange each rank's group `own` (global ranks); return all groups by ranks in the job, ordered by first rank."""
    numbers = {rank: number for number, rank in enumerate(job.members)}
    given = job.exchange(coded([numbers.get(rank, -1) for rank in own]), "groups_of_ranks")
    lines = sorted(decoded(code) for code in {repr(code): code for code in given}.values())
    if sorted(rank for line in lines for rank in line) != list(range(job.world)) or len({*map(len, lines)}) != 1:
        raise UsageError(
            f"{where}: the ranks that {what} are {lines} by what all ranks say; expected groups of one size that have "
            f"each of {job.world} ranks once"
        )
    return lines


# -- domains -----------------------------------------------------------------------------------------------------------


def domain_of(config: Config, comm: Communicator, requested: RequestedParallelism | None = None) -> Domain:
    """Return the domain of an engine's parameters (all ranks call)."""
    zero = config.zero_optimization
    shard = int(zero.mics_shard_size)
    if requested is not None and requested.arrangement is not None:
        for path, reason in excluded("groups", config):
            raise ConflictError(f"{path}: cannot be combined with the mesh passed to initialize(): {reason}")
        if zero.mics_hierarchical_params_gather:
            raise ConflictError(
                "zero_optimization.mics_hierarchical_params_gather: a mesh passed to initialize() has no nodes within "
                "its groups; leave the mesh out and set zero_optimization.mics_shard_size, or switch this key off"
            )
        return Domain(comm, requested.arrangement)
    if comm.world == 1 or shard < 1:
        return Domain(comm)
    near = shard
    if zero.mics_hierarchical_params_gather:
        near = min(_configured_node_size(config, comm, "zero_optimization.mics_hierarchical_params_gather"), shard)
        if shard % near:
            raise ConfigError(
                f"zero_optimization.mics_hierarchical_params_gather: groups of mics_shard_size = {shard} ranks are not "
                f"whole nodes of {near}; choose a multiple of {near}, or switch it off"
            )
    groups = groups_of(comm.nodes(), shard)
    split = split_by(comm.nodes(), groups)
    if split:
        warn_once(
            f"zero_optimization.mics_shard_size is {shard}, and {split}: gathers of such groups cross machines. Choose "
            "a divisor of the ranks of each machine, or whole machines"
        )
    return Domain(comm, Arrangement.of_groups(groups, near))


def log_machines(job: Communicator, whole: Communicator, grid: RankGrid, domain: Domain, secondary: int) -> None:
    """Log the machines of a job of several, and where the groups of each mesh dimension lie (all ranks call).

    Warns of groups that share a tensor or a sequence and have parts of machines. `secondary`: ranks of hpZ's groups.
    """
    if len(set(job.nodes())) == 1:
        return
    name = "GLOO_SOCKET_IFNAME" if job.waits_on_host else "NCCL_SOCKET_IFNAME"
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else job.device.type
    facts = job.exchange([os.environ.get(name, "") or own_address(), device], "machines")
    if job.rank > 0:
        return
    nodes = whole.nodes()
    lines = {name: domain.arrangement.lines(number) for number, name in enumerate(dimension_names(domain.names))}
    if secondary > 1:
        lines["secondary"] = groups_of(nodes, secondary)
    for name, groups in (("tensor", grid.tensor), ("sequence", grid.sequence)):
        if len(groups[0]) > 1:
            lines[name] = groups
            if split := split_by(nodes, groups):
                warn_once(
                    f"groups of {len(groups[0])} ranks that share a {name}: {split}. Exchanges of every layer cross "
                    "machines. Number ranks machine by machine (srun --distribution=block, mpirun --map-by slot), and "
                    "choose a size that divides the ranks of each"
                )
    numbers = {member: number for number, member in enumerate(job.members)}
    own = [numbers[member] for member in whole.members]
    lines = {name: [[own[rank] for rank in group] for group in groups] for name, groups in lines.items()}
    logger.info("%d machines\n%s", len(set(job.nodes())), topology(job.nodes(), facts, lines))


def replicas_of(config: Config, job: Communicator, grid: Arrangement | None) -> Replicas | None:
    """Return the replicas that step on their own (`local_sgd`), or None (all ranks call); `grid`: that of a mesh."""
    local = config.local_sgd
    if not local.enabled:
        return None
    if grid is not None and local.replica_size is not None and job.world // _replicate(grid) != local.replica_size:
        raise ConflictError(
            f"local_sgd.replica_size: is {local.replica_size}, and the mesh passed to initialize() has replicas of "
            f"{job.world // _replicate(grid)} ranks. Remove the key"
        )
    if grid is None:
        size = local.replica_size or _configured_node_size(config, job, "local_sgd.replica_size")
        groups = groups_of(job.nodes(), size)
        split = split_by(job.nodes(), groups)
        if split:
            warn_once(f"local_sgd.replica_size is {size}, and {split}: each step of such replicas crosses machines")
        grid = Arrangement.of_groups([sorted(group) for group in groups])
    replicas = Replicas.of(job, grid)
    if replicas.count == 1 and job.world > 1 and job.rank == 0:
        warn_once(
            f"local_sgd: all {job.world} ranks are one replica, which averages with no other. Set "
            "local_sgd.replica_size, or pass a mesh with a dimension named replicate to initialize()"
        )
    return replicas


def _replicate(grid: Arrangement) -> int:
    return grid.sizes[-1] if grid.names[-1] == REPLICATE else 1


def check_shard_size(config: Config, requested: RequestedParallelism) -> None:
    """Raise a UsageError if configuration and mesh shard state over different numbers of ranks."""
    size = int(config.zero_optimization.mics_shard_size)
    if requested.shard is not None and 0 < size != requested.shard:
        raise UsageError(
            f"initialize(mesh=...) divides parameters over {requested.shard} ranks, "
            f"zero_optimization.mics_shard_size over {size}; remove one of them"
        )


def domains_of(model: nn.Module, domain: Domain) -> Domains:
    """Return the domains of all parameters, including parameters shared by some ranks only (all ranks call)."""
    comm = domain.ranks
    keys: dict[DomainKey, None] = {}
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        members = part.ranks
        if members is None:
            continue
        if comm.imagined and members[-1] >= comm.world:
            raise ConfigError(
                f"parameter {name!r} is declared as a part of ranks {list(members)}, of {comm.world} ranks"
            )
        if members[-1] >= comm.world or (comm.rank not in members and not comm.imagined):
            raise UsageError(
                f"parameter {name!r} is declared as a part of ranks {list(members)}, of {comm.world} "
                f"ranks, by rank {comm.rank}. Each rank declares those that have the same part as itself, itself among "
                "them"
            )
        keys[members, part.divisor] = None
    told = comm.exchange([coded(members) for members, _ in keys], "domains")
    if len({len(found) for found in told}) > 1:
        raise UsageError(
            f"ranks have declared parts of different numbers of groups of ranks: {[len(found) for found in told]}. All "
            "ranks declare parameters of the same layers"
        )
    found: dict[DomainKey, Domain] = {}
    groups: dict[tuple[tuple[int, ...], ...], Communicator] = {}
    for number, (members, divisor) in enumerate(keys):
        codes = {repr(rank[number]): rank[number] for rank in told}
        lines = tuple(sorted(tuple(decoded(code)) for code in codes.values()))
        if not comm.imagined and sorted(rank for line in lines for rank in line) != list(range(comm.world)):
            raise UsageError(
                f"declared parts: the ranks that share one are {[list(line) for line in lines]} by the declarations of "
                f"all ranks, which should have each of {comm.world} ranks once"
            )
        if lines not in groups:
            groups[lines] = comm if len(members) == comm.world else comm.part(lines, f"part_{number}")
        prescale = comm.world / (divisor or comm.world)
        within = domain.arrangement.within(members, lines)
        found[members, divisor] = Domain(groups[lines], within, like=domain, prescale=prescale)
    return Domains(domain, found)


def reduction(config: Config, comm: Communicator, hold: Callable[[torch.Tensor], None]) -> Compressor | None:
    """Return the configured lossy gradient reduction, or None (all ranks call); `hold` counts each buffer."""
    zero = config.zero_optimization
    if not zero.zero_quantized_gradients or comm.world == 1:
        return build(config, comm, hold)
    size = _configured_node_size(config, comm)
    hops = None
    if 1 < size < comm.world:
        hops = Hops.of(comm, groups_of(comm.nodes(), size))
        hops.node.connect("reduce")
        hops.across.connect("reduce")
    loco = zero.zeropp_loco_param
    feedback = Feedback(loco.err_beta, int(loco.reset_T)) if loco is not None else None
    return QuantizedReduction(comm, BlockCode(4, hold=hold), hold, hops=hops, feedback=feedback)


def _configured_node_size(
    config: Config, comm: Communicator, wanted_by: str = "zero_optimization.zero_quantized_gradients"
) -> int:
    size = config.zero_optimization.zero_node_size
    return _node_size(comm, wanted_by) if size is None else int(size)


def _node_size(comm: Communicator, wanted_by: str) -> int:
    """Return the number of ranks of a node (all ranks call); a ConfigError unless it is the same for all nodes."""
    if comm.imagined:
        local = _local_world() or comm.world
        return comm.world if comm.world % local else local
    sizes = {node: len(ranks) for node, ranks in by_machine(comm.nodes()).items()}
    if len(set(sizes.values())) > 1:
        least, most = min(sizes, key=lambda node: sizes[node]), max(sizes, key=lambda node: sizes[node])
        raise ConfigError(
            f"{wanted_by}: machines have different numbers of ranks, {sizes[least]} on {least} and {sizes[most]} on "
            f"{most}, of {len(sizes)} machines. Start as many ranks on each machine, or set "
            "zero_optimization.zero_node_size to a size that divides the ranks of each "
            f"({math.gcd(*sizes.values())} does)"
        )
    return next(iter(sizes.values()))


def _local_world() -> int | None:
    try:
        return discover(os.environ).local_world_size
    except LaunchError:
        return None  # the script has created the process group
