"""Plain weights: unsharded values under the names of the user's module, as a PyTorch state dict.

Every name of a tied parameter is included, because `load_state_dict` of a plain module requires them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.agree import collective_step, held_by_any, same_on_all
from shardwise.checkpoint.collect import buffers, extra_states
from shardwise.checkpoint.manifest import outline
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.selection import EXTRA, extra_name
from shardwise.checkpoint.sharded_weights import PICKLED, Entry, WeightFiles
from shardwise.checkpoint.unsharded import UnshardedTensor, UnshardedWeights, all_buffers, is_divided
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from shardwise.registry import cut


def state_dict(model: CheckpointedModel, *, exclude_frozen: bool = False, to_first: bool = False) -> dict[str, Any]:
    """Return the module's unsharded state dict on the CPU; with `to_first` other ranks than the first get an empty one.
    A collective. `exclude_frozen` leaves out parameters that do not require a gradient.
    """
    found: dict[str, Any] = {}
    for tensor, values in UnshardedWeights(model, exclude_frozen=exclude_frozen, to_first=to_first):
        copied = values.cpu() if values.device.type != "cpu" else values.clone()
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), copied))
        del values
    if to_first and model.comm.rank != 0:
        return {}
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
    whole = UnshardedWeights(model, exclude_frozen=exclude_frozen, to_first=True)
    entries: list[Entry] = []
    for tensor in whole.tensors.values():
        entries += _entries(tensor, once=name.endswith(PICKLED))
    files: WeightFiles | None = None
    failure: Exception | None = None
    try:
        with collective_step(model.comm, what):
            if rank == 0:
                files = WeightFiles(parent, entries, name, max_shard_size=max_shard_size, overwrite=True)
        for tensor, values in whole:
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
                files.finish()
    finally:
        if files is not None:
            files.abandon()


def _entries(tensor: UnshardedTensor, *, once: bool) -> list[Entry]:
    spec = Spec(tensor.dtype, tensor.shape)
    if once:
        return [Entry(tensor.name, spec, tensor.aliases)]
    return [Entry(name, spec) for name in (tensor.name, *tensor.aliases)]


def names_of_any(model: CheckpointedModel, names: Sequence[str], what: str) -> set[str]:
    """Return those of some given names that a parameter, buffer or extra state of any rank has; empty if all ranks have
    the same modules. A collective. Raises UsageError if ranks give other names.
    """
    if model.pass_group.world == model.comm.world and not is_divided(model):
        return set()
    if not same_on_all(model.comm, list(names), what):
        raise UsageError(f"{what}: ranks give different names; give every rank the same names in the same order")
    own = {name for tensor in model.registry for name in (tensor.name, *tensor.aliases)}
    own.update(name for name, _ in all_buffers(model.module))
    own.update(extra_name(name) for name, _ in extra_states(model.module))
    return held_by_any(model.comm, names, own, what)


def load_state_dict(
    model: CheckpointedModel, values: Mapping[str, Any], *, strict: bool = True, may_lack: frozenset[str] = frozenset()
) -> None:
    """Load a state dict of the plain module, the same on all ranks, in full precision into master weights. A
    collective. `strict` requires the same names, except those that `may_lack`. Raises CheckpointError if names or
    shapes do not match; nothing has changed then.
    """
    what = "loading a state dict"
    elsewhere = names_of_any(model, list(values), what)
    with collective_step(model.comm, what):
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
