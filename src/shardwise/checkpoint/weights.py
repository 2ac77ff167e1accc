"""Plain weights: unsharded values under the names of the user's module, as a PyTorch state dict.

Parameters are unsharded one unit at a time; the caller decides what to keep. If ranks have different tensors, or boxes
of them, each box is sent when its unit is unsharded, to all ranks or the first, and joined there. Every name of a tied
parameter is included, because `load_state_dict` of a plain module requires them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise import boxes
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import buffers, extra_states
from shardwise.checkpoint.manifest import dtype_of, name_of, outline
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.selection import EXTRA, extra_name
from shardwise.checkpoint.sharded_weights import PICKLED, Entry, WeightFiles
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.registry import HeldPart, cut, paste


@dataclass(frozen=True)
class UnshardedTensor:
    """An unsharded parameter, its further names, and the dtype in which modules compute with it."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def unsharded_parameters(model: CheckpointedModel, *, exclude_frozen: bool) -> dict[str, UnshardedTensor]:
    """Return all ranks' parameters to unshard, by name, in the order of the units; with `exclude_frozen` those that
    require a gradient on some rank. A collective. Raises CheckpointError if boxes do not partition a tensor.
    """
    pairs = [pair for unit in model.units for pair in zip(unit.tensors, unit.parameters, strict=True)]
    own = [tensor for tensor, parameter in pairs if parameter.requires_grad or not exclude_frozen]
    if not is_divided(model):
        return {t.name: UnshardedTensor(t.name, t.aliases, t.global_shape, t.dtype) for t in own}
    with collective_step(model.comm, "gathering whole weights") as step:
        step.local = [tensor.name for tensor in own]
    wanted = {name for names in step.gathered for name in names}
    found: dict[str, UnshardedTensor] = {}
    parts: dict[str, dict[boxes.Region, None]] = {}
    for part in (part for some in _new_parts(model) for part in some):
        if part.name in wanted:
            known = found.pop(part.name, UnshardedTensor(part.name, (), part.shape, part.dtype))
            aliases = dict.fromkeys((*known.aliases, *part.aliases))
            found[part.name] = replace(known, aliases=tuple(aliases))
            parts.setdefault(part.name, {})[part.box] = None
    for name, held in parts.items():
        wrong = boxes.misfit(found[name].shape, held)
        if wrong is not None:
            raise CheckpointError(
                f"parameter {name!r}: element {list(wrong[0])} of {list(found[name].shape)} is on {wrong[1]} ranks or "
                "groups of ranks, so there is no whole tensor; see shardwise.declare_part"
            )
    return found


def is_divided(model: CheckpointedModel) -> bool:
    """Return True if ranks have different tensors, or boxes of them; the same on all ranks."""
    return any(model.parts_of(tensor.index) for tensor in model.registry)


def _new_parts(model: CheckpointedModel) -> Iterator[list[HeldPart]]:
    """Yield for each parameter, unit by unit, the boxes at its position that are new."""
    seen: set[tuple[str, boxes.Region]] = set()
    for unit in model.units:
        for tensor in unit.tensors:
            parts = [part for part in model.parts_of(tensor.index) if part.numel or part.whole]
            new = [part for part in parts if (part.name, part.box) not in seen]
            seen.update((part.name, part.box) for part in new)
            yield new


