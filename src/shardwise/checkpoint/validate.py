"""Checks of a manifest from an untrusted file, because a checksum finds damage, not intent.

pydantic has checked the types of fields. These checks cover names of files in the checkpoint's own directory, boxes and
slices that cover a tensor once, and sizes. No number in the file can make a reader allocate more than the files' bytes.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from shardwise import boxes
from shardwise.checkpoint import nested_json
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, check_shape

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor

_MOST = 1 << 53
"""Larger than any number of a state or rank."""


def check(manifest: Manifest) -> None:
    """Raise ValueError with the reason if a manifest is invalid; CheckpointError if a value is nested too deeply."""
    numbers = [manifest.layout.get(name, 0) for name in ("world", "sequence", "copy")]
    _expect(all(type(number) is int and 0 <= number <= _MOST for number in numbers), "numbers of layout", numbers)
    _expect(nested_json.is_mapping(manifest.client), "client: expected a dictionary", manifest.client)
    for name, facts in manifest.files.items():
        plain = os.path.basename(name) == name and name.isprintable() and not name.startswith(".") and len(name) <= 255
        _expect(plain and bool(name), "the name of a file", name)
        fit = facts.block is None or len(facts.checksums) == -(-facts.size // facts.block)
        _expect(fit, f"the checksums of {name}", facts.checksums)
    _check_optimizer(manifest.optimizer)
    _check_tensors(manifest)
    _check_trees(manifest)


def _check_optimizer(optimizer: dict[str, Any] | None) -> None:
    if optimizer is None:
        return
    _expect(isinstance(optimizer, dict) and isinstance(optimizer.get("class"), str), "optimizer", optimizer)
    groups, values = optimizer.get("groups"), optimizer.get("values")
    _expect(isinstance(groups, list), "optimizer.groups", groups)
    for group in groups or ():
        plain = isinstance(group, dict) and "params" not in group and not any(key.startswith("$") for key in group)
        _expect(plain, "a group in optimizer.groups", group)
    _expect(isinstance(values, dict), "optimizer.values", values)
    for name, state in (values or {}).items():
        _expect(isinstance(state, dict), f"optimizer.values of {name}", state)


def _check_tensors(manifest: Manifest) -> None:
    # Manifests of many ranks have millions of slices: messages are built only for errors.
    seen: set[tuple[str, str, int | None]] = set()
    stored: dict[str, int] = {}
    for tensor in manifest.tensors:
        check_shape(list(tensor.shape))
        _expect(tensor.torch_dtype in DTYPE_NAMES, "a dtype", tensor.dtype)
        known = (tensor.kind, tensor.name, tensor.rank)
        _expect(known not in seen, "a second tensor", known)
        seen.add(known)
        numel, width = tensor.numel, tensor.torch_dtype.itemsize
        for part in tensor.slices:
            if part.file not in manifest.files:
                raise ValueError(f"{tensor.name!r}: a slice in the tensor {part.key!r} of {part.file!r:.200}")
            start, stop = part.start, part.stop
            most = numel if part.box is None else _elements(tensor, part)
            if not start <= stop <= most:
                raise ValueError(
                    f"{tensor.kind} {tensor.name!r}: a slice [{start}, {stop}) of {most} elements (in {part.file})"
                )
            stored[part.file] = stored.get(part.file, 0) + (stop - start) * width
        tensor.check_cover()
    for name, size in stored.items():
        _expect(size <= manifest.files[name].size, "slices that are larger than their file", name)


def _elements(tensor: StoredTensor, part: Slice) -> int:
    box = part.box or ()
    if not (boxes.is_within(box, tensor.shape) and _as_written(box)):
        raise ValueError(
            f"{tensor.kind} {tensor.name!r}: expected a box of {list(tensor.shape)}, found {box!r:.200} "
            f"(in {part.file})"
        )
    return math.prod(boxes.sizes(box))


def _as_written(box: boxes.Region) -> bool:
    try:
        return all(map(boxes.is_range, box)) or boxes.region(box) == box
    except ValueError:
        return False


def _check_trees(manifest: Manifest) -> None:
    """Raise if two references have the same tensor, because a file could have its bytes read again and again."""
    used = {(part.file, part.key) for tensor in manifest.tensors for part in tensor.slices}
    _expect(len(used) == sum(len(tensor.slices) for tensor in manifest.tensors), "a tensor of a file", "used twice")
    for reference in nested_json.references(manifest.trees()):
        plain = isinstance(reference, dict) and all(isinstance(reference.get(name), str) for name in ("file", "key"))
        _expect(plain and reference["file"] in manifest.files, "a reference to a tensor", reference)
        place = (reference["file"], reference["key"])
        _expect(place not in used, "a reference to a tensor that is used already", reference)
        used.add(place)


def _expect(condition: bool, what: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{what}: not as it could have been written: {found!r:.200}")
