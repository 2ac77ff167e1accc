"""Checks of a manifest from an untrusted file, because a checksum finds damage, not intent.

pydantic has checked the types of fields. These checks cover names of files in the checkpoint's own directory, boxes and
slices that cover a tensor once, and sizes. No number in the file can make a reader allocate more than the files' bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardwise import boxes
from shardwise.checkpoint import nested_json
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, check_shape

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest

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
    _check_trees(manifest, used=_check_tensors(manifest))


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


def _check_tensors(manifest: Manifest) -> set[tuple[str, str]]:
    """Check tensors, and return the places (file, key) that they have."""
    seen: set[tuple[str, str, int | None]] = set()
    used: set[tuple[str, str]] = set()
    for tensor in manifest.tensors:
        check_shape(list(tensor.shape))
        _expect(tensor.torch_dtype in DTYPE_NAMES, "a dtype", tensor.dtype)
        known = (tensor.kind, tensor.name, tensor.rank)
        _expect(known not in seen, "a second tensor", known)
        seen.add(known)
        # Columns, because manifests of many ranks have millions of slices.
        files, keys, _, _, parts = zip(*tensor.slices, strict=True) if tensor.slices else ((),) * 5
        others = {*files} - manifest.files.keys()
        _expect(not others, f"a file of {tensor.name!r}", others)
        for box, file in dict(zip(parts, files, strict=True)).items():
            if box is not None and not (boxes.is_within(box, tensor.shape) and _as_written(box)):
                raise ValueError(
                    f"{tensor.kind} {tensor.name!r}: expected a box of {list(tensor.shape)}, found {box!r:.200} "
                    f"(in {file})"
                )
        tensor.check_cover()
        used.update(zip(files, keys, strict=True))
    count = sum(len(tensor.slices) for tensor in manifest.tensors)
    _expect(len(used) == count, "a tensor of a file", "used twice")
    stored, size = sum(t.nbytes for t in manifest.tensors), sum(facts.size for facts in manifest.files.values())
    _expect(stored <= size, f"tensors of {stored} bytes in files", size)
    return used


def _as_written(box: boxes.Region) -> bool:
    try:
        return all(map(boxes.is_range, box)) or boxes.region(box) == box
    except ValueError:
        return False


def _check_trees(manifest: Manifest, used: set[tuple[str, str]]) -> None:
    """Raise if two references have the same tensor, because a file could have its bytes read again and again."""
    for reference in nested_json.references(manifest.trees()):
        plain = isinstance(reference, dict) and all(isinstance(reference.get(name), str) for name in ("file", "key"))
        _expect(plain and reference["file"] in manifest.files, "a reference to a tensor", reference)
        place = (reference["file"], reference["key"])
        _expect(place not in used, "a reference to a tensor that is used already", reference)
        used.add(place)


def _expect(condition: bool, what: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{what}: not as it could have been written: {found!r:.200}")