def gathered_parameters(
    model: CheckpointedModel, wanted: Mapping[str, UnshardedTensor], *, to_first: bool = False
) -> Iterator[tuple[UnshardedTensor, torch.Tensor]]:
    """Yield parameters with unsharded values, unit by unit, on all ranks or the first (`to_first`). A collective.

    Iterate to the end. A value keeps the memory of its unit alive: drop it before the next iteration. `wanted` comes
    from `unsharded_parameters`; arguments are the same on all ranks.
    """
    keep = not to_first or model.comm.rank == 0
    waiting: dict[str, tuple[torch.Tensor, int]] = {}  # with the number of missing elements
    divided, new = is_divided(model), _new_parts(model)
    for unit in model.units:
        parts = [[part for part in next(new) if part.name in wanted] for _ in unit.tensors]
        if not (any(parts) if divided else any(tensor.name in wanted for tensor in unit.tensors)):
            continue
        gathered = model.gather_parts(unit.parameters)
        try:
            for tensor, parameter, some in zip(unit.tensors, unit.parameters, parts, strict=True):
                if keep and not divided and tensor.name in wanted:
                    yield wanted[tensor.name], parameter.detach()
                for part in some:
                    values = _received(model, part, parameter.detach(), to_first=to_first)
                    if values is None:
                        continue
                    if not part.whole:
                        values = _put(waiting, part, values)
                    if part.name not in waiting:
                        yield wanted[part.name], values
                    del values
        finally:
            model.put_parts_back(unit.parameters, gathered, None)


def _received(model: CheckpointedModel, part: HeldPart, own: torch.Tensor, *, to_first: bool) -> torch.Tensor | None:
    """Return a box that some ranks have, on all ranks or the first only; its first owner sends it."""
    comm, sender = model.comm, part.ranks[0]
    wanted = not to_first or comm.rank == 0
    if 0 in part.ranks if to_first else len(part.ranks) == comm.world:
        return own if wanted else None
    shape = boxes.sizes(part.box)
    if not to_first:
        if comm.rank != sender:
            own = torch.empty(shape, dtype=part.dtype, device=model.device)
        comm.broadcast(own, sender, part.name).wait()
        return own
    given = own.reshape(-1) if comm.rank == sender else torch.empty(0, dtype=part.dtype, device=model.device)
    arrived = torch.empty(part.numel if wanted else 0, dtype=part.dtype, device=model.device)
    sizes = [part.numel * (wanted and rank == sender) for rank in range(comm.world)]
    comm.all_to_all(arrived, given, sizes, [given.numel(), *[0] * (comm.world - 1)], part.name).wait()
    return arrived.view(shape) if wanted else None


def _put(waiting: dict[str, tuple[torch.Tensor, int]], part: HeldPart, values: torch.Tensor) -> torch.Tensor:
    whole, left = waiting.pop(part.name, (None, 0))
    if whole is None:
        whole = torch.empty(part.shape, dtype=part.dtype, device=values.device)
        left = whole.numel()
    paste(values, part.box, whole)
    if left > values.numel():
        waiting[part.name] = whole, left - values.numel()
    return whole


def names_of_all(model: CheckpointedModel) -> set[str]:
    """Return all ranks' names of parameters, buffers and extra state; empty if modules are equal. A collective."""
    parts = [part for tensor in model.registry for part in model.parts_of(tensor.index)]
    found = {name for part in parts for name in (part.name, *part.aliases)}
    for entry in _elsewhere(model):
        found.update(entry["buffers"], map(extra_name, entry["extra"]))
    return found


def all_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of a module under every name of its state dict."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, buffer in child._buffers.items():
            if buffer is not None and key not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def state_dict(model: CheckpointedModel, *, exclude_frozen: bool = False, to_first: bool = False) -> dict[str, Any]:
    """Return the module's unsharded state dict on the CPU; with `to_first` other ranks than the first get an empty one.
    A collective. `exclude_frozen` leaves out parameters that do not require a gradient.
    """
    found: dict[str, Any] = {}
    wanted = unsharded_parameters(model, exclude_frozen=exclude_frozen)
    for tensor, values in gathered_parameters(model, wanted, to_first=to_first):
        copied = values.cpu() if values.device.type != "cpu" else values.clone()
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), copied))
        del values
    plain = gathered_buffers(model)
    if to_first and model.comm.rank != 0:
        return {}
    found.update((name, buffer.detach().cpu().clone()) for name, buffer in plain.items())
    found.update((extra_name(name), module.get_extra_state()) for name, module in extra_states(model.module))
    return {name: found[name] for name in _in_order(model.module, found)}


