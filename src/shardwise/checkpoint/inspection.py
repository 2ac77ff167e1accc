"""Content of a checkpoint, a directory of checkpoints, or other weights, as plain values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from shardwise.checkpoint import directory
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Manifest, StoredTensor
from shardwise.checkpoint.opening import looks_interrupted, open_source
from shardwise.checkpoint.reader import Checkpoint, complete_manifest
from shardwise.checkpoint.weights_reader import Progress
from shardwise.errors import CheckpointError

_SCALARS = (bool, int, float, str, type(None))


def describe(path: str, *, tag: str | None = None, tensors: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint, a directory of checkpoints, or other weights, as JSON values.

    `what` is "checkpoint", "run" (then `checkpoints` has a short description of each) or "weights". `tag` names a
    checkpoint in a directory. `tensors` lists every tensor. Raises CheckpointError if there is none, or it is damaged.
    """
    chosen = path if tag is None else os.path.join(path, directory.check_tag(tag))
    if directory.holds_checkpoint(chosen) or (tag is not None and os.path.isdir(chosen)):
        content = complete_manifest(chosen)
        result: dict[str, Any] = {"what": "checkpoint", "path": chosen, **_facts(content)}
        if tensors:
            result["tensors"] = [_tensor(tensor, _OF_CHECKPOINTS) for tensor in _in_order(content)]
        return result
    if tag is None and os.path.isdir(path):
        found = describe_run(path)
        if found["checkpoints"]:
            return found
    with open_source(path, tag) as source:
        listed = list(source.tensors().values())
        result = {
            "what": "weights",
            "path": source.path,
            "format": source.what,
            "bytes": sum(tensor.nbytes for tensor in listed),
            "kinds": _kinds(listed),
        }
        if tensors:
            result["tensors"] = [_tensor(tensor, _OF_WEIGHTS) for tensor in listed]
        return result


def _facts(found: Manifest) -> dict[str, Any]:
    parameters = [tensor for tensor in found.tensors if tensor.kind == PARAMETER]
    trained = sum(tensor.numel for tensor in parameters if tensor.trainable)
    return {
        "tag": found.tag,
        "created": datetime.fromtimestamp(found.created, timezone.utc).isoformat(timespec="seconds"),
        "versions": found.versions,
        "layout": found.layout,
        "counters": found.counters,
        "parameters": sum(tensor.numel for tensor in parameters),
        "trained_parameters": trained,
        "tied": [[tensor.name, *tensor.aliases] for tensor in found.tensors if tensor.aliases],
        "excluded": found.excluded,
        "optimizer": None if found.optimizer is None else _optimizer(found),
        "scheduler": found.scheduler is not None,
        "loss_scaler": found.scaler is not None,
        "ranks": len(found.ranks),
        "client_state": sorted(found.client) if isinstance(found.client, dict) else [],
        "bytes": sum(facts.size for facts in found.files.values()),
        "files": {name: facts.size for name, facts in found.files.items()},
        "kinds": _kinds(_in_order(found)),
    }


def _in_order(found: Manifest) -> list[StoredTensor]:
    return [*found.of_kind(PARAMETER), *found.of_kind(BUFFER), *found.of_kind(OPTIMIZER)]


def _optimizer(found: Manifest) -> dict[str, Any]:
    assert found.optimizer is not None
    counts = Counter(tensor.group for tensor in found.of_kind(PARAMETER))
    groups = [
        {"tensors": counts[number], "settings": {k: _plain(v) for k, v in group.items()}}
        for number, group in enumerate(found.optimizer["groups"])
    ]
    state = sorted({tensor.kind.removeprefix(OPTIMIZER) for tensor in found.of_kind(OPTIMIZER)})
    values = sorted({key for held in found.optimizer["values"].values() for key in held})
    return {"class": found.optimizer["class"], "groups": groups, "state": [*state, *values]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        (key, inner), *_ = value.items()
        if key == "$tuple":
            return [_plain(item) for item in inner]
        if key == "$scalar":
            return _plain(inner[1])
        if key == "$float":
            return inner
    return value if isinstance(value, _SCALARS) else str(value)


def _kinds(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    found: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.kind, []).append(tensor)
    return [
        {
            "kind": kind,
            "tensors": len(held),
            "elements": sum(tensor.numel for tensor in held),
            "bytes": sum(tensor.nbytes for tensor in held),
            "dtypes": sorted({tensor.dtype for tensor in held}),
        }
        for kind, held in found.items()
    ]


_OF_WEIGHTS = ("name", "kind", "shape", "dtype", "bytes", "aliases", "trainable")
_OF_CHECKPOINTS = (*_OF_WEIGHTS, "group", "rank", "slices")


def _tensor(tensor: StoredTensor, keys: tuple[str, ...]) -> dict[str, Any]:
    slices = [{"file": part.file, "start": part.start, "stop": part.stop, "box": part.box} for part in tensor.slices]
    lists = {"shape": list(tensor.shape), "bytes": tensor.nbytes, "aliases": list(tensor.aliases), "slices": slices}
    return {key: lists[key] if key in lists else getattr(tensor, key) for key in keys}


def describe_run(path: str) -> dict[str, Any]:
    """Return a short description of each checkpoint of a directory, newest last, and the latest one. Unreadable ones
    have an `error`. `leftovers` are hidden directories of running or interrupted saves; the next save removes the
    latter.
    """
    found: dict[str, Any] = {"what": "run", "path": path, "latest": None, "checkpoints": [], "leftovers": []}
    there = CheckpointDirectory(path)
    try:
        found["latest"] = there.latest()
    except CheckpointError as error:
        found["latest_error"] = str(error)
    complete, broken = [], []
    for name in sorted(os.listdir(path)):
        inside = os.path.join(path, name)
        if not os.path.isdir(inside):
            continue
        if name.startswith("."):
            if name.endswith(".partial"):
                found["leftovers"].append(name)
            continue
        if not (directory.holds_checkpoint(inside) or looks_interrupted(inside)):
            continue
        try:
            facts = _facts(complete_manifest(inside))
        except CheckpointError as error:
            broken.append({"tag": name, "complete": False, "error": str(error)})
            continue
        short = {key: facts[key] for key in ("created", "counters", "layout", "parameters", "bytes")}
        complete.append({"tag": name, "complete": True, **short})
    found["checkpoints"] = [*broken, *sorted(complete, key=lambda entry: there.head(entry["tag"]).order)]
    return found


def check(path: str, tag: str | None = None, progress: Progress | None = None) -> None:
    """Compare every byte of a checkpoint with its checksum. Raises CheckpointError if damaged or not shardwise's."""
    chosen = path if tag is None else os.path.join(path, directory.check_tag(tag))
    with Checkpoint(chosen) as saved:
        saved.check(progress=progress)
