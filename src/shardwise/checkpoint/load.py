"""Loading: the joint action of all ranks that brings a checkpoint back, into any layout.

    choose     rank 0 says which checkpoint; all open its manifest and match it with the model by name
    verify     the ranks share out the blocks of the files and compare them with their checksums
    read       each rank reads what it holds, by name and range, whatever files that lies in
    publish    low-precision copies and whole values are brought up to date

Nothing of the engine is changed before the first two have succeeded on every rank, so a checkpoint that is
damaged or belongs to another model leaves the engine as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint import directory, manifest
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.match import Matched, StateOf, match_module, match_optimizer
from shardwise.checkpoint.protocols import ShardedModel
from shardwise.checkpoint.reader import Checkpoint
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group settings that say how the step is computed on a device, not what; the engine keeps its own."""


@dataclass(frozen=True)
class Options:
    """What to load.

    Attributes:
        strict: names of parameters and buffers must be the same in model and checkpoint.
        optimizer: load the optimizer's state and settings.
        module_only: read nothing but parameters and buffers.
        custom: parameters and buffers are loaded by somebody else; they are verified but not matched.
        verify: compare bytes with their checksums; somebody else has if not.
    """

    strict: bool = True
    optimizer: bool = True
    module_only: bool = False
    custom: bool = False
    verify: bool = True


@dataclass
class Loaded:
    """What has been read besides tensors of the model and the optimizer, as plain Python values.

    Attributes:
        path: directory of the checkpoint.
        manifest: its manifest.
        client: the user's own state.
        scheduler: state of the schedule, or None.
        scaler: state of the loss scaler, or None.
        rank: this rank's own state; None if the checkpoint has no such rank.
        first: rank 0's own state; None if the checkpoint is of as many ranks as there are.
    """

    path: str
    manifest: Manifest
    client: Any = None
    scheduler: Any = None
    scaler: Any = None
    rank: Any = None
    first: Any = None


def find(model: ShardedModel, parent: str, tag: str | None, options: Options) -> tuple[Checkpoint, Matched] | None:
    """Choose, open, match and verify a checkpoint; all ranks call this together.

    Args:
        model: the model to be loaded.
        parent: directory of checkpoints.
        tag: which one; None: the one that `latest` names, or if that is damaged the newest one that is not.
        options: what will be loaded.

    Returns:
        The checkpoint, verified, and what goes where; None if `tag` is None and there is no `latest`.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete, damaged, or of another model.
    """
    what = f"loading a checkpoint from {parent}"
    skipped: list[str] = []
    candidates = _candidates(parent, tag)
    while True:
        with phase(model.comm, model.device, what) as choice:
            if model.comm.rank == 0:
                choice.said = next(candidates, None)
        chosen = choice.heard[0]
        if chosen is None and not skipped:
            if model.comm.rank == 0:
                logger.warning(
                    "%s: there is no %r file, so no checkpoint is loaded. Checkpoints there: %s; name one by its tag "
                    "to load it",
                    parent,
                    directory.LATEST,
                    manifest.outline(directory.other_tags(parent)) or "none",
                )
            return None
        if chosen is None:
            raise CheckpointError(f"{parent}: no checkpoint can be loaded. " + " | ".join(skipped))
        result = _try(model, os.path.join(parent, chosen), what, options)
        if not isinstance(result, CheckpointError):
            if skipped and model.comm.rank == 0:
                logger.warning("%s: %s is loaded instead", parent, chosen)
            return result
        if tag is not None:
            if not os.path.isdir(os.path.join(parent, tag)):
                others = manifest.outline(directory.other_tags(parent)) or "none"
                raise CheckpointError(f"{result}. Checkpoints in {parent}: {others}") from result
            raise result
        skipped.append(str(result))
        if model.comm.rank == 0:
            logger.warning("%s: checkpoint %s is skipped: %s", parent, chosen, result)


