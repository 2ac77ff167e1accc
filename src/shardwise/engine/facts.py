"""Fingerprints of a rank's arguments, compared between ranks to detect desync."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.coded import ranks_in_words
from shardwise.comm.communicator import check_agreement, difference
from shardwise.config import Resolution, effective
from shardwise.errors import DesyncError
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.parallel.tensor.entry import divided_over
from shardwise.registry import part_of
from shardwise.zero.parameters.init import PartStore
from shardwise.zero.units.released import owner_of

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

_A_RANKS_OWN = frozenset(
    {
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "jsonl_monitor",
        "log_level",
        "memory_breakdown",
        "mlflow",
        "progress",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)
"""Sections that affect reporting only; ranks may differ in them."""

_A_MACHINES_OWN = frozenset(
    {
        "checkpoint.memory_copies.directory",
        "timeline.path",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.nvme_path",
    }
)
"""Paths that may differ between machines."""


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, resolution: Resolution) -> dict[str, str]:
    """Return configuration values, optimizer settings and parameters, by name."""
    facts = {f"config {path}": repr(value) for path, value in _leaves(effective(resolution))}
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    if optimizer is not None:
        facts["optimizer"] = type(optimizer).__name__
        facts |= facts_of_groups(optimizer)
    for number, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        owner = f", group {group_of[id(parameter)]}" if id(parameter) in group_of else ""
        trained = "" if parameter.requires_grad else ", frozen"
        if part_of(parameter).ranks is not None:
            facts[f"parameter {number}"] = f"a part that some ranks have, {parameter.dtype}{trained}{owner}"
            continue
        facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype}{trained}{owner}"
    return facts


def facts_of_groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the settings of an optimizer's parameter groups (lr, betas, weight_decay, ...), by name."""
    return {
        f"optimizer group {number} {name}": _value(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def check_loaded(
    data: Communicator,
    path: str,
    optimizer: torch.optim.Optimizer | None,
    trees: Mapping[str, Mapping[str, Any] | None],
) -> None:
    """Compare settings of parameter groups and the scalars of `trees` between data-parallel ranks after a load; a
    DesyncError names the differences (all ranks call).
    """
    facts = {} if optimizer is None else facts_of_groups(optimizer)
    for kind, tree in trees.items():
        facts |= {f"{kind} {name}": _value(value) for name, value in (tree or {}).items()}
    advice = "Load the same checkpoint with the same arguments on all ranks, and set nothing on single ranks before."
    check_agreement(data, facts, f"loading checkpoint {path}", advice)


def facts_of_arguments(model: nn.Module, resolution: Resolution, mesh: Any, mpu: Any) -> dict[str, str]:
    """Return the arguments that decide which process groups and collectives an engine makes."""
    facts = {f"config {path}": repr(value) for path, value in _leaves(effective(resolution))}
    facts["mesh"] = repr(mesh)
    if isinstance(mesh, DeviceMesh):
        facts["mesh"] = repr(dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)))
    facts["mpu"] = "none" if mpu is None else type(mpu).__name__
    group = divided_over(model)
    facts["tensor parallelism of the model"] = "none" if group is None else f"over {group.size} ranks"
    built = any(isinstance(owner_of(parameter), PartStore) for parameter in model.parameters())
    facts["parameters built under zero.Init"] = "some or all" if built else "none"
    for name, module in model.named_modules():
        if isinstance(module, ExpertParallelModule):
            facts[f"layer of experts {name or '(root)'}"] = f"{module.num_experts} experts, ep_size {module.ep_size}"
    return facts


def facts_of_values(model: nn.Module) -> dict[str, str]:
    """Return names, shapes and dtypes that must agree before one rank's values are broadcast."""
    known: dict[int, str] = {}
    facts = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        same = known.setdefault(id(tensor), name)
        tied = "" if same == name else f", the same as {same}"
        facts[f"tensor {name}"] = f"{tuple(tensor.shape)} {tensor.dtype}{tied}"
    return facts


class Agreed(NamedTuple):
    """Answers of all ranks: rank 0 has values of all parameters, and another rank has some on the meta device; a rank
    reports losses; a rank has buffers.
    """

    spreads: bool
    shows_loss: bool
    has_buffers: bool = False


def agree_on_arguments(job: Communicator, model: nn.Module, facts: Mapping[str, str], shows_loss: bool) -> Agreed:
    """Compare `facts_of_arguments` between ranks before groups are made; a DesyncError on all ranks (all ranks call).

    `shows_loss`: this rank reports losses, which any rank may do alone.
    """
    if job.world == 1 or job.imagined:
        return Agreed(spreads=False, shows_loss=shows_loss)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).hexdigest()[:24]
    has_buffers = next(model.buffers(), None) is not None
    told = job.exchange([digest, int(on_meta), int(shows_loss), int(has_buffers)], "arguments")
    given = [version for version, *_ in told]
    if len(set(given)) > 1:
        raise difference(job, facts, given)
    without = [rank for rank, (_, meta, *_) in enumerate(told) if meta]
    if 0 in without and len(without) < job.world:
        others = [rank for rank in range(job.world) if rank not in without]
        raise DesyncError(
            f"initialize(): {ranks_in_words(without)} of {job.world} built the model on the meta device, "
            f"{ranks_in_words(others)} with values. Build it on the meta device on all ranks, or with values on rank 0 "
            "and on the meta device elsewhere: then rank 0's values are everybody's"
        )
    if without and len(without) < job.world:
        check_agreement(job, facts_of_values(model))
    shown, buffers = (any(answers) for answers in list(zip(*told, strict=True))[2:])
    return Agreed(spreads=0 not in without and bool(without), shows_loss=shown, has_buffers=buffers)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if (not prefix and name in _A_RANKS_OWN) or f"{prefix}{name}" in _A_MACHINES_OWN:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    """Name only the type of an object, because its `repr` may hold an address."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return repr(value.item())
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(item) for item in value)})"
    return type(value).__name__
