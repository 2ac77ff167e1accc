"""Loading a checkpoint into any layout, collectively.

Rank 0 chooses a checkpoint. Each rank matches the manifest with its own part of the model, by name: a plan of all ranks
on one rank would need the names and boxes of all. Ranks only mark the names that they have in a list that all know from
the manifest: 8 bytes each. They divide the blocks of the requested tensors, and verify checksums. Nothing of the engine
changes before this has succeeded on every rank. Then each rank reads its shards, by name and range, from any files,
into place, and unsharded and low-precision values are updated.

If an engine has no optimizer state yet (a resumed job), state is read into its memory during verification, because it
overwrites nothing, and is dropped if the checkpoint is refused. Other values are read later, from the page cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.checkpoint import directory, manifest, match
from shardwise.checkpoint.agree import collective_step, held_by_any, same_on_all
from shardwise.checkpoint.formats.deepspeed.index import recognised
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.manifest import OPTIMIZER, Manifest, StoredTensor
from shardwise.checkpoint.match import LoadPlan, LoadReport, OptimizerStatePlan, Options, RemoteNames
from shardwise.checkpoint.places import counterparts
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.reader import Block, Checkpoint
from shardwise.checkpoint.selection import Renamed, names_in, rename
from shardwise.checkpoint.weights_reader import Run, WeightsReader
from shardwise.errors import CheckpointError, UsageError
from shardwise.utils.logging import logger

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group settings that select an implementation of the step; the engine keeps its own."""


class NoCompleteCheckpointError(CheckpointError):
    """All tried checkpoints are incomplete or damaged."""


@dataclass
class Loaded:
    """State except tensors of the model and the optimizer, as plain Python values. `client` is the user's. `rank` is
    that of the rank at this rank's coordinates; None if the checkpoint has no such rank. `line` is that of a rank with
    this rank's share of the samples, else rank 0's. `rng` has the random number generators to restore, or None;
    `with_torch`: torch's, too. `same`: the checkpoint is of the same mesh.
    """

    path: str
    manifest: Manifest
    client: Any = None
    scheduler: Any = None
    scaler: Any = None
    loader: Any = None
    rank: Any = None
    line: Any = None
    rng: Any = None
    with_torch: bool = True
    same: bool = True


def find(
    model: CheckpointedModel,
    parent: str,
    tag: str | None,
    options: Options,
    opened: Callable[[str], Checkpoint] = Checkpoint,
    check: Callable[[Checkpoint], None] = lambda saved: None,
) -> tuple[Checkpoint, LoadPlan] | None:
    """Choose, open, match and verify a checkpoint; return it with its plan for `read`. A collective. Without a tag it
    is the first complete one, in the order of `shardwise.checkpoint.listing`; None if there is none. `check`
    raises a CheckpointError if state outside of the model cannot continue from a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, or of another model.
        UsageError: ranks would load different tensors.
    """
    what = f"loading a checkpoint from {parent}"
    skipped: list[str] = []
    with collective_step(model.comm, what) as choice:
        if model.comm.rank == 0:
            choice.local = _candidates(parent, tag) if options.order is None else list(options.order)
    for chosen in choice.gathered[0]:
        result = _try(model, os.path.join(parent, chosen), what, options, opened, check)
        if not isinstance(result, CheckpointError):
            if skipped and model.comm.rank == 0:
                logger.warning("%s: %s is loaded instead", parent, chosen)
            result[1].report = replace(result[1].report, passed_over=tuple(skipped))
            return result
        if tag is not None:
            if not os.path.isdir(os.path.join(parent, tag)):
                others = manifest.outline(_tags(parent)) or "none"
                raise CheckpointError(f"{result}. Checkpoints in {parent}: {others}") from result
            raise result
        skipped.append(str(result))
        if model.comm.rank == 0:
            logger.warning("%s: checkpoint %s is skipped: %s", parent, chosen, result)
    if skipped:
        raise NoCompleteCheckpointError(f"{parent}: no checkpoint can be loaded. " + " | ".join(skipped))
    if model.comm.rank == 0:
        tags = manifest.outline(_tags(parent))
        others = f". Checkpoints of other libraries there: {tags}; name one by its tag to load it" if tags else ""
        logger.warning(
            "%s: there is neither a checkpoint nor a file %r, so nothing is loaded%s", parent, directory.LATEST, others
        )
    return None


