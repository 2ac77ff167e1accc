"""Import: weights of other programs directly into the shards of an engine.

Every rank reads its shards, by name and range, into its master weights. No rank has the unsharded model, and all ranks
together need only the model's memory. Names are matched before anything changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import buffer_names, buffers
from shardwise.checkpoint.manifest import outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.source import Source, SourceTensor
from shardwise.checkpoint.weights import names_of_any
from shardwise.errors import CheckpointError
from shardwise.registry import LogicalTensor

Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""Name in the files -> name in the model; None leaves the tensor out. Names absent from a mapping are unchanged."""


class LoadedWeights(NamedTuple):
    """Names that did not match: `missing` parameters and buffers, which the files lack, keep their values; `unexpected`
    are tensors of the files that the model lacks.
    """

    missing: list[str]
    unexpected: list[str]


class _Match(NamedTuple):
    parameters: list[tuple[LogicalTensor, str]]
    buffers: list[tuple[torch.Tensor, str]]
    differing: LoadedWeights
    others: set[str]


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
    source: Source | None = None
    try:
        with collective_step(comm, what) as opened:
            source = open_source(path, tag)
            opened.local = _digest(source)
        assert source is not None
        if len(set(opened.gathered)) > 1:
            raise CheckpointError(f"{what}: ranks see different tensors under this path; all need the same files")
        with collective_step(comm, what):
            known, left_out = _renamed(source, rename)
        elsewhere = names_of_any(model, list(known), what)
        with collective_step(comm, what):
            matched = _match(model, source, strict, known, left_out, elsewhere)
            _verify_share(model, source, matched)
        model.finish_gathers()
        with collective_step(comm, what), torch.no_grad():
            runs = model.value_runs()
            for indices in model.iter_resident():
                for tensor, name in matched.parameters:
                    for start, _, view in runs.get(tensor.index, ()) if tensor.index in indices else ():
                        source.read_part(name, model.box_of(tensor), start, view)
            for buffer, name in matched.buffers:
                flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                source.read_into(name, 0, flat)
                buffer.copy_(flat.view(buffer.shape))
    finally:
        if source is not None:
            source.close()
    model.publish()
    return matched.differing


def _digest(source: Source) -> str:
    listed = sorted((t.name, list(t.shape), str(t.dtype)) for t in source.tensors().values())
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()


def _renamed(source: Source, rename: Rename | None) -> tuple[dict[str, SourceTensor], set[str]]:
    found: dict[str, SourceTensor] = {}
    left_out: set[str] = set()
    for name, tensor in source.by_any_name().items():
        if rename is None:
            new: str | None = name
        elif callable(rename):
            new = rename(name)
        else:
            new = rename.get(name, name)
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
    source: Source,
    strict: bool,
    known: Mapping[str, SourceTensor],
    left_out: set[str],
    elsewhere: set[str],
) -> _Match:
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()

    def take(names: tuple[str, ...], shape: tuple[int, ...]) -> str | None:
        found = next((known[name] for name in names if name in known), None)
        used.update(known[name].name for name in names if name in known)
        if found is None:
            missing.append(names[0])
            return None
        if found.shape != shape:
            wrong.append(f"{names[0]} (files {list(found.shape)}, model {list(shape)})")
        return found.name

    parameters = [(tensor, take((tensor.name, *tensor.aliases), tensor.global_shape)) for tensor in model.registry]
    shared = buffer_names(model.module)
    held = [(buffer, take(tuple(shared[id(buffer)]), tuple(buffer.shape))) for _, buffer in buffers(model.module)]
    others = {known[name].name for name in elsewhere}
    unexpected = [tensor.name for tensor in source.tensors().values() if tensor.name not in used | left_out | others]
    problems = [f"of another shape: {outline(wrong)}"] if wrong else []
    if strict and missing:
        problems.append(f"missing in the files: {outline(missing)}")
    if strict and unexpected:
        problems.append(f"not in the model: {outline(unexpected)}")
    if problems:
        hint = "" if wrong else "; pass rename=... where names differ, or strict=False to load what fits"
        raise CheckpointError(f"{source.path}: does not fit the model: {'; '.join(problems)}{hint}")
    return _Match(
        [(tensor, name) for tensor, name in parameters if name is not None],
        [(buffer, name) for buffer, name in held if name is not None],
        LoadedWeights(missing, unexpected),
        others,
    )


def _verify_share(model: CheckpointedModel, source: Source, matched: _Match) -> None:
    names = sorted({name for _, name in (*matched.parameters, *matched.buffers)} | matched.others)
    source.verify(names[model.comm.rank :: model.comm.world])