def _try(model: ShardedModel, path: str, what: str, options: Options) -> tuple[Checkpoint, Matched] | CheckpointError:
    """Open, match and verify one checkpoint; return the error if it is incomplete or damaged."""
    saved: Checkpoint | None = None
    try:
        try:
            with phase(model.comm, model.device, what) as opened:
                saved = Checkpoint(path)
                opened.said = saved.manifest.created
            assert saved is not None
            if len(set(opened.heard)) > 1:
                raise CheckpointError(
                    f"{path}: ranks see different checkpoints under this path (saved at {sorted(set(opened.heard))}); "
                    "it must be on a file system that all ranks share"
                )
        except CheckpointError as error:
            return error
        with phase(model.comm, model.device, what):
            matched = Matched([], [], [])
            if not options.custom:
                matched = match_module(model, saved.manifest, path, strict=options.strict)
            if options.optimizer and not options.module_only and model.optimizer is not None:
                matched.states = match_optimizer(model, saved.manifest, path)
        try:
            with phase(model.comm, model.device, what):
                if options.verify:
                    _verify_share(model, saved, saved.manifest.of_module() if options.module_only else None)
        except CheckpointError as error:
            return error
        found, saved = saved, None
        return found, matched
    finally:
        if saved is not None:
            saved.close()


def _candidates(parent: str, tag: str | None) -> Iterator[str]:
    if tag is not None:
        yield tag
        return
    damaged: CheckpointError | None = None
    latest: str | None = None
    try:
        latest = directory.read_latest(parent)
        if latest is None:
            return
        yield latest
    except CheckpointError as error:
        damaged = error
        logger.warning("%s; the newest complete checkpoint is looked for", error)
    ages: dict[str, float] = {}
    for name in directory.other_tags(parent):
        try:
            ages[name] = manifest.load(os.path.join(parent, name)).created
        except CheckpointError as error:
            if name != latest:
                logger.warning("%s", error)
    ages.pop(latest or "", None)
    yield from sorted(ages, key=lambda name: -ages[name])
    if damaged is not None and not ages:
        raise damaged


def _verify_share(model: ShardedModel, saved: Checkpoint, tensors: list[manifest.StoredTensor] | None) -> None:
    """Check this rank's share of the files and blocks."""
    rank, world = model.comm.rank, model.comm.world
    saved.check_sizes(sorted(saved.manifest.files)[rank::world])
    blocks = saved.blocks(tensors)
    saved.verify(blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world])


def read(model: ShardedModel, saved: Checkpoint, matched: Matched, options: Options) -> Loaded:
    """Read a checkpoint that `find` has returned into the model and its optimizer; all ranks call this together.

    Raises:
        CheckpointError: a file can no longer be read. The engine is then partly loaded and must not be used.
    """
    what = f"loading checkpoint {saved.path}"
    model.finish_gathers()
    with phase(model.comm, model.device, what), torch.no_grad():
        values = model.value_runs()
        for tensor, stored in matched.parameters:
            for start, _, view in values.get(tensor.index, ()):
                saved.read_into(stored, start, view)
        for buffer, stored in matched.buffers:
            buffer.copy_(saved.read(stored))
        for module, tree in matched.extra:
            module.set_extra_state(saved.decode(tree))
    model.publish()
    loaded = Loaded(saved.path, saved.manifest)
    with phase(model.comm, model.device, what):
        if matched.states is not None:
            _read_optimizer(model, saved, matched.states)
        loaded.client = saved.decode(saved.manifest.client)
        if not options.module_only:
            ranks = saved.manifest.ranks
            loaded.scheduler = saved.decode(saved.manifest.scheduler)
            loaded.scaler = saved.decode(saved.manifest.scaler)
            loaded.rank = saved.decode(ranks[model.comm.rank]) if model.comm.rank < len(ranks) else None
            if len(ranks) != model.comm.world:
                loaded.first = saved.decode(ranks[0])
    return loaded


def _read_optimizer(model: ShardedModel, saved: Checkpoint, states: dict[int, StateOf]) -> None:
    update, optimizer = model.update, model.optimizer
    assert update is not None and optimizer is not None and saved.manifest.optimizer is not None
    for group, tree in zip(optimizer.param_groups, saved.manifest.optimizer["groups"], strict=True):
        _set_group(group, saved.decode(tree))
    update.clear_state()
    held = model.value_runs()
    for index, state in states.items():
        if not held.get(index):
            continue
        whole = {key: saved.decode(tree) for key, tree in state.values.items()}
        whole |= {key: saved.read(stored) for key, stored in state.whole.items()}
        update.make_state(index, {key: stored.torch_dtype for key, stored in state.elementwise.items()}, whole)
        for key, stored in state.elementwise.items():
            for start, _, view in update.state_pieces(index, key):
                saved.read_into(stored, start, view)


def _set_group(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name in _IMPLEMENTATION:
            continue
        current = group.get(name)
        if isinstance(current, torch.Tensor):
            # Filled in place: compiled and graph-captured steps read that very tensor.
            current.detach().copy_(torch.as_tensor(value))
        elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
            group[name] = value.item()
        else:
            group[name] = value