def _try(
    model: CheckpointedModel,
    path: str,
    what: str,
    options: Options,
    opened: Callable[[str], Checkpoint],
    check: Callable[[Checkpoint], None],
) -> tuple[Checkpoint, LoadPlan] | CheckpointError:
    saved: Checkpoint | None = None
    matched: LoadPlan | None = None
    try:
        try:
            with collective_step(model.comm, what) as opening:
                saved = opened(path)
                opening.local = [saved.manifest.created, _groups(model)]
            assert saved is not None
            times = {created for created, _ in opening.gathered}
            if len(times) > 1:
                raise CheckpointError(
                    f"{path}: ranks see different checkpoints under this path (saved at {sorted(times)}); "
                    "it must be on a file system that all ranks share"
                )
        except CheckpointError as error:
            return error
        with collective_step(model.comm, what):
            renamed = rename(saved.manifest, options.selection, path)
        elsewhere = _elsewhere(model, renamed, options, path, max(groups for _, groups in opening.gathered))
        with collective_step(model.comm, what):
            matched = _match(model, saved, renamed, options, elsewhere)
            check(saved)
        assert matched is not None
        try:
            if options.verify:
                _verify(model, saved, renamed.manifest, matched, options, what)
        except CheckpointError as error:
            return error
        found, saved = saved, None
        return found, matched
    finally:
        if saved is not None:
            saved.close()
            if matched is not None and matched.left is not None and model.update is not None:
                model.update.clear_state()


def _groups(model: CheckpointedModel) -> int:
    return 0 if model.optimizer is None else len(model.optimizer.param_groups)


def _elsewhere(model: CheckpointedModel, renamed: Renamed, options: Options, path: str, groups: int) -> RemoteNames:
    """Return the checkpoint's names that only other ranks have. A collective: ranks compare their requests, and each
    marks the names that it has in a list of the names in the checkpoint; no rank sends names.
    """
    selection, own = options.selection, match.names_of(model)
    listed = sorted(set(names_in(renamed.manifest)))
    patterns = selection.unused_patterns(())
    others = [options.strict, options.optimizer, options.module_only, options.custom, options.settings]
    if not same_on_all(model.comm, [listed, patterns, others, sorted(options.fresh)], "checkpoint"):
        raise UsageError(
            f"{path}: ranks would load different tensors; pass the same include, exclude and rename on every rank, and "
            "the same other arguments"
        )
    used = set(patterns).difference(selection.unused_patterns(own))
    found = held_by_any(model.comm, [*listed, *patterns], {*own, *used}, "checkpoint")
    return RemoteNames(frozenset(found.intersection(listed).difference(own)), groups, found.intersection(patterns))


def _match(
    model: CheckpointedModel, saved: Checkpoint, renamed: Renamed, options: Options, elsewhere: RemoteNames
) -> LoadPlan:
    if options.custom:
        names = [tensor.name for tensor in saved.manifest.of_module() if tensor.rank is None]
        matched = LoadPlan(LoadReport(saved.path, loaded=tuple(names)))
    else:
        matched = match.match_module(model, renamed, saved.path, options, elsewhere)
    if options.with_optimizer and model.optimizer is not None:
        matched.states, notes = match.match_optimizer(model, renamed.manifest, saved.path, options, elsewhere)
        matched.report = replace(matched.report, optimizer=True, notes=tuple(notes))
    return matched


def _tags(parent: str) -> list[str]:
    with contextlib.suppress(OSError):
        others = [name for name in os.listdir(parent) if recognised(os.path.join(parent, name))]
        return sorted({*CheckpointDirectory(parent).tags_if_any(), *others})
    return []


def _candidates(parent: str, tag: str | None) -> list[str]:
    if tag is not None:
        return [tag]
    there = CheckpointDirectory(parent)
    found = there.newest_first()
    for note in found.notes:
        logger.warning("%s", note)
    universal = None if found.tags else there.latest(directory.LATEST_UNIVERSAL)
    if not found.tags and universal is None and recognised(parent):
        raise directory.wrong_level(parent)
    return found.tags if universal is None else [universal]