def _in_order(module: nn.Module, found: Iterable[str]) -> list[str]:
    """Return names in the order of a plain module's state dict; those of other ranks follow their predecessors."""
    known = dict.fromkeys(_names(module))
    behind: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in found:
        if name in known:
            last = name
        else:
            behind.setdefault(last, []).append(name)
    held = set(found)
    ordered = list(behind.get(None, ()))
    for name in known:
        if name in held:
            ordered += [name, *behind.get(name, ())]
    return ordered


def gathered_buffers(model: CheckpointedModel) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of the module, and those of other ranks only. A collective. Raises CheckpointError
    if only some ranks have modules with `get_extra_state`, because that cannot be sent.
    """
    found = dict(all_buffers(model.module))
    gathered = _elsewhere(model)
    homes: dict[str, tuple[int, Any]] = {}
    extra: dict[str, int] = {}
    for rank, entry in enumerate(gathered):
        for name, facts in entry["buffers"].items():
            homes.setdefault(name, (rank, facts))
        for name in entry["extra"]:
            extra.setdefault(name, rank)
    lacking = [name for name in extra if not all(name in entry["extra"] for entry in gathered)]
    if lacking:
        raise CheckpointError(
            f"extra state of modules that not all ranks have cannot be gathered: {outline(lacking)} (on rank "
            f"{extra[lacking[0]]}); save a checkpoint, and export that"
        )
    for name, (rank, (dtype, shape)) in homes.items():
        if all(name in entry["buffers"] for entry in gathered):
            continue
        if model.comm.rank == rank:
            values = found[name].detach().contiguous()
        else:
            values = torch.empty(shape, dtype=dtype_of(dtype), device=model.device)
        model.comm.broadcast(values, rank, name).wait()
        found.setdefault(name, values)
    return found


def _elsewhere(model: CheckpointedModel) -> list[dict[str, Any]]:
    """Return each rank's buffers and extra state if ranks may have different modules, else nothing. A collective."""
    if not is_divided(model):
        return []
    with collective_step(model.comm, "comparing modules") as step:
        held = {name: [name_of(buffer.dtype), list(buffer.shape)] for name, buffer in all_buffers(model.module)}
        step.local = {"buffers": held, "extra": [name for name, _ in extra_states(model.module)]}
    return step.gathered


