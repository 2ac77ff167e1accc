"""Import: weights of other programs, or a state dict in memory, directly into the shards of an engine.

Every rank reads its shards, by name and range, into its master weights. No rank has the unsharded model, and all ranks
together need only the model's memory. Names are matched before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.agree import collective_step, held_by_any, same_on_all
from shardwise.checkpoint.collect import buffer_names, buffers, extra_states
from shardwise.checkpoint.load import read_module
from shardwise.checkpoint.manifest import StoredTensor, outline
from shardwise.checkpoint.match import LoadPlan, LoadReport, names_of
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.selection import extra_name
from shardwise.checkpoint.unsharded import is_divided
from shardwise.checkpoint.weights_reader import StateDictReader, WeightsReader
from shardwise.errors import CheckpointError, UsageError
from shardwise.registry import LogicalTensor
from shardwise.utils.logging import logger

Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""Name in the files -> name in the model; None leaves the tensor out. Names absent from a mapping are unchanged."""


class LoadedWeights(NamedTuple):
    """Names that did not match: `missing` parameters and buffers, which the files lack, keep their values; `unexpected`
    are tensors of the files that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


def load_weights(
    model: CheckpointedModel,
    path: Any,
    *,
    tag: str | int | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedWeights:
    """Read weights that `open_source` reads, with equal `path` and `tag` on all ranks, into the model. A collective.

    Raises CheckpointError if names (with `strict`) or shapes do not match, or files cannot be read or differ between
    ranks. Nothing has changed then, unless an opened file became unreadable.
    """
    comm = model.comm
    what = f"loading weights from {path}"
    source: WeightsReader | None = None
    try:
        with collective_step(comm, what):
            source = open_source(path, tag)
        assert source is not None
        listed = sorted((tensor.name, tensor.shape, tensor.dtype) for tensor in source.tensors().values())
        if not same_on_all(comm, listed, "checkpoint"):
            raise CheckpointError(f"{what}: ranks see different tensors under this path; all need the same files")
        with collective_step(comm, what):
            known, left_out = _renamed(source, rename)
        elsewhere = _names_of_any(model, list(known), what)
        with collective_step(comm, what):
            matched = _match(model, source, strict, known, left_out, elsewhere)
            wanted = {tensor.name: tensor for _, tensor in (*matched.parameters, *matched.buffers)}
            wanted |= {known[name].name: known[name] for name in elsewhere}
            source.check([wanted[name] for name in sorted(wanted)[comm.rank :: comm.world]])
        _check_tied(model, source, known, matched, strict, what)
        _read(model, source, matched, what)
    finally:
        if source is not None:
            source.close()
    model.publish()
    return LoadedWeights(list(matched.report.missing), list(matched.report.unexpected))


def load_state_dict(
    model: CheckpointedModel, values: Mapping[str, Any], *, strict: bool = True, may_lack: frozenset[str] = frozenset()
) -> None:
    """Load a state dict of the plain module, the same on all ranks, in full precision into master weights. A
    collective. `strict` requires the same names, except those that `may_lack`. Raises CheckpointError if names or
    shapes do not match; nothing has changed then.
    """
    what = "loading a state dict"
    elsewhere = _names_of_any(model, list(values), what)
    extra = {extra_name(name): module for name, module in extra_states(model.module)}
    others = {name: value for name, value in values.items() if name not in extra and name not in elsewhere}
    source = StateDictReader({name: value for name, value in values.items() if isinstance(value, torch.Tensor)})
    known = {name: source.tensors()[name] for name in source.tensors() if name not in extra}
    with collective_step(model.comm, what):
        strange = [name for name in others if name not in known]
        matched = _match(model, source, strict, known, set(extra), elsewhere, may_lack, strange)
    _check_tied(model, source, known, matched, strict, what)
    _read(model, source, matched, what)
    with collective_step(model.comm, what):
        for name, module in extra.items():
            if name in values:
                module.set_extra_state(values[name])
    model.publish()


def _read(model: CheckpointedModel, source: WeightsReader, matched: LoadPlan, what: str) -> None:
    model.finish_gathers()
    with collective_step(model.comm, what), torch.no_grad():
        read_module(model, source, matched)


def _check_tied(
    model: CheckpointedModel,
    source: WeightsReader,
    known: Mapping[str, StoredTensor],
    matched: LoadPlan,
    strict: bool,
    what: str,
) -> None:
    """Compare the tensors that names of one parameter have, each rank those of its shard (a collective). Raises
    CheckpointError if they differ; without `strict` it is logged, and the first is taken.
    """
    values = model.value_runs()

    def equal(tensor: LogicalTensor, first: StoredTensor, other: StoredTensor) -> bool:
        if first.shape != other.shape:
            return False
        for start, _, view in values.get(tensor.index, ()):
            found = [torch.empty_like(view), torch.empty_like(view)]
            for stored, out in zip((first, other), found, strict=True):
                source.read_into(stored.part(model.box_of(tensor)), start, out)
            if not torch.equal(*found):
                return False
        return True

    with collective_step(model.comm, what) as compared:
        compared.local = [
            f"{first.name} and {other.name}"
            for tensor, first in matched.parameters
            for other in {known[name].name: known[name] for name in tensor.aliases if name in known}.values()
            if other is not first and not equal(tensor, first, other)
        ]
    if different := list(dict.fromkeys(pair for pairs in compared.gathered for pair in pairs)):
        message = f"{source.path}: has different tensors for one (tied) parameter of the model: {outline(different)}"
        if strict:
            raise CheckpointError(f"{message}. Untie it, leave the other names out, or pass strict=False for the first")
        if model.comm.rank == 0:
            logger.warning("%s; the first is taken", message)


def _names_of_any(model: CheckpointedModel, names: Sequence[str], what: str) -> set[str]:
    """Return those of some given names that a parameter, buffer or extra state of any rank has; empty if all ranks have
    the same modules. A collective. Raises UsageError if ranks give other names.
    """
    if model.pass_group.world == model.comm.world and not is_divided(model):
        return set()
    if not same_on_all(model.comm, list(names), what):
        raise UsageError(f"{what}: ranks give different names; give every rank the same names in the same order")
    return held_by_any(model.comm, names, set(names_of(model)), what)


def _renamed(source: WeightsReader, rename: Rename | None) -> tuple[dict[str, StoredTensor], set[str]]:
    found: dict[str, StoredTensor] = {}
    left_out: set[str] = set()
    for name, tensor in source.by_any_name().items():
        new = name if rename is None else rename(name) if callable(rename) else rename.get(name, name)
        if new is None:
            left_out.add(tensor.name)
            continue
        if not isinstance(new, str):
            raise CheckpointError(f"rename: expected a name or None for {name!r}, found {new!r}")
        if new in found and found[new] is not tensor:
            raise CheckpointError(f"rename: both {found[new].name!r} and {tensor.name!r} become {new!r}")
        found[new] = tensor
    return found, left_out


def _match(
    model: CheckpointedModel,
    source: WeightsReader,
    strict: bool,
    known: Mapping[str, StoredTensor],
    left_out: set[str],
    elsewhere: Collection[str],
    may_lack: Collection[str] = (),
    strange: Sequence[str] = (),
) -> LoadPlan:
    """Match names and shapes. `elsewhere` are names that other ranks have, `strange` names without a tensor."""
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()

    def take(names: tuple[str, ...], shape: tuple[int, ...]) -> StoredTensor | None:
        found = next((known[name] for name in names if name in known), None)
        used.update(known[name].name for name in names if name in known)
        if found is None:
            missing.extend(names[:1] if set(names).isdisjoint(may_lack) else ())
        elif found.shape != shape:
            wrong.append(f"{names[0]} (given {list(found.shape)}, model {list(shape)})")
        return found

    parameters = [(tensor, take((tensor.name, *tensor.aliases), tensor.global_shape)) for tensor in model.registry]
    shared = buffer_names(model.module)
    held = [(buffer, take(tuple(shared[id(buffer)]), tuple(buffer.shape))) for _, buffer in buffers(model.module)]
    used |= {known[name].name for name in elsewhere if name in known} | left_out
    unexpected = [*(tensor.name for tensor in source.tensors().values() if tensor.name not in used), *strange]
    problems = [f"of another shape: {outline(wrong)}"] if wrong else []
    if strict and missing:
        problems.append(f"missing: {outline(missing)}")
    if strict and unexpected:
        problems.append(f"not in the model: {outline(unexpected)}")
    if problems:
        hint = "" if wrong else "; pass rename=... where names differ, or strict=False to load what fits"
        raise CheckpointError(f"{source.path}: does not fit the model: {'; '.join(problems)}{hint}")
    return LoadPlan(
        LoadReport(source.path, missing=tuple(missing), unexpected=tuple(unexpected)),
        [(tensor, stored) for tensor, stored in parameters if stored is not None],
        [(buffer, stored) for buffer, stored in held if stored is not None],
    )