def _verify(
    model: CheckpointedModel, saved: Checkpoint, named: Manifest, matched: LoadPlan, options: Options, what: str
) -> None:
    """Verify this rank's share of files and blocks, and read state into memory that is free to use. `named` is the
    manifest with the model's names.
    """
    rank, world = model.comm.rank, model.comm.world
    with collective_step(model.comm, what):
        saved.check_sizes(sorted(saved.manifest.files)[rank::world])
        own = _share(saved, named, options, rank, world)
        fresh = model.optimizer is not None and not any(model.optimizer.state.values())
        if matched.states is not None and fresh and not model.is_offloaded:
            matched.left = []
            matched.left = _StateMaker(model, matched.states).make(range(len(model.registry)))
        places, rest = saved.places(matched.left or ())
        saved.verify(own, places)
        if matched.left is not None:
            verified = set(own)
            matched.left = rest + [run for block, run in places.items() if block not in verified]


def _share(saved: Checkpoint, named: Manifest, options: Options, rank: int, world: int) -> list[Block]:
    """Return the blocks of requested tensors that a rank verifies, each once over all ranks: those of its own file if
    as many ranks have saved. With more files a rank has several, with more ranks several ranks divide a file.
    """
    files, wants = saved.files(), options.selection.wants
    wanted: list[StoredTensor] | None = None
    if not (options.with_optimizer and options.selection.everything):
        wanted = [tensor for tensor in named.of_module() if wants((tensor.name, *tensor.aliases))]
        wanted += named.of_kind(OPTIMIZER) if options.with_optimizer else []
    trees, count = _trees(saved.manifest, options), len(files)
    if count >= world:
        return saved.blocks(wanted, trees, files[rank::world])
    sharers = range(rank % count, world, count)
    return saved.blocks(wanted, trees, [files[rank % count]])[rank // count :: len(sharers)]


def _trees(saved: Manifest, options: Options) -> list[Any]:
    read = replace(saved, scheduler=None, scaler=None, loader=None, ranks=[]) if options.module_only else saved
    return (read if options.with_optimizer else replace(read, optimizer=None)).trees()


def read(model: CheckpointedModel, saved: Checkpoint, matched: LoadPlan, options: Options) -> Loaded:
    """Read a checkpoint that `find` has returned into the model and its optimizer. A collective.

    Raises CheckpointError if a value's class is missing, with the engine unchanged; or if a file can no longer be read.
    The engine is then partly loaded and must not be used.
    """
    what = f"loading checkpoint {saved.path}"
    loaded = Loaded(saved.path, saved.manifest)
    with collective_step(model.comm, what):
        loaded.client = saved.decode(saved.manifest.client)
        extra = [(module, saved.decode(tree)) for module, tree in matched.extra]
        if not options.module_only:
            ranks = saved.manifest.ranks
            loaded.scheduler = saved.decode(saved.manifest.scheduler)
            loaded.scaler = saved.decode(saved.manifest.scaler)
            kept = saved.manifest.loader
            loaded.loader = saved.decode(ranks[0].get("loader") if kept is None else kept)
            found = counterparts(saved.manifest, model.place, model.comm.rank, model.comm.world)
            loaded.same, loaded.with_torch = found.same, found.with_torch
            loaded.rng = None if found.random is None else saved.decode(ranks[found.random]["rng"])
            loaded.rank = None if found.own is None else saved.decode(ranks[found.own])
            near = found.own if found.own in found.line else min(found.line, default=0)
            loaded.line = loaded.rank if near == found.own else saved.decode(ranks[near])
    model.finish_gathers()
    with collective_step(model.comm, what), torch.no_grad():
        read_module(model, saved, matched)
        for module, state in extra:
            module.set_extra_state(state)
    model.publish()
    with collective_step(model.comm, what):
        if matched.states is not None:
            _read_optimizer(model, saved, matched, options)
    return loaded


def read_module(model: CheckpointedModel, saved: WeightsReader, matched: LoadPlan) -> None:
    """Read parameters and buffers into the model, without gathers under way."""
    values = model.value_runs()
    runs = [(stored, 0, buffer.view(-1)) for buffer, stored in matched.buffers if buffer.is_contiguous()]
    for indices in model.iter_resident():
        runs += [
            (stored.part(model.box_of(tensor)), start, view)
            for tensor, stored in matched.parameters
            if tensor.index in indices
            for start, _, view in values.get(tensor.index, ())
        ]
        saved.read_all(runs)
        runs = []
    for buffer, stored in matched.buffers:
        if not buffer.is_contiguous():
            buffer.copy_(saved.read(stored))


def _read_optimizer(model: CheckpointedModel, saved: Checkpoint, matched: LoadPlan, options: Options) -> None:
    update, optimizer, states, left = model.update, model.optimizer, matched.states or {}, matched.left
    assert update is not None and optimizer is not None and saved.manifest.optimizer is not None
    trees = saved.manifest.optimizer["groups"]
    if options.settings:
        numbers = match.saved_groups(model, trees, saved.path)
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            if number is not None and number < len(trees):
                set_group(group, saved.decode(trees[number]))
    else:
        for group in optimizer.param_groups:
            set_group(group, match.group_counters(model, trees, saved.path))
        for name in getattr(optimizer, "first_group_state", ()):
            set_group(optimizer.param_groups[0], {name: saved.decode(trees[0][name])})
    if left is not None:
        saved.read_all(left)
    else:
        maker = _StateMaker(model, states)
        for indices in model.iter_resident():
            saved.read_all(maker.make(indices))
    held = model.value_runs()
    for index, state in states.items():
        if held.get(index):
            whole = {key: saved.decode(tree) for key, tree in state.values.items()}
            whole |= {key: saved.read(stored) for key, stored in state.whole.items()}
            update.make_state(index, {}, whole)


class _StateMaker:
    """Clears all optimizer state, and allocates the planned state with one value per element."""

    def __init__(self, model: CheckpointedModel, states: dict[int, OptimizerStatePlan]) -> None:
        update, optimizer = model.update, model.optimizer
        assert update is not None and optimizer is not None
        self._model, self._states = model, states
        model.cut_states({index: state.values for index, state in states.items()})
        # Parameters that share memory may have been saved with different entries; a missing entry is zero.
        self._filled = len({frozenset(state.elementwise) for state in states.values()}) == 1
        dtypes = {(key, stored.torch_dtype) for state in states.values() for key, stored in state.elementwise.items()}
        self._fits: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        if self._filled and len(dtypes) == len({key for key, _ in dtypes}) and not model.is_offloaded:
            # Returning memory to the system and taking it again would be slower than reading a file.
            for stepped, entries in optimizer.state.items():
                tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
                self._fits[stepped] = {
                    key: value
                    for key, value in tensors.items()
                    if (key, value.dtype) in dtypes and (value.shape, value.device) == (stepped.shape, stepped.device)
                }
        update.clear_state()
        optimizer.state.update(self._fits)
        self._held = model.value_runs()

    def make(self, indices: Collection[int]) -> list[Run]:
        update, optimizer = self._model.update, self._model.optimizer
        assert update is not None and optimizer is not None
        runs: list[Run] = []
        for index, state in self._states.items():
            if index in indices and self._held.get(index):
                made = {key: stored.torch_dtype for key, stored in state.elementwise.items()}
                update.make_state(index, made, {}, filled=self._filled)
                for key, stored in state.elementwise.items():
                    part = stored.part(self._model.box_of(self._model.registry[index]))
                    runs += [(part, start, view) for start, _, view in update.state_pieces(index, key)]
        used = {out.untyped_storage().data_ptr() for _, _, out in runs}
        for stepped, entries in self._fits.items():
            if not any(value.untyped_storage().data_ptr() in used for value in entries.values()):
                del optimizer.state[stepped]  # of padding only: a new engine has no state for it either
        self._fits = {}
        return runs


def set_group(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set settings of a parameter group, tensors in place, except those that each engine keeps."""
    for name, value in settings.items():
        if name in _IMPLEMENTATION or name == match.PARAM_NAMES:
            continue
        current = group.get(name)
        if isinstance(current, torch.Tensor) and value is not None:
            # Filled in place, because compiled and graph-captured steps read that tensor.
            current.detach().copy_(torch.as_tensor(value, dtype=current.dtype, device=current.device))
        elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
            group[name] = value.item()
        else:
            group[name] = value
