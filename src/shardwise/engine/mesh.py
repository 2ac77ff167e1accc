"""Mesh and domains of an engine: from the configuration, a client's DeviceMesh, and declared tensor parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.coded import coded, decoded
from shardwise.comm.domain import Arrangement, Domain, Domains
from shardwise.config.checks import not_in_groups
from shardwise.engine.asked import NAMES, RequestedParallelism, check_ranks
from shardwise.engine.zeropp import node_size
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.registry import DomainKey, part_of

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.config.schema import ZeroConfig


def domain_of(config: Config, comm: Communicator, mesh: Arrangement | None = None) -> Domain:
    """Return the domain of an engine's parameters (all ranks call); `mesh`: the client's, None: as configured."""
    zero = config.zero_optimization
    shard = int(zero.mics_shard_size)
    if mesh is not None:
        for path, reason in not_in_groups(config):
            raise ConflictError(f"{path}: cannot be combined with the mesh passed to initialize(): {reason}")
        if zero.mics_hierarchical_params_gather:
            raise ConflictError(
                "zero_optimization.mics_hierarchical_params_gather: a mesh passed to initialize() has no nodes within "
                "its groups; leave the mesh out and set zero_optimization.mics_shard_size, or switch this key off"
            )
        return Domain(comm, mesh)
    if comm.world == 1 or shard < 1:
        return Domain(comm)
    near = shard
    if zero.mics_hierarchical_params_gather:
        size = int(zero.zero_node_size) if zero.zero_node_size is not None else node_size(comm)
        near = min(size, shard)
        if shard % near:
            raise ConfigError(
                f"zero_optimization.mics_hierarchical_params_gather: groups of mics_shard_size = {shard} ranks are not "
                f"whole nodes of {near}; choose a multiple of {near}, or switch it off"
            )
    return Domain(comm, Arrangement.of_groups(comm.world, shard, near))


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


def arrangement_of(mesh: object, zero: ZeroConfig, members: Sequence[int]) -> Arrangement | None:
    """Return the arrangement of a DeviceMesh with the dimensions (shard) or (replicate, shard), as for `fully_shard`.
    None for one dimension, over which all state is sharded. `members`: the engine's ranks, as numbered by the mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            "initialize(mesh_param=...) expects a torch.distributed.device_mesh.DeviceMesh, or a pair of numbers "
            "(ranks with data of their own, ranks that share a sequence), or three (and ranks that have a copy of the "
            f"model), got {type(mesh).__name__} {mesh!r}"
        )
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or ("replicate", "shard")[2 - ranks.ndim :] if ranks.ndim <= 2 else mesh.mesh_dim_names
    what = f"initialize(mesh_param=...): a mesh of {dict(zip(names or (), ranks.shape, strict=False))}"
    found = {kind: [n for n in names or () if n in NAMES[kind]] for kind in ("replicate", "shard")}
    if ranks.ndim > 2 or sum(map(len, found.values())) != ranks.ndim or max(map(len, found.values())) > 1:
        raise UsageError(
            f"{what} is not supported: it may have a dimension named replicate (or {', '.join(NAMES['replicate'][1:])}"
            f") and one named shard (or {', '.join(NAMES['shard'][1:])}), as HSDP has"
        )
    check_ranks(what, ranks.flatten().tolist(), members)
    if ranks.ndim == 1:
        grid = ranks.view(1, -1) if found["shard"] else ranks.view(-1, 1)
    else:
        grid = ranks if names is not None and names[0] in NAMES["replicate"] else ranks.T
    own = {rank: number for number, rank in enumerate(members)}
    grid = torch.tensor([[own[rank] for rank in row] for row in grid.tolist()], device="cpu")
    if any(bool((grid.diff(dim=dim) < 0).any()) for dim in (0, 1)):
        raise UsageError(f"{what}: ranks must ascend along each of its dimensions, found {ranks.tolist()}")
    _check_size(what, grid.shape[1], zero)
    return None if grid.shape[0] == 1 else Arrangement.of([[row] for row in grid.tolist()])


def replicas_of(asked: RequestedParallelism, zero: ZeroConfig, world: int) -> Arrangement | None:
    """Return the HSDP arrangement of a parsed mesh (`shardwise.engine.asked`); None without replicas."""
    if asked.replicas == 1:
        return None
    _check_size(asked.where, world // asked.replicas, zero)
    return Arrangement.of_groups(world, world // asked.replicas)


def _check_size(what: str, ranks: int, zero: ZeroConfig) -> None:
    size = int(zero.mics_shard_size)
    if 0 < size != ranks:
        raise UsageError(
            f"{what} divides parameters over {ranks} ranks, zero_optimization.mics_shard_size over {size}; remove one "
            "of them"
        )
