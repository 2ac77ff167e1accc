"""Entry points of tensor parallelism: before an engine (`tp_model_init`), and when an engine is built."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Communicator, check_agreement, members_of
from shardwise.comm.ledger import Ledger
from shardwise.config import accept, resolve
from shardwise.errors import ConflictError, UsageError
from shardwise.parallel.sequence import DefaultGroup, across
from shardwise.parallel.tensor import huggingface
from shardwise.parallel.tensor.copies import snapshot
from shardwise.parallel.tensor.group import NAME, TensorGroup
from shardwise.parallel.tensor.layers import Parallel
from shardwise.parallel.tensor.plan import TensorParallelPlan, cuts_of
from shardwise.parallel.tensor.sequence_parallel import tokens_of
from shardwise.parallel.tensor.watch import watch_division
from shardwise.registry import part_of

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import TensorParallel


def divided_over(model: nn.Module) -> TensorGroup | None:
    """Return the tensor-parallel group of a model's sharded layers; None without sharded layers."""
    return next((module.group for module in model.modules() if isinstance(module, Parallel)), None)


def divide_model(
    model: nn.Module, group: TensorGroup, section: TensorParallel, everybody: Communicator, *, experts: bool = True
) -> list[Parallel]:
    """Shard a model's layers in place; return the layers that were sharded before, which `disconnect` takes.

    The first rank's values are broadcast before, because all parts must be of one model. `experts` includes stacked
    experts; False with `expert_parallel`.
    """
    layers: list[Parallel] = [module for module in model.modules() if isinstance(module, Parallel)]
    for layer in layers:
        layer.former, layer.group = (*layer.former, layer.group), group
    column = tuple(group.columns[group.place])
    if layers or any(part_of(p).box is not None and part_of(p).ranks == column for p in model.parameters()):
        return layers
    division = cuts_of(model, group.size, section, experts=experts)
    tokens = tokens_of(model, division.layers, section) if section.sequence_parallel else None
    if tokens is not None:
        division = replace(division, layers=tokens.cuts)
    if not everybody.imagined:
        check_agreement(everybody, facts_of(division))
        divided = huggingface.divided_parameters(model, division)
        copy_first(((name, one) for name, one in divided if part_of(one).ranks is None and _plain(one)), everybody)
    remember = snapshot(model)
    huggingface.divide_model(model, division, group)
    remember()
    if tokens is not None:
        tokens.attach(model)
    if section.check_division:
        watch_division(model)
    return []


def disconnect(layers: Iterable[Parallel], group: TensorGroup) -> None:
    """Remove a closed group from layers that had others before; the newest of these connects the ranks again."""
    for layer in layers:
        *layer.former, layer.group = (one for one in (*layer.former, layer.group) if one is not group)


def copy_first(tensors: Iterable[tuple[str, torch.Tensor]], ranks: Communicator) -> None:
    """Copy the first rank's values into named tensors in place (all ranks call).

    Because NCCL takes tensors of its device only, and contiguous ones, others are copied there and back.
    """
    for name, tensor in tensors:
        values = tensor.data
        sent = values.to(ranks.device).contiguous()
        ranks.broadcast(sent.view(-1).view(torch.uint8), 0, name).wait()
        if sent is not values:
            values.copy_(sent)


def written_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a model's buffers that have values, each in memory of its own (expanded ones cannot be written)."""
    return [(name, one) for name, one in model.named_buffers() if not one.is_meta and 0 not in one.stride()]


def facts_of(division: TensorParallelPlan) -> dict[str, str]:
    """Return the sharding decisions that must agree between ranks, by name."""
    divided = {
        **division.layers,
        **division.experts,
        **division.vectors,
        **division.slices,
        **dict.fromkeys(division.summands, "summed"),
    }
    return {f"tensor parallelism of {path}": repr(how) for path, how in divided.items()}


def _plain(parameter: nn.Parameter) -> bool:
    # The placeholder of a resharded parameter intercepts every access.
    seen = type(parameter).__torch_function__ is not nn.Parameter.__torch_function__
    return not parameter.is_meta and not seen


# -- before there is an engine -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Begun:
    group: TensorGroup
    everybody: Communicator


class _Owner(Protocol):
    group: TensorGroup


_begun: list[_Begun] = []
_current: list[weakref.ref[_Owner]] = []
_default_group = DefaultGroup()


