"""Matching a checkpoint with the model to load: by name, before anything changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.checkpoint.collect import all_buffers, are_named, buffer_names, buffers, extra_states
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Manifest, StoredTensor, by_any_name, outline
from shardwise.checkpoint.places import counterparts
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.selection import Renamed, Selection, extra_name, names_in
from shardwise.checkpoint.weights_reader import Run
from shardwise.errors import CheckpointError
from shardwise.registry import LogicalTensor


class WrongShape(NamedTuple):
    """A tensor with different shapes in checkpoint and model."""

    name: str
    checkpoint: tuple[int, ...]
    model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (checkpoint {list(self.checkpoint)}, model {list(self.model)})"


@dataclass(frozen=True)
class LoadReport:
    """Result of `engine.load_checkpoint`, in names of the model; the same on every rank.

    Attributes:
        loaded: parameters, buffers and extra state that were read (or passed to `custom_load_fn`).
        missing: in the model only; they keep their values.
        unexpected: in the checkpoint only.
        wrong_shape: in both, with different shapes. Nothing is loaded then; the error has the report.
        skipped: not loaded because of `include` and `exclude`.
        left_out: frozen parameters without which the checkpoint was saved; they keep their values.
        renamed: name in the model by name in the checkpoint, where they differ.
        unused: patterns and rules without a match.
        optimizer: whether optimizer state was loaded.
        passed_over: checkpoints that should have been loaded, and why they were not.
        notes: other state that could not be loaded.
    """

    path: str
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shape: tuple[WrongShape, ...] = ()
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    optimizer: bool = False
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether model and checkpoint differ in more than was requested."""
        return bool(self.missing or self.unexpected or self.wrong_shape or self.unused)

    def differences(self, *, strict: bool = True) -> list[str]:
        """Describe the mismatches; without `strict` only those that are never allowed."""
        found = []
        if strict and self.missing:
            found.append(f"missing in the checkpoint: {outline(self.missing)}")
        if strict and self.unexpected:
            found.append(f"not in the model: {outline(self.unexpected)}")
        if self.wrong_shape:
            found.append(f"of another shape: {outline([str(wrong) for wrong in self.wrong_shape])}")
        if strict and self.unused:
            found.append(f"no name is matched by: {outline(self.unused)}")
        return found

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} parameters and buffers loaded"]
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped by include and exclude")
        if self.left_out:
            parts.append(f"{len(self.left_out)} frozen ones, which the checkpoint was saved without, left as they were")
        if self.renamed:
            parts.append(f"{len(self.renamed)} renamed")
        return f"{self.path}: {'; '.join([', '.join(parts), *self.differences(), *self.notes])}"


@dataclass(frozen=True)
class Options:
    """Options of loading.

    Attributes:
        strict: names of parameters and buffers must be the same in model and checkpoint.
        optimizer, settings: load the optimizer's state; with it the settings of parameter groups.
        module_only: read only parameters and buffers.
        custom: the caller loads parameters and buffers; they are verified but not matched.
        selection: names to load, and their new names.
        verify: compare bytes with their checksums, unless the caller has.
        order: checkpoints to try in turn without a tag, on rank 0; None: those of
            `shardwise.checkpoint.listing`.
        fresh: names of parameters and buffers that keep their values, and start without optimizer state.
    """

    strict: bool = True
    optimizer: bool = True
    module_only: bool = False
    custom: bool = False
    settings: bool = True
    selection: Selection = field(default_factory=Selection)
    verify: bool = True
    order: tuple[str, ...] | None = None
    fresh: frozenset[str] = frozenset()

    @property
    def with_optimizer(self) -> bool:
        """Whether optimizer state is loaded."""
        return self.optimizer and not self.module_only


