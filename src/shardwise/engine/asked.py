"""Parallelism requested by arguments: by an `mpu`, by a mesh, or by a model that is already tensor-parallel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.coded import coded, decoded
from shardwise.comm.communicator import members_of
from shardwise.errors import ConflictError, NotBuiltError, UsageError
from shardwise.parallel.sequence import SequenceGroup
from shardwise.parallel.tensor.dtensors import line_of
from shardwise.parallel.tensor.entry import divided_over

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

NAMES = {
    "replicate": ("replicate", "dp_replicate", "ddp", "hsdp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "hsdp_shard", "dp", "data", "data_parallel"),
    "sequence": ("sp", "seq", "sequence", "ulysses", "sequence_parallel"),
    "tensor": ("tp", "tensor", "model", "mp", "tensor_parallel", "model_parallel"),
}
"""Accepted names of mesh dimensions, by kind, from the outermost to the innermost."""

_MPU = "initialize(mpu=...)"


@dataclass(frozen=True)
class RequestedParallelism:
    """Parallelism requested by arguments of `initialize`; None: as configured.

    Attributes:
        size, tensor: ranks of a sequence-parallel group, and of a tensor-parallel group.
        where: source of the request, for messages.
        lines: sequence-parallel groups, by ranks in the job; None: consecutive ranks.
        own, own_tensor: global ranks of this rank's groups, if the caller has made them.
        replicas: number of HSDP replicas, from a mesh with further dimensions.
        meshed: a mesh has been read.
    """

    size: int | None
    where: str
    lines: list[list[int]] | None = None
    own: list[int] | None = None
    group: SequenceGroup | None = None
    tensor: int | None = None
    own_tensor: list[int] | None = None
    replicas: int = 1
    meshed: bool = False


def asked_by(mpu: Any, mesh: Any, model: nn.Module, members: Sequence[int]) -> RequestedParallelism | None:
    """Return the parallelism that arguments of `initialize` and the model's DTensors or layers request; None: none.
    `mesh`: a DeviceMesh, or sizes (data, sequence) or (data, sequence, tensor).
    """
    found = _of_arguments(mpu, mesh, members)
    line = line_of(model)
    what, size = "a model of DTensors", None if line is None else len(line)
    if line is None:
        group = divided_over(model)
        what, size = "a model that has been divided", None if group is None else group.size
    if size is None:
        return found
    if found is None:
        return RequestedParallelism(None, what, tensor=size, own_tensor=line)
    if found.tensor not in (None, size):
        raise ConflictError(
            f"{found.where} says that {found.tensor} ranks have a copy of the model, and the model is divided over "
            f"{size}; pass the mesh that it was divided with"
        )
    return replace(found, tensor=size, own_tensor=line or found.own_tensor)


def _of_arguments(mpu: Any, mesh: Any, members: Sequence[int]) -> RequestedParallelism | None:
    if isinstance(mesh, (tuple, list)):
        return _numbers(mesh, len(members))
    names = set(mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else set()
    if names & set(NAMES["tensor"]):
        return _of_tensor_mesh(mesh, members)
    if names & set(NAMES["sequence"]):
        return _of_mesh(mesh, members)
    size = int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())
    tensor = model_parallel_size(mpu)
    if size == 1:
        return (
            None
            if tensor == 1
            else RequestedParallelism(None, _MPU, tensor=tensor, own_tensor=model_parallel_ranks(mpu))
        )
    if tensor > 1:
        raise NotBuiltError(
            f"{_MPU}: ranks share sequences ({size}) and a copy of the model ({tensor}), which an mpu cannot say here. "
            "Pass a mesh with the dimensions dp, sp and tp as mesh_param"
        )
    if isinstance(mpu, SequenceGroup):
        return RequestedParallelism(size, _MPU, own=mpu.members, group=mpu)
    return RequestedParallelism(size, _MPU, own=members_of(mpu.get_sequence_parallel_group()))


def _numbers(mesh: Sequence[Any], world: int) -> RequestedParallelism:
    what = f"initialize(mesh_param={tuple(mesh)!r})"
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in mesh)
    if len(mesh) not in (2, 3) or not whole:
        raise UsageError(
            f"{what}: expected two numbers, ranks with data of their own and ranks that share a sequence, or a third: "
            "ranks that have a copy of the model among them"
        )
    if math.prod(mesh) != world:
        raise ConflictError(f"{what}: {' x '.join(map(str, mesh))} ranks, but there are {world}")
    return RequestedParallelism(mesh[1], what, tensor=mesh[2] if len(mesh) == 3 else None, meshed=True)


def _of_mesh(mesh: DeviceMesh, members: Sequence[int]) -> RequestedParallelism:
    names = mesh.mesh_dim_names or ()
    what = _described(mesh)
    others = [name for name in names if name not in NAMES["sequence"]]
    if len(names) > 2 or len(others) != len(names) - 1 or any(name not in NAMES["shard"] for name in others):
        raise UsageError(
            f"{what} is not supported: besides the dimension of sequences it may have one named "
            f"{' or '.join(NAMES['shard'])}. State is divided over all its ranks"
        )
    ranks = mesh.mesh.view(1, -1) if len(names) == 1 else mesh.mesh if names[1] in NAMES["sequence"] else mesh.mesh.T
    check_ranks(what, ranks.flatten().tolist(), members)
    own = {rank: number for number, rank in enumerate(members)}
    lines = [[own[rank] for rank in row] for row in ranks.tolist()]
    if any(line != sorted(line) for line in lines):
        raise UsageError(f"{what}: ranks must ascend along the dimension of sequences, found {ranks.tolist()}")
    return RequestedParallelism(ranks.shape[1], what, lines, meshed=True)


def _of_tensor_mesh(mesh: DeviceMesh, members: Sequence[int]) -> RequestedParallelism:
    """Read a mesh with a tensor-parallel dimension, which must have consecutive ranks."""
    names, what = list(mesh.mesh_dim_names or ()), _described(mesh)
    kinds = [next((kind for kind, known in NAMES.items() if name in known), None) for name in names]
    if None in kinds or len(set(kinds)) < len(kinds):
        raise UsageError(
            f"{what} is not supported: beside the dimension tp it may have one each of "
            + ", ".join(f"{kind} ({', '.join(known)})" for kind, known in NAMES.items() if kind != "tensor")
        )
    order = [kinds.index(kind) for kind in NAMES if kind in kinds]
    sizes = {kind: mesh.mesh.shape[place] for place, kind in enumerate(kinds)}
    ranks, tensor = mesh.mesh.permute(order).flatten().tolist(), sizes["tensor"]
    if len(names) == 1 and tensor < len(members):  # a slice of a larger mesh
        own = next((list(members[n : n + tensor]) for n in range(0, len(members), tensor) if ranks[0] == members[n]), 0)
        if ranks == own:
            return RequestedParallelism(None, what, tensor=tensor, meshed=True)
        raise UsageError(
            f"{what} has ranks {ranks} of {len(members)}, which have to be neighbours, from a multiple of {tensor} on. "
            f"{_would_do(mesh, ['dp', 'tp'], [max(1, len(members) // tensor), tensor])}"
        )
    check_ranks(what, ranks, members)
    if ranks != list(members):
        raise UsageError(
            f"{what}: its ranks {mesh.mesh.tolist()} lie otherwise than they have to: the ranks of a copy of the model "
            "are neighbours, then those that share a sequence, then the others. "
            + _would_do(mesh, [names[place] for place in order], [mesh.mesh.shape[place] for place in order])
        )
    return RequestedParallelism(
        sizes.get("sequence", 1), what, tensor=tensor, replicas=sizes.get("replicate", 1), meshed=True
    )


def _would_do(mesh: DeviceMesh, names: Sequence[str], sizes: Sequence[int]) -> str:
    return f"This would do: init_device_mesh({mesh.device_type!r}, {tuple(sizes)}, mesh_dim_names={tuple(names)})"


def _described(mesh: DeviceMesh) -> str:
    named = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    return f"initialize(mesh_param=...): a mesh of {named}"


def check_ranks(what: str, ranks: Sequence[int], members: Sequence[int]) -> None:
    """Raise a UsageError unless a mesh contains each of the engine's ranks once."""
    if sorted(ranks) != sorted(members):
        raise UsageError(f"{what} has ranks {list(ranks)}; the engine has ranks {list(members)}, each once")