def _names(module: nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from (dot + key for key in (*child._parameters, *child._buffers, EXTRA))


def check_file_name(name: str) -> str:
    """Return a plain file name with the suffix of a format, or raise CheckpointPathError."""
    if not name.endswith((".safetensors", *PICKLED)) or os.path.basename(name) != name or name.startswith("."):
        raise CheckpointPathError(
            f"save_filename: expected a plain file name that ends in .safetensors (or {', '.join(PICKLED)}: a state "
            f"dict as torch.save writes it), found {name!r}"
        )
    return name


def write_weights(
    model: CheckpointedModel, parent: str, name: str, *, exclude_frozen: bool = False, max_shard_size: int | None = None
) -> None:
    """Write unsharded weights, in the dtype the module computes with, under all names. A collective.

    Rank 0 writes a file atomically while units are unsharded in turn; the suffix of `name` gives the format.
    `max_shard_size` is in bytes of tensors in one file (see `WeightFiles`); None: one file. Raises CheckpointError on
    every rank.
    """
    rank = model.comm.rank
    what = f"saving weights to {os.path.join(parent, name)}"
    wanted = unsharded_parameters(model, exclude_frozen=exclude_frozen)
    entries: list[Entry] = []
    for tensor in wanted.values():
        entries += _entries(tensor, once=name.endswith(PICKLED))
    plain = gathered_buffers(model)
    entries += [Entry(key, Spec(buffer.dtype, tuple(buffer.shape))) for key, buffer in plain.items()]
    files: WeightFiles | None = None
    failure: Exception | None = None
    try:
        with collective_step(model.comm, what):
            if rank == 0:
                files = WeightFiles(parent, entries, name, max_shard_size=max_shard_size, overwrite=True)
        for tensor, values in gathered_parameters(model, wanted, to_first=True):
            # A full disk must not end the loop on rank 0 only, because all ranks take part in the all-gathers.
            if files is not None and failure is None:
                try:
                    for entry in _entries(tensor, once=name.endswith(PICKLED)):
                        files.write(entry.name, 0, values)
                except (OSError, CheckpointError) as error:
                    failure = error
            del values
        with collective_step(model.comm, what):
            if failure is not None:
                raise failure
            if files is not None:
                for key, buffer in plain.items():
                    files.write(key, 0, buffer)
                files.finish()
    finally:
        if files is not None:
            files.abandon()


def _entries(tensor: UnshardedTensor, *, once: bool) -> list[Entry]:
    spec = Spec(tensor.dtype, tensor.shape)
    if once:
        return [Entry(tensor.name, spec, tensor.aliases)]
    return [Entry(name, spec) for name in (tensor.name, *tensor.aliases)]


def load_state_dict(
    model: CheckpointedModel, values: Mapping[str, Any], *, strict: bool = True, may_lack: frozenset[str] = frozenset()
) -> None:
    """Load a state dict of the plain module, the same on all ranks, in full precision into master weights. A
    collective. `strict` requires the same names, except those that `may_lack`. Raises CheckpointError if names or
    shapes do not match; nothing has changed then.
    """
    elsewhere = names_of_all(model)
    with collective_step(model.comm, "loading a state dict"):
        found, plain = _match(model, values, strict, may_lack, elsewhere)
    model.finish_gathers()
    with torch.no_grad():
        runs = model.value_runs()
        for indices in model.iter_resident():
            for index in found.keys() & set(indices):
                box, flat = model.box_of(model.registry[index]), found[index].detach()
                flat = (flat if box is None else cut(flat, box)).reshape(-1)
                for start, stop, view in runs.get(index, ()):
                    view.copy_(flat[start:stop])
        for buffer, tensor in plain:
            buffer.copy_(tensor)
    for name, module in extra_states(model.module):
        key = extra_name(name)
        if key in values:
            module.set_extra_state(values[key])
    model.publish()


def _match(
    model: CheckpointedModel,
    values: Mapping[str, Any],
    strict: bool,
    may_lack: frozenset[str],
    elsewhere: set[str],
) -> tuple[dict[int, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    used = {extra_name(name) for name, _ in extra_states(model.module)}
    missing: list[str] = []
    wrong: list[str] = []

    def take(names: tuple[str, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
        used.update(names)
        value = next((values[name] for name in names if name in values), None)
        if not isinstance(value, torch.Tensor):
            if may_lack.isdisjoint(names):
                missing.append(names[0])
        elif tuple(value.shape) != shape:
            wrong.append(f"{names[0]} (given {list(value.shape)}, model {list(shape)})")
        return value

    found = {t.index: take((t.name, *t.aliases), t.global_shape) for t in model.registry}
    used.update(name for name, _ in all_buffers(model.module))
    plain = [(buffer, take((name,), tuple(buffer.shape))) for name, buffer in buffers(model.module)]
    unexpected = [name for name in values if name not in used and name not in elsewhere]
    problems = [f"of another shape: {outline(wrong)}"] if wrong else []
    if strict and missing:
        problems.append(f"missing: {outline(missing)}")
    if strict and unexpected:
        problems.append(f"not in the model: {outline(unexpected)}")
    if problems:
        raise CheckpointError(f"the state dict does not fit the model: {'; '.join(problems)}")
    return (
        {index: value for index, value in found.items() if value is not None},
        [(buffer, value) for buffer, value in plain if value is not None],
    )