@dataclass
class OptimizerStatePlan:
    """Saved optimizer state of one parameter: elementwise tensors, other tensors (`whole`), other values."""

    elementwise: dict[str, StoredTensor] = field(default_factory=dict)
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoadPlan:
    """Plan of loading: parameters with their stored tensors, buffers with the tensors that this rank reads into them,
    modules with trees of their extra state, and optimizer state by parameter (None: none is loaded). `left` are runs of
    elementwise `states` that are not read yet; None: their memory is not allocated either.
    """

    report: LoadReport
    parameters: list[tuple[LogicalTensor, StoredTensor]] = field(default_factory=list)
    buffers: list[tuple[torch.Tensor, StoredTensor]] = field(default_factory=list)
    extra: list[tuple[nn.Module, Any]] = field(default_factory=list)
    states: dict[int, OptimizerStatePlan] | None = None
    left: list[Run] | None = None


@dataclass(frozen=True)
class RemoteNames:
    """Names of other ranks, which may have other modules.

    Attributes:
        names: those of the checkpoint that only other ranks have (parameters, buffers and extra state); empty if all
            ranks have the same.
        groups: largest number of parameter groups of any rank's optimizer.
        patterns: patterns of the selection, in words, that match a name of some rank's model.
    """

    names: frozenset[str] = frozenset()
    groups: int = 0
    patterns: Collection[str] = ()


def match_module(
    model: CheckpointedModel, renamed: Renamed, path: str, options: Options, elsewhere: RemoteNames
) -> LoadPlan:
    """Find the saved tensor of every selected parameter and buffer; names that only other ranks have are ignored.
    Raises CheckpointError with the report if names, patterns or rules (if `strict`) or shapes do not match.
    """
    selection, fresh = options.selection, options.fresh
    found: dict[str, list[Any]] = defaultdict(list)

    def is_loaded(
        names: Sequence[str], saved: tuple[int, ...] | None, shape: tuple[int, ...], absent: str = "missing"
    ) -> bool:
        kind = "loaded" if saved == shape else absent if saved is None else "wrong_shape"
        kind = kind if selection.wants(names) else "skipped"
        found[kind].append(WrongShape(names[0], saved or (), shape) if kind == "wrong_shape" else names[0])
        return kind == "loaded"

    matched = LoadPlan(LoadReport(path))
    own = names_of(model)
    here = _without(renamed.manifest, elsewhere.names | fresh)
    saved, excluded = by_any_name(here.of_kind(PARAMETER)), set(here.excluded)
    used: set[str] = set()
    for tensor in model.registry:
        names = (tensor.name, *tensor.aliases)
        stored = next((saved[name] for name in names if name in saved), None)
        left_out = not tensor.trainable and not excluded.isdisjoint(names)
        absent, shape = "left_out" if left_out else "missing", None if stored is None else stored.shape
        loaded = is_loaded(names, shape, tensor.global_shape, absent)
        if stored is not None:
            used.add(stored.name)
            matched.parameters += [(tensor, stored)] if loaded else []
    line = counterparts(here, model.place, model.comm.rank, model.comm.world).line
    everybodys = [stored for stored in here.of_kind(BUFFER) if stored.rank is None]
    of_line = {stored.name: stored for stored in here.of_kind(BUFFER) if stored.rank in line}
    saved, shared, modules = by_any_name(everybodys), buffer_names(model.module), dict(extra_states(model.module))
    for name, buffer in buffers(model.module):
        stored = next((saved[known] for known in shared[id(buffer)] if known in saved), None)
        if stored is not None:
            used.add(stored.name)
            stored = of_line.get(stored.name, stored)
        loaded = is_loaded((name,), None if stored is None else stored.shape, tuple(buffer.shape))
        if stored is not None and loaded:
            matched.buffers.append((buffer, stored))
    for module, child in modules.items():
        if is_loaded((extra_name(module),), () if module in here.extra else None, ()):
            matched.extra.append((child, here.extra[module]))
    stored_once = [*here.of_kind(PARAMETER), *everybodys]
    others = [(stored.name, *stored.aliases) for stored in stored_once if stored.name not in used]
    others += [(extra_name(module),) for module in here.extra if module not in modules]
    for names in others:
        found["unexpected" if selection.wants(names) else "skipped"].append(names[0])
    fields: dict[str, Any] = {field: tuple(dict.fromkeys(names)) for field, names in found.items()}
    fields["missing"] = tuple(name for name in found["missing"] if name not in fresh)
    unused = [*renamed.unused]
    if not selection.everything:
        known = selection.unused_patterns([*names_in(renamed.manifest), *own])
        unused += [pattern for pattern in known if pattern not in elsewhere.patterns]
    matched.report = LoadReport(path, renamed=renamed.names, unused=tuple(unused), **fields)
    _check(matched.report, model, renamed.manifest, strict=options.strict)
    return matched


