"""Matching a checkpoint with the model that is to be loaded: by name, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.collect import buffers, extra_states
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Manifest, StoredTensor, by_any_name, outline
from shardwise.checkpoint.protocols import ShardedModel
from shardwise.errors import CheckpointError
from shardwise.registry import LogicalTensor


@dataclass
class StateOf:
    """The saved optimizer state of one parameter: tensors with one value per element, other tensors, other values."""

    elementwise: dict[str, StoredTensor] = field(default_factory=dict)
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Matched:
    """What will be read into what."""

    parameters: list[tuple[LogicalTensor, StoredTensor]]
    buffers: list[tuple[torch.Tensor, StoredTensor]]
    extra: list[tuple[nn.Module, Any]]
    states: dict[int, StateOf] | None = None


def match_module(model: ShardedModel, manifest: Manifest, path: str, *, strict: bool) -> Matched:
    """Find the saved tensor of every parameter and buffer.

    Raises:
        CheckpointError: names (if `strict`) or shapes do not fit.
    """
    saved = by_any_name(manifest.of_kind(PARAMETER))
    used: set[str] = set()
    missing, wrong = [], []
    parameters = []
    for tensor in model.registry:
        stored = next((saved[name] for name in (tensor.name, *tensor.aliases) if name in saved), None)
        if stored is None:
            if tensor.trainable or tensor.name not in manifest.excluded:
                missing.append(tensor.name)
            continue
        used.add(stored.name)
        if stored.shape != tensor.shape:
            wrong.append(f"{tensor.name} (checkpoint {list(stored.shape)}, model {list(tensor.shape)})")
        parameters.append((tensor, stored))
    unexpected = [tensor.name for tensor in manifest.of_kind(PARAMETER) if tensor.name not in used]
    found = _match_buffers(model, manifest, missing, unexpected, wrong)
    extra = []
    for name, module in extra_states(model.module):
        if name in manifest.extra:
            extra.append((module, manifest.extra[name]))
        else:
            missing.append(f"extra state of {name}")
    _report(path, missing if strict else [], unexpected if strict else [], wrong)
    return Matched(parameters, found, extra)


def _match_buffers(
    model: ShardedModel, manifest: Manifest, missing: list[str], unexpected: list[str], wrong: list[str]
) -> list[tuple[torch.Tensor, StoredTensor]]:
    everybodys: dict[str, StoredTensor] = {}
    own: dict[str, StoredTensor] = {}
    for stored in manifest.of_kind(BUFFER):
        if stored.rank is None:
            everybodys[stored.name] = stored
        elif stored.rank == model.comm.rank and manifest.layout["world"] == model.comm.world:
            own[stored.name] = stored
    found = []
    names = set()
    for name, buffer in buffers(model.module):
        names.add(name)
        if name not in everybodys:
            missing.append(name)
            continue
        stored = own.get(name, everybodys[name])
        if stored.shape != tuple(buffer.shape):
            wrong.append(f"{name} (checkpoint {list(stored.shape)}, model {list(buffer.shape)})")
        found.append((buffer, stored))
    unexpected += [name for name in everybodys if name not in names]
    return found


def _report(path: str, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"missing in the checkpoint: {outline(missing)}")
    if unexpected:
        problems.append(f"not in the model: {outline(unexpected)}")
    if wrong:
        problems.append(f"of another shape: {outline(wrong)}")
    if problems:
        hint = "" if wrong else ", or pass load_module_strict=False to load what fits"
        raise CheckpointError(
            f"{path}: saved from another model: {'; '.join(problems)}. Build the model as it was when the checkpoint "
            f"was saved{hint}"
        )


def match_optimizer(model: ShardedModel, manifest: Manifest, path: str) -> dict[int, StateOf]:
    """Find the saved optimizer state of every trained parameter.

    Raises:
        CheckpointError: it is of another optimizer, or there is none for some parameters.
    """
    assert model.optimizer is not None
    fix = "pass load_optimizer_states=False to start with fresh optimizer state"
    saved = manifest.optimizer
    if saved is None:
        raise CheckpointError(f"{path}: was saved without an optimizer; {fix}")
    if "refused" in saved:
        raise CheckpointError(f"{path}: {saved['refused']}; {fix}")
    name = type(model.optimizer).__name__
    if saved["class"] != name:
        raise CheckpointError(f"{path}: holds state of the optimizer {saved['class']}, this engine has {name}; {fix}")
    groups = len(model.optimizer.param_groups)
    if len(saved["groups"]) != groups:
        raise CheckpointError(
            f"{path}: its optimizer has {len(saved['groups'])} parameter groups, this engine's has {groups}; {fix}"
        )
    owner = by_any_name(manifest.of_kind(PARAMETER))
    by_name: dict[str, StateOf] = {}
    for stored in manifest.of_kind(OPTIMIZER):
        state = by_name.setdefault(stored.name, StateOf())
        key = stored.kind.removeprefix(OPTIMIZER)
        cut = stored.name in owner and stored.shape == owner[stored.name].shape
        (state.elementwise if cut else state.whole)[key] = stored
    for parameter, values in saved["values"].items():
        by_name.setdefault(parameter, StateOf()).values.update(values)
    states: dict[int, StateOf] = {}
    without = []
    for tensor in model.registry:
        if not tensor.trainable or not tensor.numel:
            continue
        found = next((owner[known].name for known in (tensor.name, *tensor.aliases) if known in owner), tensor.name)
        if found in by_name:
            states[tensor.index] = by_name[found]
        else:
            without.append(tensor.name)
    # No state at all: saved before the first step, or the optimizer has none (SGD without momentum).
    if without and states:
        raise CheckpointError(f"{path}: has no optimizer state for trained parameters: {outline(without)}; {fix}")
    return states
