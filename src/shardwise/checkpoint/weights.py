"""Plain weights: whole values under the names of the user's module, for anything that reads a PyTorch state dict.

Parameters are gathered unit by unit, so that no more than one unit is whole at a time; what is kept of it is up to the
caller. Every name of a tied parameter appears, because `load_state_dict` of a plain module wants them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.collect import buffers, extra_states
from shardwise.checkpoint.manifest import outline
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.selection import EXTRA, extra_name
from shardwise.checkpoint.tensorfile import Spec
from shardwise.checkpoint.weightfiles import PICKLED, Entry, WeightFiles
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.registry import LogicalTensor


def gathered_parameters(model: CheckpointedModel, wanted: set[int]) -> Iterator[tuple[LogicalTensor, torch.Tensor]]:
    """Yield parameters with their whole values, unit by unit; all ranks iterate to the end together.

    Whoever keeps a value keeps the memory of its whole unit: drop it before the next one is asked for.
    """
    for unit in model.units:
        if not any(tensor.index in wanted for tensor in unit.tensors):
            continue
        gathered = model.gather(unit.parameters)
        try:
            for tensor, parameter in zip(unit.tensors, unit.parameters, strict=True):
                if tensor.index in wanted:
                    yield tensor, parameter.detach()
        finally:
            model.put_back(unit.parameters, gathered, None)


def wanted_parameters(model: CheckpointedModel, *, exclude_frozen: bool) -> set[int]:
    """Return the indices of the parameters whose whole values are wanted: all, or those that require a gradient.

    Raises:
        CheckpointError: some are parts of tensors, or not on all ranks.
    """
    cut = [tensor.name for tensor in model.registry if tensor.box is not None or tensor.ranks is not None]
    if cut:
        raise CheckpointError(
            f"whole weights cannot be gathered: ranks have different parts of the model, this one {outline(cut)}; save "
            "a checkpoint, and export that"
        )
    pairs = zip(model.registry, model.registry.parameters, strict=True)
    return {tensor.index for tensor, parameter in pairs if parameter.requires_grad or not exclude_frozen}


def all_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of a module under every name that its state dict has."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, buffer in child._buffers.items():
            if buffer is not None and key not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def state_dict(model: CheckpointedModel, *, exclude_frozen: bool = False, keep: bool = True) -> dict[str, Any]:
    """Return the module's whole state dict on the CPU; all ranks call this together.

    Args:
        model: the sharded model.
        exclude_frozen: leave out parameters that do not require a gradient.
        keep: False returns an empty dictionary on this rank, which takes part all the same.
    """
    found: dict[str, Any] = {}
    for tensor, values in gathered_parameters(model, wanted_parameters(model, exclude_frozen=exclude_frozen)):
        if keep:
            copied = values.cpu() if values.device.type != "cpu" else values.clone()
            found.update(dict.fromkeys((tensor.name, *tensor.aliases), copied))
        del values
    if not keep:
        return {}
    found.update((name, buffer.detach().cpu().clone()) for name, buffer in all_buffers(model.module))
    found.update((extra_name(name), module.get_extra_state()) for name, module in extra_states(model.module))
    # In the order of a plain module's state dict.
    return {name: found[name] for name in _names(model.module) if name in found}


def _names(module: nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from (dot + key for key in (*child._parameters, *child._buffers, EXTRA))


def check_file_name(name: str) -> str:
    """Return the name of a file of weights.

    Raises:
        CheckpointPathError: it is not a plain name, or its ending does not say how the file is to be written.
    """
    if not name.endswith((".safetensors", *PICKLED)) or os.path.basename(name) != name or name.startswith("."):
        raise CheckpointPathError(
            f"save_filename: expected a plain file name that ends in .safetensors (or {', '.join(PICKLED)}: a state "
            f"dict as torch.save writes it), found {name!r}"
        )
    return name


def write_weights(
    model: CheckpointedModel, parent: str, name: str, *, exclude_frozen: bool = False, max_shard_size: int | None = None
) -> None:
    """Write whole weights, in the dtype the module computes with, under all names.

    Rank 0 writes while units are gathered one after the other; all ranks call this together. The file appears whole or
    not at all; one that is there is replaced.

    Args:
        model: the sharded model.
        parent: directory.
        name: of the file; its ending says how it is written.
        exclude_frozen: leave out parameters that do not require a gradient.
        max_shard_size: bytes of tensors in one file (see `WeightFiles`); None: one file.

    Raises:
        CheckpointError: it could not be written; raised on every rank.
    """
    rank = model.comm.rank
    what = f"saving weights to {os.path.join(parent, name)}"
    wanted = wanted_parameters(model, exclude_frozen=exclude_frozen)
    entries: list[Entry] = []
    for unit in model.units:
        for tensor in unit.tensors:
            if tensor.index in wanted:
                entries += _entries(tensor, once=name.endswith(PICKLED))
    plain = dict(all_buffers(model.module))
    entries += [Entry(key, Spec(buffer.dtype, tuple(buffer.shape))) for key, buffer in plain.items()]
    files: WeightFiles | None = None
    failure: Exception | None = None
    try:
        with phase(model.comm, what):
            if rank == 0:
                files = WeightFiles(parent, entries, name, max_shard_size=max_shard_size, overwrite=True)
        for tensor, values in gathered_parameters(model, wanted):
            # A full disk must not end the loop on rank 0 alone: the others gather with it.
            if files is not None and failure is None:
                try:
                    for entry in _entries(tensor, once=name.endswith(PICKLED)):
                        files.write(entry.name, 0, values)
                except (OSError, CheckpointError) as error:
                    failure = error
            del values
        with phase(model.comm, what):
            if failure is not None:
                raise failure
            if files is not None:
                for key, buffer in plain.items():
                    files.write(key, 0, buffer)
                files.finish()
    finally:
        if files is not None:
            files.abandon()


def _entries(tensor: LogicalTensor, *, once: bool) -> list[Entry]:
    """Return what is written of a parameter: it under each of its names, or once for all."""
    spec = Spec(tensor.dtype, tensor.shape)
    if once:
        return [Entry(tensor.name, spec, tensor.aliases)]
    return [Entry(name, spec) for name in (tensor.name, *tensor.aliases)]


def load_state_dict(
    model: CheckpointedModel, values: Mapping[str, Any], *, strict: bool = True, may_lack: frozenset[str] = frozenset()
) -> None:
    """Take over a state dict of the plain module; all ranks call this together with the same values.

    Master weights are set to the given values, with all their digits.

    Args:
        model: the model to be loaded.
        values: the state dict.
        strict: names must be the same.
        may_lack: names that may be missing all the same.

    Raises:
        CheckpointError: names (if `strict`) or shapes do not fit; nothing has been changed then.
    """
    with phase(model.comm, "loading a state dict"):
        found, plain = _match(model, values, strict, may_lack)
    model.finish_gathers()
    with torch.no_grad():
        runs = model.value_runs()
        for indices in model.lent_in_turn():
            for index in found.keys() & set(indices):
                box = model.box_of(model.registry[index]) or ()
                flat = found[index].detach()[tuple(slice(first, end) for first, end in box)].reshape(-1)
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
    model: CheckpointedModel, values: Mapping[str, Any], strict: bool, may_lack: frozenset[str]
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
    unexpected = [name for name in values if name not in used]
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