def _without(manifest: Manifest, names: frozenset[str]) -> Manifest:
    if not names:
        return manifest
    tensors = [tensor for tensor in manifest.tensors if names.isdisjoint((tensor.name, *tensor.aliases))]
    extra = {module: tree for module, tree in manifest.extra.items() if extra_name(module) not in names}
    return replace(manifest, tensors=tensors, extra=extra)


def names_of(model: CheckpointedModel) -> list[str]:
    """Return all names of this rank's parameters, buffers and extra state."""
    names = [name for tensor in model.registry for name in (tensor.name, *tensor.aliases)]
    names += [name for name, _ in all_buffers(model.module)]
    return names + [extra_name(name) for name, _ in extra_states(model.module)]


def _check(report: LoadReport, model: CheckpointedModel, manifest: Manifest, *, strict: bool) -> None:
    problems = report.differences(strict=strict)
    if not problems:
        return
    hints = []
    if report.wrong_shape:
        hints.append(f"leave out what has another shape, as with exclude=[{report.wrong_shape[0].name!r}]")
    elif report.missing or report.unexpected:
        hints.append("pass load_module_strict=False to load what both have, or rename={...} if names have changed")
    if strict and report.unused:
        hints.append("correct or remove the patterns and rules that match nothing")
    frozen = ""
    gone = [tensor.name for tensor in model.registry if tensor.name in set(report.missing) & set(manifest.excluded)]
    if gone:
        frozen = f" ({outline(gone)}: frozen when it was saved with exclude_frozen_parameters, and trained here)"
    if report.wrong_shape or report.missing or report.unexpected:
        what, fix = "saved from another model", "Build the model as it was when the checkpoint was saved, or "
    else:
        what, fix = "does not hold the requested names", "Please "
    error = CheckpointError(f"{report.path}: {what}: {'; '.join(problems)}{frozen}. {fix}{'; '.join(hints)}")
    error.report = report
    raise error


PARAM_NAMES = "param_names"
"""Entry of a parameter group that torch makes from named parameters; each engine keeps its own."""

_MOST_NOTES = 5

_FRESH = "pass load_optimizer_states=False to start with fresh optimizer state"


