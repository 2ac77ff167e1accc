"""Parameters marked as tensor parts by a client with its own tensor parallelism, such as Megatron.

parameter.tensor_model_parallel    True: sharded over the tensor-parallel group
parameter.partition_dim            sharded dimension
parameter.partition_stride         number of blocks in a part, interleaved over ranks
parameter.sequence_parallel        True: unsharded, with partial gradients (of each rank's tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.errors import UsageError
from shardwise.parallel.tensor.group import Runs, TensorGroup
from shardwise.registry import declare_part, part_of

_MARKS = ("tensor_model_parallel", "model_parallel")


def is_marked(parameter: Any) -> bool:
    """Return True if a parameter is marked as sharded over the client's tensor-parallel group."""
    return any(getattr(parameter, mark, False) is True for mark in _MARKS)


def declare_marked(model: nn.Module, group: TensorGroup) -> bool:
    """Declare a client's marked parameters as parts of tensors (all ranks call); return True if there are any.

    Raises a UsageError if a mark is incomplete, or ranks have marked different parameters.
    """
    own = {
        name: _mark(name, parameter)
        for name, parameter in model.named_parameters()
        if is_marked(parameter) and part_of(parameter).ranks is None
    }
    told = group.comm.exchange([[name, *mark] for name, mark in own.items()], "marked_parameters")
    for rank, theirs in enumerate(told):
        if [row[:3] for row in theirs] != [row[:3] for row in told[0]]:
            mine = next((pair for pair in zip(theirs, told[0], strict=False) if pair[0][:3] != pair[1][:3]), None)
            raise UsageError(
                "initialize(mpu=...): ranks of a copy of the model have marked other parameters as parts, or in "
                f"another dimension: place {rank} {len(theirs)} and place 0 {len(told[0])}, first difference {mine}. "
                "All ranks build the same layers"
            )
    for number, (name, (dim, stride, _)) in enumerate(own.items()):
        parameter = model.get_parameter(name)
        runs = runs_of_sizes([theirs[number][3] for theirs in told], stride, name)
        shape = [*parameter.shape]
        shape[dim] = max(end for runs_ in runs for _, end in runs_)
        group.declare(parameter, shape, dim, runs)
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) is True and part_of(parameter).ranks is None:
            everybody = sorted(rank for column in group.columns for rank in column)
            declare_part(parameter, ranks=everybody, divisor=group.copies)
    return bool(own)


def _mark(name: str, parameter: nn.Parameter) -> tuple[int, int, int]:
    dim = getattr(parameter, "partition_dim", 0 if parameter.dim() == 1 else -1)
    stride = getattr(parameter, "partition_stride", 1)
    if not isinstance(dim, int) or not 0 <= dim < parameter.dim():
        raise UsageError(
            f"initialize(mpu=...): parameter {name!r} of shape {list(parameter.shape)} is marked as a part of a tensor "
            f"(tensor_model_parallel), and its partition_dim is {dim!r}: set parameter.partition_dim to the dimension "
            "that is divided over ranks"
        )
    if not isinstance(stride, int) or stride < 1 or parameter.shape[dim] % stride:
        raise UsageError(
            f"initialize(mpu=...): parameter {name!r} of shape {list(parameter.shape)} has partition_stride {stride!r}:"
            f" expected a number of blocks that divides dimension {dim}"
        )
    return dim, stride, parameter.shape[dim]


def runs_of_sizes(sizes: Sequence[int], stride: int, name: str) -> tuple[Runs, ...]:
    """Return each rank's ranges of a dimension, from all ranks' sizes; raises a UsageError for unequal blocks.

    The first of `stride` blocks of all ranks are contiguous, then all second blocks.

    >>> runs_of_sizes([4, 4], 2, "gate_and_up")
    (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    """
    if stride > 1 and len(set(sizes)) > 1:
        raise UsageError(
            f"initialize(mpu=...): parameter {name!r} has partition_stride {stride} and parts of the sizes "
            f"{list(sizes)}, which ranks cannot have by turns. Give all ranks as much"
        )
    firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    if stride == 1:
        return tuple(((first, first + size),) for first, size in zip(firsts, sizes, strict=True))
    block = sizes[0] // stride
    turn = block * len(sizes)
    return tuple(
        tuple((step * turn + rank * block, step * turn + (rank + 1) * block) for step in range(stride))
        for rank in range(len(sizes))
    )