# -- a model-parallel unit ---------------------------------------------------------------------------------------------

_MODEL_PARALLEL = ("tensor_model_parallel", "slice_parallel", "model_parallel")
"""Names of the tensor-parallel group in an mpu's methods; the first existing one is used."""

_PIPELINE = ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size")


def model_parallel_size(mpu: Any) -> int:
    """Return the number of ranks of an mpu's tensor-parallel group; a NotBuiltError for pipeline stages."""
    for name in _PIPELINE if mpu is not None else ():
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            raise NotBuiltError(
                f"{_MPU}: mpu.{name}() is {size}: this version does not have pipeline parallelism. Pass an mpu with "
                "one stage, or none; ZeRO stage 3 divides large layers over all ranks"
            )
    size = int(_asked(mpu, "world_size", lambda: 1)())
    if size > 1 and not all(map(callable, (_asked(mpu, "group"), getattr(mpu, "get_data_parallel_group", None)))):
        raise UsageError(
            f"{_MPU}: {size} ranks have a copy of the model, and the unit does not say which: it needs "
            "get_tensor_model_parallel_group() (or get_model_parallel_group()) and get_data_parallel_group()"
        )
    return size


def model_parallel_ranks(mpu: Any) -> list[int]:
    """Return the global ranks of this rank's tensor-parallel group, in order."""
    return members_of(_asked(mpu, "group")())