def match_optimizer(
    model: CheckpointedModel, manifest: Manifest, path: str, options: Options, elsewhere: RemoteNames
) -> tuple[dict[int, OptimizerStatePlan], list[str]]:
    """Find the saved optimizer state of every trained parameter; return it with notes. `manifest` has the model's
    names. Loading `settings` of parameter groups requires the same groups.
    """
    settings, fresh = options.settings, options.fresh
    assert model.optimizer is not None and model.update is not None
    saved = manifest.optimizer
    if saved is None:
        raise CheckpointError(f"{path}: was saved without an optimizer; {_FRESH}")
    if "refused" in saved:
        raise CheckpointError(f"{path}: {saved['refused']}; {_FRESH}")
    name = type(model.optimizer).__name__
    if saved["class"] != name:
        raise CheckpointError(
            f"{path}: holds state of the optimizer {saved['class']}, this engine has {name}; {_FRESH}"
        )
    if settings:
        numbers = saved_groups(model, saved["groups"], path)
    trained = [tensor for tensor in model.registry if tensor.trainable and tensor.numel and tensor.name not in fresh]
    unwanted = [tensor.name for tensor in trained if not options.selection.wants((tensor.name, *tensor.aliases))]
    if unwanted:
        raise CheckpointError(
            f"{path}: include and exclude leave out trained parameters ({outline(unwanted)}), and optimizer state is "
            "loaded for all of them or for none; pass load_module_only=True to load these weights and nothing else, "
            "or load_optimizer_states=False"
        )
    owner = by_any_name(manifest.of_kind(PARAMETER))
    if settings:
        named = all(isinstance(group, dict) and group.get("name") for group in saved["groups"])
        groups = max(elsewhere.groups, len(model.optimizer.param_groups))
        # Named groups may be on some ranks only.
        _compare_groups(trained, owner, numbers, len(saved["groups"]), None if named else groups, path)
    by_name: dict[str, OptimizerStatePlan] = {}
    for stored in manifest.of_kind(OPTIMIZER):
        state = by_name.setdefault(stored.name, OptimizerStatePlan())
        key = stored.kind.removeprefix(OPTIMIZER)
        cut = stored.name in owner and stored.shape == owner[stored.name].shape
        (state.elementwise if cut else state.whole)[key] = stored
    for parameter, values in saved["values"].items():
        by_name.setdefault(parameter, OptimizerStatePlan()).values.update(values)
    states: dict[int, OptimizerStatePlan] = {}
    without, used = [], set()
    for tensor in trained:
        found = next((owner[known].name for known in (tensor.name, *tensor.aliases) if known in owner), tensor.name)
        if found in by_name:
            states[tensor.index] = by_name[found]
            used.add(found)
            if model.box_of(tensor) is not None and by_name[found].whole:
                raise CheckpointError(
                    f"{path}: optimizer state {sorted(by_name[found].whole)} of {tensor.name!r} belongs to the whole "
                    f"tensor, and this rank has the box {tensor.box} of it; {_FRESH}"
                )
        elif found not in owner or not owner[found].trainable:
            without.append(tensor.name)  # the others were trained, and had not been stepped since they were added
    # No state at all: saved before the first step, or the optimizer has none (SGD without momentum).
    if without and states:
        raise CheckpointError(f"{path}: has no optimizer state for trained parameters: {outline(without)}; {_FRESH}")
    notes = _check_complete(model, states, path)
    if not settings:
        group_counters(model, saved["groups"], path)
        notes += _settings_left_out(model.optimizer, saved["groups"])
    dropped = [name for name in by_name if name not in used | fresh and name not in elsewhere.names]
    if dropped:
        notes.append(f"optimizer state of parameters that are not trained here is not loaded: {outline(dropped)}")
    return states, notes


def saved_groups(model: CheckpointedModel, saved: Sequence[Any], path: str) -> list[int | None]:
    """Return the number in a checkpoint of each of this rank's parameter groups, by name if all have names; else their
    own numbers. None for a group without parameters and name. Raises CheckpointError if a name is not there.
    """
    assert model.optimizer is not None
    used = {tensor.group for tensor in model.registry}
    names = [group.get("name") for group in model.optimizer.param_groups]
    there = [str(group.get("name") or "") if isinstance(group, dict) else "" for group in saved]
    different = all(there) and len(set(there)) == len(there)
    if not (different and are_named((name, number in used) for number, name in enumerate(names))):
        return list(range(len(names)))
    missing = [str(name) for number, name in enumerate(names) if number in used and name not in there]
    if missing:
        raise CheckpointError(
            f"{path}: its optimizer has the parameter groups {outline(there)}, and this engine also has "
            f"{outline(missing)}; {_FRESH}, or load_param_groups=False to keep this engine's settings of groups"
        )
    return [there.index(name) if name in there else None for name in names]


def group_counters(model: CheckpointedModel, saved: Sequence[Any], path: str) -> dict[str, Any]:
    """Return the counters that the optimizer keeps in all parameter groups alike, as a checkpoint has them. Raises
    CheckpointError if its groups differ.
    """
    names = getattr(model.optimizer, "group_counters", ())
    found = [{name: group[name] for name in names if name in group} for group in saved if isinstance(group, dict)]
    if any(other != found[0] for other in found):
        raise CheckpointError(
            f"{path}: parameter groups of its optimizer have different counters ({found!r:.300}), and without their "
            f"settings (load_param_groups=False) one for all is needed; load the settings, or {_FRESH}"
        )
    return found[0] if found else {}