def begin_tensors(size: int, device: torch.device | None = None) -> TensorGroup:
    """Create tensor-parallel groups of consecutive ranks before there is an engine (all ranks call).

    Existing groups of this size are returned again. `end_tensors` destroys them. Tensors are by default on this
    process's device. Raises a ConflictError if `size` does not divide the ranks.
    """
    from shardwise.comm.setup import local_rank
    from shardwise.device import choose_device

    _settle()
    for known in _begun:
        if known.group.size == size:
            return known.group
    world = len(members_of(None))
    if size < 1 or world % size:
        raise ConflictError(
            f"tp_size is {size}, but the number of ranks is {world}, no multiple of {size}; choose a divisor "
            f"of {world}, or start a multiple of {size} ranks"
        )
    device = choose_device(local_rank()) if device is None else device
    everybody = Communicator(None, Ledger(), device, call="tp_model_init()")
    lines = [list(range(first, first + size)) for first in range(0, world, size)]
    part, data = everybody, everybody
    if world > 1:
        part, data = everybody.part(lines, NAME, near=True), everybody.part(across(lines), "data_parallel")
    group = TensorGroup(part, across(lines), part.rank, data)
    begun = _Begun(group, everybody)
    _begun.append(begun)
    take_over(begun)
    return group


def current_tensors() -> TensorGroup | None:
    """Return the tensor-parallel group of the newest engine, or that of `begin_tensors`; None without one."""
    _settle()
    return next((owner.group for known in reversed(_current) if (owner := known()) is not None), None)


def take_over(owner: _Owner) -> None:
    """Set the process's tensor-parallel group, while its owner lives."""
    _settle()
    _current.append(weakref.ref(owner))


def let_go(owner: _Owner) -> None:
    """Undo `take_over`."""
    _current[:] = [other for other in _current if other() not in (owner, None)]


def end_tensors() -> None:
    """Destroy the groups of `begin_tensors` (all ranks call). Sharded models need an engine from then on."""
    _settle()
    while _begun:
        begun = _begun.pop()
        let_go(begun)
        begun.group.close()
        begun.everybody.destroy()


def _settle() -> None:
    """Drop groups of a destroyed default process group (`destroy_process_group`)."""
    if _default_group.changed():
        for begun in _begun:
            begun.group.close()
        _begun.clear()
        _current.clear()


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
    tp_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Apply tensor parallelism to a model now (all ranks call); return the same model.

    Each rank keeps its part of every sharded layer, so memory shrinks at once. The model can be called without an
    engine. `shardwise.initialize(model=...)` accepts it as it is; tensor-parallel ranks are consecutive.

    Args:
        model: its layers are sharded in place. The first rank's values are broadcast before.
        tp_size: ranks of a tensor-parallel group.
        dtype: floating-point parameters and buffers are cast to it, unless the engine casts by `config` (`bf16`,
            `fp16`), which keeps full-precision values for master weights. None: no cast.
        config: dict, path or text; its section `tensor_parallel` selects layers and sharding. None: by the model.
        tp_group: group of this rank's consecutive ranks; None: they are used.

    Raises:
        ConflictError: `tp_size` does not divide the ranks, or contradicts the configuration, `tp_group` or the model.
        ConfigError: the configuration is wrong, or no layer of the model is sharded.

    Example:
        >>> import torch, shardwise
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        >>> rules = [{"patterns": ["^0"], "partition_type": "column"}, {"patterns": ["^1"], "partition_type": "row"}]
        >>> section = {"partition_config": {"layer_specs": rules}}
        >>> _ = shardwise.tp_model_init(model, 1, config={"tensor_parallel": section})
    """
    from shardwise.comm.setup import init_distributed

    if not isinstance(model, nn.Module):
        raise UsageError(f"tp_model_init(model=...) expects an nn.Module, got {type(model).__name__}")
    init_distributed(verbose=False)
    section, casts = _section_of(config)
    if section.size not in (1, tp_size):
        raise ConflictError(
            f"tp_model_init(tp_size={tp_size}): the configuration says tensor_parallel.autotp_size {section.size}; "
            "remove one of them"
        )
    before = divided_over(model)
    if before is not None and before.size != tp_size:
        raise ConflictError(f"tp_model_init(tp_size={tp_size}): the model is divided over {before.size} ranks already")
    group = begin_tensors(tp_size)
    if tp_group is not None and members_of(tp_group) != group.comm.members:
        raise ConflictError(
            f"tp_model_init(tp_group=...): it has ranks {members_of(tp_group)}; the ranks of a copy of the model are "
            f"neighbours, here {group.comm.members}"
        )
    if dtype is not None and not casts:
        model.to(dtype)
    if tp_size > 1:
        everybody = _everybody(group)
        if before is None:
            copy_first(written_buffers(model), everybody)
        divide_model(model, group, section, everybody)
        own = ((name, one) for name, one in model.named_parameters() if part_of(one).ranks is None and _plain(one))
        copy_first(own, everybody)
    return model


def _section_of(config: Any) -> tuple[TensorParallel, bool]:
    given = {} if config is None else accept(config).data
    own = {name: given[name] for name in ("tensor_parallel", "bf16", "bfloat16", "fp16") if name in given}
    found = resolve({"train_micro_batch_size_per_gpu": 1, **own}, world_size=len(members_of(None))).config
    return found.tensor_parallel, found.bf16.enabled or found.fp16.enabled


def _everybody(group: TensorGroup) -> Communicator:
    return next(known.everybody for known in _begun if known.group is group)
