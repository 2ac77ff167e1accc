"""Weights on disk, read straight into the parts of a model that ranks hold: no rank has a whole tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.boxes import Region
from shardwise.checkpoint.manifest import Slice, StoredTensor, outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.weights_reader import WeightsReader
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from shardwise.registry import Registry, copy_part, part_of
from shardwise.zero.parameters.init import materialize


@dataclass(frozen=True)
class _Source:
    """A tensor of the model as it is stored: slices of tensors of one reader."""

    reader: WeightsReader
    tensor: StoredTensor


def paths_of(checkpoint: str | Mapping[str, Any], directory: str) -> list[str]:
    """Return the files or directories of a checkpoint.

    Args:
        checkpoint: a path; or an object, as itself or as the path of a JSON file, whose `checkpoints` lists files.
        directory: of relative paths; empty: that of the JSON file, or the working directory.

    Raises:
        CheckpointPathError: the object lists no files.
        CheckpointError: the files have been divided over ranks already.
    """
    if isinstance(checkpoint, str):
        path = os.path.join(directory, checkpoint) if directory else checkpoint
        if not path.endswith(".json") or path.endswith(".index.json"):
            return [path]
        directory = directory or os.path.dirname(path)
        try:
            with open(path, "rb") as file:
                given: Any = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointPathError(f"checkpoint: {path} cannot be read as JSON ({error})") from error
    else:
        given = checkpoint
    given = given if isinstance(given, Mapping) else {}
    listed = given.get("checkpoints")
    if isinstance(listed, str):
        listed = [listed]
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise CheckpointPathError('checkpoint: expected an object with "checkpoints", a list of files')
    if given.get("parallelization") == "tp" or given.get("tp_size", 1) not in (0, 1):
        raise CheckpointError(
            "checkpoint: its files have been divided for tensor parallelism. Give the undivided checkpoint: each rank "
            "reads its part"
        )
    return [os.path.join(directory or str(given.get("base_dir") or ""), name) for name in listed]


def check_has_values(model: nn.Module, checkpoint: Any) -> bool:
    """Return whether parameters are on the meta device. Raises UsageError if there is no checkpoint for them."""
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta and checkpoint is None:
        raise UsageError(
            f"init_inference(): {len(meta)} parameters are on the meta device ({meta[0]}), without values. Pass "
            "checkpoint=, a directory or file with the weights"
        )
    return bool(meta)


def materialize_model(model: nn.Module, device: torch.device) -> None:
    """Allocate a meta-device model's parameters, without values, and its buffers.

    Buffers that checkpoints leave out are computed by their module's `reset_parameters` or transformers'
    `_init_weights`. Raises a UsageError if these give them no values. Declared parts keep their declaration.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        own = [one for one in module._parameters.values() if one is not None]
        left_out = module._non_persistent_buffers_set
        blank = [name for name, one in module._buffers.items() if one is not None and one.is_meta and name in left_out]
        if blank and any(part_of(parameter).box is not None for parameter in own):
            raise UsageError(
                f"init_inference(): {path or 'the model'} ({type(module).__name__}) is on the meta device and divided "
                f"over ranks, and checkpoints leave out its buffers {outline(blank)}. Compute them in a submodule of "
                "their own, with reset_parameters()"
            )
        if blank:
            materialize(model, path, module, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    values = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    copy_part(parameter, made[parameter])
                module._parameters[name] = made[parameter]


def load_parts(model: nn.Module, paths: Iterable[str], comm: Communicator | None = None) -> None:
    """Read weights into the parameters and buffers of a model, of which some may be declared parts of tensors.

    Only the bytes of the parts are read, if the format allows that, and values are converted on the way. Files of
    transformers' models may have the names and forms that `from_pretrained` converts: a missing base model's prefix,
    and experts one by one. The ranks of `comm` share the verification of checksums, where there are some.

    Raises:
        CheckpointError: tensors are missing or have other shapes.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(open_source(path)) for path in paths]
        known = {name: _Source(reader, one) for reader in readers for name, one in reader.by_any_name().items()}
        matched = _matched(model, known)
        for reader in readers:
            tensors = sorted({id(one): one for one in reader.tensors().values()}.values(), key=lambda one: one.name)
            reader.check(tensors if comm is None else tensors[comm.rank :: comm.world])
        if comm is None:
            _read(matched)
        else:
            comm.together("init_inference(checkpoint=...)", lambda: _read(matched))


@torch.no_grad()
def _read(matched: Iterable[_Match]) -> None:
    for values, sources, box in matched:
        flat = values.detach().view(-1) if values.is_contiguous() else torch.empty_like(values).view(-1)
        (name, source), *others = sources.items()
        source.reader.read_into(source.tensor.part(box), 0, flat)
        for other, copy in others:
            there = torch.empty_like(flat)
            copy.reader.read_into(copy.tensor.part(box), 0, there)
            if not torch.equal(flat.view(torch.uint8), there.view(torch.uint8)):
                raise CheckpointError(
                    f"{source.reader.path}: {name} and {other} differ, and the model has one parameter for both "
                    "(tied). Remove one of them from the checkpoint, or build a model that does not tie them"
                )
        if not values.is_contiguous():
            values.copy_(flat.view(values.shape))


_Match = tuple[torch.Tensor, dict[str, _Source], Region | None]


def _matched(model: nn.Module, known: Mapping[str, _Source]) -> list[_Match]:
    """Return parameters and saved buffers with the parts of tensors that they are, and stored tensors by name."""
    registry = Registry.of(model)
    wanted: list[tuple[torch.Tensor, tuple[str, ...], tuple[int, ...], Region | None]] = [
        (parameter, (tensor.name, *tensor.aliases), tensor.global_shape, tensor.box)
        for tensor, parameter in zip(registry, registry.parameters, strict=True)
    ]
    kept = set(model.state_dict(keep_vars=True))
    wanted += [(one, (name,), tuple(one.shape), None) for name, one in model.named_buffers() if name in kept]
    shapes = {name: shape for _, names, shape, _ in wanted for name in names}
    found = _converted(model, known, shapes)
    matched, problems, missing = [], [], []
    for values, names, shape, box in wanted:
        there = {name: found[name] for name in reversed(names) if name in found}
        places = {(id(one.reader), one.tensor.slices): name for name, one in there.items()}
        sources = {name: there[name] for name in names if name in places.values()}
        other = next((one.tensor.shape for one in sources.values() if one.tensor.shape != shape), None)
        if not sources:
            missing.append(names[0])
        elif other is not None:
            problems.append(f"{names[0]} has shape {list(other)}, and the model's {list(shape)}")
        else:
            matched.append((values, sources, box))
    if missing:
        problems.append(f"missing: {outline(missing)}")
    if problems:
        where = ", ".join(dict.fromkeys(source.reader.path for source in known.values())) or "the checkpoint"
        raise CheckpointError(f"{where}: does not fit the model: {'; '.join(problems)}")
    return matched


def _converted(
    model: nn.Module, known: Mapping[str, _Source], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _Source]:
    """Return stored tensors by names of the model, for tensors that have other names or forms in the files."""
    renamed, parts = _of_transformers(model, known)
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, _Source] = {}
    for name, source in renamed.items():
        short = name.removeprefix(f"{prefix}.")
        found[next((one for one in (name, short, f"{prefix}.{name}") if one in shapes), name)] = source
    for name, (pieces, joined) in parts.items():
        target = next((one for one in (name, f"{prefix}.{name}") if one in shapes), name)
        if target in shapes:
            found[target] = _joined(pieces, joined, target)
    return found


_Pieces = dict[str, list[tuple[int, _Source]]]  # pattern -> (number of the expert, tensor)


def _of_transformers(
    model: nn.Module, known: Mapping[str, _Source]
) -> tuple[dict[str, _Source], dict[str, tuple[_Pieces, Any]]]:
    """Apply the conversions of `from_pretrained`: names, and tensors that are joined of several."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # of a version without conversions
        return dict(known), {}
    if not hasattr(model, "base_model_prefix"):
        return dict(known), {}
    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings = [one for one in mapping if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    plain: dict[str, _Source] = {}
    parts: dict[str, tuple[_Pieces, Any]] = {}
    for name, source in known.items():
        target, pattern = rename_source_key(name, renamings, converters)  # type: ignore[arg-type]
        if pattern is None or name == target:
            plain[target] = source
            continue
        numbers = re.findall(r"\.(\d+)\.", name)
        pieces = parts.setdefault(target, ({}, by_pattern[pattern]))[0]
        pieces.setdefault(pattern, []).append((int(numbers[-1]) if "*" in pattern else 0, source))
    return plain, parts


def _joined(pieces: _Pieces, converter: Any, name: str) -> _Source:
    """Return a tensor that consists of others, one after the other in memory: experts, and in each its matrices."""
    steps = [(type(one).__name__, getattr(one, "dim", 0)) for one in converter.operations]
    lists = [
        sorted(pieces[pattern], key=lambda one: one[0]) for pattern in converter.source_patterns if pattern in pieces
    ]
    counts = {len(one) for one in lists}
    known = steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)])
    if not known or len(lists) != len(converter.source_patterns) or len(counts) != 1:
        raise CheckpointError(
            f"{name}: its files have it as {', '.join(converter.source_patterns)} ({converter.operations}), which is "
            "not read in parts. Load the model with from_pretrained() and save it as it is in memory, by "
            "save_pretrained(save_original_format=False)"
        )
    stacked = steps[0][0] == "MergeModulelist"
    rows = [one for number in range(counts.pop()) for one in (items[number][1] for items in lists)]
    first = rows[0]
    slices: list[Slice] = []
    place = 0
    for row in rows:
        (whole,) = row.tensor.slices
        if row.reader is not first.reader or row.tensor.dtype != first.tensor.dtype:
            raise CheckpointError(f"{name}: its parts are in several checkpoints, or have several dtypes")
        slices.append(whole._replace(start=place, stop=place + row.tensor.numel))
        place += row.tensor.numel
    height = sum(items[0][1].tensor.shape[0] for items in lists)
    inner = (height, *first.tensor.shape[1:])
    shape = (len(rows) // len(lists), *inner) if stacked else inner
    return _Source(first.reader, StoredTensor(name, first.tensor.kind, shape, first.tensor.dtype, tuple(slices)))