def _settings_left_out(optimizer: torch.optim.Optimizer, saved: Sequence[Any]) -> list[str]:
    """Return a note on the numbers in parameter groups that differ, among which classes of others keep counters."""
    if type(optimizer).__module__.partition(".")[0] in ("torch", "shardwise"):
        return []
    left = [
        f"{name} ({value} in the checkpoint, {group[name]} here)"
        for group, kept in zip(optimizer.param_groups, saved, strict=False)
        for name, value in (kept.items() if isinstance(kept, dict) else ())
        if isinstance(value, int | float) and isinstance(group.get(name), int | float) and group[name] != value
    ]
    what = "numbers in parameter groups are not loaded (load_param_groups=False), also where the optimizer counts there"
    return [f"{what}: {outline(list(dict.fromkeys(left)))}"] if left else []


def _compare_groups(
    trained: Sequence[LogicalTensor],
    owner: Mapping[str, StoredTensor],
    numbers: Sequence[int | None],
    saved: int,
    groups: int | None,
    path: str,
) -> None:
    """Raise if a group's settings would apply to other parameters than at saving."""
    fix = (
        f"{_FRESH}, or load_param_groups=False to keep this engine's settings of groups (lr, weight_decay, ...) and "
        "load the state of each parameter"
    )
    if groups is not None and saved != groups:
        raise CheckpointError(f"{path}: its optimizer has {saved} parameter groups, this engine's has {groups}; {fix}")
    moved = []
    for tensor in trained:
        stored = next((owner[name] for name in (tensor.name, *tensor.aliases) if name in owner), None)
        group = numbers[tensor.group] if tensor.group is not None else None
        if stored is not None and stored.trainable and stored.group != group:
            moved.append(f"{tensor.name} (group {stored.group} in the checkpoint, {group} here)")
    if moved:
        raise CheckpointError(
            f"{path}: parameters are in other parameter groups than they were: {outline(moved)}; build the groups as "
            f"they were, {fix}"
        )


def _check_complete(model: CheckpointedModel, states: Mapping[int, OptimizerStatePlan], path: str) -> list[str]:
    """Compare the state of each parameter with that of most of its group and number of dimensions; return notes on
    others. Raises CheckpointError if a parameter lacks state that the optimizer needs.
    """
    needed = frozenset(getattr(model.optimizer, "state_names", ()))
    # Optimizers of PyTorch keep the same state for all tensors of as many dimensions.
    strict = type(model.optimizer).__module__.partition(".")[0] == "torch"
    kinds = {index: frozenset({*state.elementwise, *state.whole}) for index, state in states.items()}
    alike: dict[tuple[int | None, int], Counter[frozenset[str]]] = {}
    for index, own in kinds.items():
        alike.setdefault((model.registry[index].group, len(model.registry[index].shape)), Counter())[own] += 1
    notes = []
    for index, own in kinds.items():
        count = alike[model.registry[index].group, len(model.registry[index].shape)]
        usual = max(count, key=lambda kind: (needed <= kind, count[kind])) | needed
        lacks, more = sorted(usual - own), sorted(own - usual)
        if lacks and (strict or not needed <= own):
            raise CheckpointError(
                f"{path}: the optimizer state of {model.registry[index].name!r} lacks {', '.join(map(repr, lacks))}, "
                f"and optimizer state is loaded for all trained parameters or for none; {_FRESH}"
            )
        if lacks or more:
            differences = [f"lacks {', '.join(map(repr, lacks))}"] if lacks else []
            differences += [f"has {', '.join(map(repr, more))}, which others of its group have not"] if more else []
            notes.append(f"the optimizer state of {model.registry[index].name!r} {' and '.join(differences)}")
    return notes if len(notes) <= _MOST_NOTES else [*notes[:_MOST_NOTES], f"... ({len(notes)} parameters in all)"]