def _asked(mpu: Any, what: str, default: Any = None) -> Any:
    return next((getattr(mpu, f"get_{n}_{what}") for n in _MODEL_PARALLEL if hasattr(mpu, f"get_{n}_{what}")), default)


def group_of(mpu: Any) -> Any:
    """Return the process group of all ranks of an mpu; None: the default group."""
    if mpu is None or model_parallel_size(mpu) > 1:
        return None
    shared = int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()) > 1
    if shared or not hasattr(mpu, "get_data_parallel_group"):
        return getattr(mpu, "get_sequence_data_parallel_group", lambda: None)()
    return mpu.get_data_parallel_group()


# -- exchange of groups ------------------------------------------------------------------------------------------------


def told_lines(job: Communicator, own: Sequence[int], where: str, what: str) -> list[list[int]]:
    """Exchange each rank's group `own` (global ranks); return all groups by ranks in the job, ordered by first rank."""
    numbers = {rank: number for number, rank in enumerate(job.members)}
    told = job.exchange(coded([numbers.get(rank, -1) for rank in own]), "groups_of_ranks")
    lines = sorted(decoded(code) for code in {repr(code): code for code in told}.values())
    if sorted(rank for line in lines for rank in line) != list(range(job.world)) or len({*map(len, lines)}) != 1:
        raise UsageError(
            f"{where}: the ranks that {what} are {lines} by what all ranks say; expected groups of one size that have "
            f"each of {job.world} ranks once"
        )
    return lines


def tensor_lines(
    job: Communicator, size: int, sequence: int, asked: RequestedParallelism | None, mpu: Any
) -> list[list[int]] | int:
    """Return the tensor-parallel groups if the caller has made them, otherwise their size."""
    if size == 1 or asked is None or asked.own_tensor is None:
        return size
    neighbours = [list(range(first, first + size)) for first in range(0, job.world, size)]
    lines = told_lines(job, asked.own_tensor, asked.where, "have a copy of the model among them")
    if any(line != sorted(line) for line in lines):
        raise UsageError(f"{asked.where}: ranks of a copy of the model must ascend, found {lines}")
    if asked.where == _MPU:
        place = next(line for line in lines if job.rank in line).index(job.rank)
        column, data = [job.members[line[place]] for line in lines], members_of(mpu.get_data_parallel_group())
        if column != data:
            raise UsageError(
                f"{_MPU}: get_data_parallel_group() has ranks {data} here, and the ranks at this place of all copies "
                f"of the model are {column}, by the groups that all ranks name: expected {job.world} ranks to be "
                "model-parallel groups x data-parallel groups (without further dimensions, such as context)"
            )
    if lines == neighbours:
        return size
    if sequence > 1:
        raise UsageError(
            f"{asked.where}: the ranks that have a copy of the model among them are {lines}; with sequences that "
            f"{sequence} ranks share (sequence_parallel_size) they have to be neighbours: {neighbours}"
        )
    return lines
