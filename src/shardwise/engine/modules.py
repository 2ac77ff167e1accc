"""Preparation of the user's module before sharding: checks, meta parameters, buffers and leaf modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domains
from shardwise.data.draws import unwrap
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.parallel.tensor.entry import copy_first, written_buffers
from shardwise.pipeline.module import PipelineModule
from shardwise.registry import part_of, takes_compute_dtype
from shardwise.utils.logging import warn_once
from shardwise.zero.model import ShardedModel
from shardwise.zero.owner import ParameterOwner
from shardwise.zero.parameters.init import PartStore, shard_module
from shardwise.zero.units.leaves import get_z3_leaf_modules, set_z3_leaf_module
from shardwise.zero.units.released import disown, is_released, owner_of

_WRAPPED_AGAIN = (
    "the engine has been destroyed when its model was passed to shardwise.initialize() again; use the engine that this "
    "call has returned"
)


def check_lazy(model: nn.Module) -> None:
    """Raise a UsageError for lazy parameters and buffers, which get their shapes in the first forward pass."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"initialize(): {len(lazy)} parameters or buffers of the model have no shape yet ({lazy[0]}); run the "
            "model on a batch before, which gives lazy modules their shapes"
        )


def check_one_device(model: nn.Module) -> None:
    """Raise a UsageError if layers are on several devices, or by Hugging Face's `device_map`."""
    placed = dict.fromkeys(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            found.setdefault(str(parameter.device), name)
    if len(placed) < 2 and len(found) < 2:
        return
    where = "; ".join(f"{name!r} is on {device}" for device, name in found.items())
    if len(found) < 2:
        where = f"device_map: {list(placed)}"
    raise UsageError(
        f"initialize(): layers of the model were put on several devices ({where}), and an engine has one device a "
        "rank. Build the model on one device (leave device_map out), and let ZeRO stage 3 or tensor_parallel divide it "
        "over ranks"
    )


def close_former_engine(model: nn.Module) -> None:
    """Close the engine that the model belonged to, if any; trainers wrap a model again."""
    formers: dict[int, ShardedModel] = {}
    for parameter in model.parameters():
        owner = owner_of(parameter)
        if isinstance(owner, ParameterOwner) and not owner.dropped:
            formers[id(owner.model)] = owner.model
        elif isinstance(owner, ParameterOwner) and not is_released(parameter):
            disown(parameter)  # its values are valid
    for former in formers.values():
        warn_once(
            "the model already belonged to an engine, which is closed; its optimizer state is dropped. Call "
            "engine.destroy() to do so explicitly"
        )
        engine = None if former.engine is None else former.engine()
        if engine is not None and engine._tensors is not None and engine._tensors.of_dtensors:
            raise UsageError(
                "initialize(): the model's DTensors belong to an engine. Call engine.destroy() first: it restores them"
            )
        if engine is not None:
            engine.destroy()
        former.close()
        former.comm.destroy()
        former.closed = _WRAPPED_AGAIN
    unwrap(model)  # an engine that was dropped has not done it


def fill_meta_parameters(model: nn.Module, domains: Domains) -> None:
    """Materialize meta parameters module by module; each module is sharded before the next."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    stores = {ranks: PartStore(domain.ranks) for (ranks, _), domain in domains.others.items()}
    everyone = PartStore(domains.main.ranks)
    shard_module(model, everyone, lambda ranks: everyone if ranks is None else stores[ranks])


def share_buffers(model: nn.Module, ranks: Communicator) -> None:
    """Copy the first rank's buffers to all ranks (all ranks call), except those that other ranks lack, and of parts."""
    if ranks.world == 1 or ranks.imagined:
        return
    own: dict[str, tuple[str, torch.Tensor]] = {}
    of_parts = {id(buffer) for module in model.modules() for buffer in _buffers_of_parts(module)}
    for name, buffer in written_buffers(model):
        if type(buffer) is torch.Tensor and id(buffer) not in of_parts:
            own[f"{name} {buffer.dtype} {list(buffer.shape)}"] = name, buffer
    every = ranks.exchange(list(own), "buffers")
    shared = set(own).intersection(*{id(names): names for names in every}.values())
    copy_first((own[key] for key in every[0] if key in shared), ranks)


def _buffers_of_parts(module: nn.Module) -> Iterable[torch.Tensor | None]:
    if isinstance(module, ExpertParallelModule):
        return module.buffers()
    divided = any(one is not None and part_of(one).ranks is not None for one in module._parameters.values())
    return module._buffers.values() if divided else ()


def place_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None, keep: Any, accountant: Accountant
) -> None:
    """Move buffers to the device; cast floating ones to `dtype`, if set, except in modules named in `keep`."""
    kept = (getattr(model, "_keep_in_fp32_modules", None) or []) if keep == "auto" else keep
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # shared buffers stay shared
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            wide = any(part in path.split(".") for part in kept)
            cast = dtype if dtype is not None and takes_compute_dtype(buffer) and not wide else buffer.dtype
            key = (id(buffer), cast)
            if key not in moved:
                moved[key] = buffer.to(device=device, dtype=cast)
                accountant.add(Category.OTHER, moved[key].nbytes)
            module._buffers[name] = moved[key]


def leaves_of(model: nn.Module, section: Any) -> list[nn.Module]:
    """Return the leaf modules of script and configuration, marked: each becomes one unit."""
    found = get_z3_leaf_modules(model)
    if section is None:
        return found
    matched: set[str] = set()
    for name, module in model.named_modules():
        kind = type(module)
        spellings = {f"{kind.__module__}.{kind.__qualname__}", kind.__qualname__}
        wanted = {entry for entry in section.classes if entry in spellings}
        wanted |= {entry for entry in section.names if entry == name}
        wanted |= {entry for entry in section.name_suffixes if name and name.endswith(entry)}
        if wanted:
            matched |= wanted
            if module not in found:
                found.append(module)
                set_z3_leaf_module(module, True)
    # The default list of classes may match nothing.
    asked = [*section.classes, *section.names, *section.name_suffixes]
    idle = [entry for entry in asked if entry not in matched and entry not in type(section)().classes]
    if idle:
        warn_once(f"zero_optimization.leaf_module: no module of {type(model).__name__} matches {', '.join(idle)}")
    return found


def modules_with(model: nn.Module, parameters: Collection[int]) -> list[nn.Module]:
    """Return the modules that have some of the parameters, which are given by `id`, themselves."""
    return [module for module in model.modules() if any(id(p) in parameters for p in module._parameters.values())]


def chunks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the parts of a model that run in passes of their own: stages of a pipeline; none: the model is one."""
    return model.built_stages if isinstance(model, PipelineModule) else ()


def convert_buffers(
    module: nn.Module, parameters: Iterable[nn.Parameter], fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Convert buffers with `fn`; a UsageError if it would convert parameters, because the engine owns their memory."""
    for dtype, device in sorted({(p.dtype, p.device) for p in parameters}, key=str):
        made = fn(torch.empty(0, dtype=dtype, device=device))
        if (made.dtype, made.device) != (dtype, device):
            raise UsageError(
                f"the engine's parameters cannot be converted (here from {dtype} on {device} to {made.dtype} on "
                f"{made.device}): they live in memory that the engine moves and steps. Choose the dtype in the "
                "configuration (bf16, fp16) and the device by LOCAL_RANK, or convert the "
                "model before initialize() or after engine.destroy()"
            )
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = moved.setdefault(id(buffer), (buffer, fn(buffer)))[1]
