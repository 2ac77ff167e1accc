"""The manifest's file: JSON, written last; a valid manifest means a complete checkpoint. Its first line holds a
checksum of the rest, which separates a damaged manifest from an invalid one.

A checksum finds damage, not intent. Hence pydantic checks the types of fields, and `_check` names of files in the
checkpoint's own directory, boxes and slices that cover a tensor once, and sizes. No number in the file can make a
reader allocate more than the files' bytes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import pydantic_core

from shardwise import boxes
from shardwise.checkpoint import nested_json
from shardwise.checkpoint.checksums import open_to_read
from shardwise.checkpoint.manifest import BEGINNING, NAME, Manifest, from_json
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, check_shape
from shardwise.errors import CheckpointError

LARGEST = 2 << 30
"""Bytes of the largest manifest that is read into memory; millions of slices take hundreds of MB."""

FORMAT = 2
"""Number of the format. It changes when a reader of the old one could misread the new one. Format 1 had checksums of
blocks of files in place of tensors.
"""

KIND = "shardwise.checkpoint"

_MOST = 1 << 53
"""Larger than any number of a state or rank."""

_FIRST_LINE = re.compile(rb'\{"blake2b": "([0-9a-f]{32})",\n')


def to_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as the bytes of its file."""
    fields: dict[str, Any] = {"format": {"name": KIND, "version": FORMAT}}
    fields.update({name: getattr(manifest, name) for name in Manifest.__dataclass_fields__})
    fields["files"] = {
        name: {"size": facts.size, "checksums": facts.checksums} for name, facts in manifest.files.items()
    }
    fields["tensors"] = [tensor.to_json() for tensor in manifest.tensors]
    # One line per field, tensor and file, for reading and diff.
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in fields.items()]
    body = (",\n".join(lines) + "}\n").encode()
    return BEGINNING + _digest(body).encode() + b'",\n' + body


_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"{json.dumps(name)}:{_compact(item)}" for name, item in value.items()) + "}"
    return _compact(value)


def _digest(body: bytes | memoryview) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def load(directory: str) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises CheckpointError if it is missing, damaged, or of another
    format.
    """
    path = os.path.join(directory, NAME)
    try:
        with open(open_to_read(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                raise CheckpointError(
                    f"{path}: damaged, or not a manifest of shardwise: it has {size} bytes, and at most {LARGEST} are "
                    "read"
                )
            data = file.read(size)
    except FileNotFoundError:
        reason = (
            f"has no {NAME}, so the checkpoint is incomplete: saving it was interrupted, or files were removed"
            if os.path.isdir(directory)
            else "there is no such checkpoint directory"
        )
        raise CheckpointError(f"{directory}: {reason}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return from_bytes(data, path)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause cyclic garbage collection, which would visit millions of new values again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collections()
def from_bytes(data: bytes, path: str) -> Manifest:
    """Return the manifest in the bytes of a file; `path` is for messages. Raises CheckpointError as `load` does."""
    match = _FIRST_LINE.match(data)
    if match is None:
        raise CheckpointError(f"{path}: damaged, or not a manifest of shardwise: its first line holds no checksum")
    found = _digest(memoryview(data)[match.end() :])
    if match.group(1).decode() != found:
        raise CheckpointError(
            f"{path}: damaged: expected checksum {match.group(1).decode()}, found {found}. Load another checkpoint by "
            "its tag"
        )
    try:
        fields = parsed(data)
        form = fields.pop("format")
        if form["name"] != KIND or form["version"] not in (1, FORMAT):
            raise CheckpointError(
                f"{path}: expected format {KIND} {FORMAT}, found {form['name']} {form['version']}, written by "
                f"shardwise {fields['versions']['shardwise']}; load it with that version"
            )
        for entry in fields["files"].values() if form["version"] == 1 else ():
            entry["block"] = form["block"]
        del fields["blake2b"]
        manifest = from_json(Manifest, fields)
        _check(manifest)
        return manifest
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not as shardwise writes it ({type(error).__name__}: {error})") from error


def parsed(data: bytes) -> Any:
    """Return the value of JSON, names of fields and files being one object each. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return pydantic_core.from_json(data, allow_inf_nan=False, cache_strings="all")
    # Slower, and reads deep values and halves of surrogate pairs, too.
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check(manifest: Manifest) -> None:
    """Raise ValueError with the reason if a manifest is invalid; CheckpointError if a value is nested too deeply."""
    numbers = [manifest.layout.get(name, 0) for name in ("world", "sequence", "copy")]
    _expect(all(type(number) is int and 0 <= number <= _MOST for number in numbers), "numbers of layout", numbers)
    _expect(nested_json.is_mapping(manifest.client), "client: expected a dictionary", manifest.client)
    for name, facts in manifest.files.items():
        plain = os.path.basename(name) == name and name.isprintable() and not name.startswith(".") and len(name) <= 255
        _expect(plain and bool(name), "the name of a file", name)
        fit = facts.block is None or len(facts.checksums) == -(-facts.size // facts.block)
        _expect(fit, f"the checksums of {name}", facts.checksums)
    if (optimizer := manifest.optimizer) is not None:
        typed = [type(optimizer.get(name)) for name in ("class", "groups", "values")] == [str, list, dict]
        typed = typed and all(isinstance(state, dict) for state in optimizer["values"].values())
        _expect(typed, "optimizer", optimizer)
        for group in optimizer["groups"]:
            plain = isinstance(group, dict) and "params" not in group and not any(key.startswith("$") for key in group)
            _expect(plain, "a group in optimizer.groups", group)
    _check_tensors(manifest)
    used: set[tuple[str, str]] = set()
    for reference in nested_json.references(manifest.trees()):
        plain = isinstance(reference, dict) and all(isinstance(reference.get(name), str) for name in ("file", "key"))
        _expect(plain and reference["file"] in manifest.files, "a reference to a tensor", reference)
        place = (reference["file"], reference["key"])
        # A file could have its bytes read again and again.
        _expect(place not in used, "a reference to a tensor that is used already", reference)
        used.add(place)


def _check_tensors(manifest: Manifest) -> None:
    seen: set[tuple[str, str, int | None]] = set()
    for tensor in manifest.tensors:
        check_shape(tensor.shape)
        _expect(tensor.torch_dtype in DTYPE_NAMES, "a dtype", tensor.dtype)
        known = (tensor.kind, tensor.name, tensor.rank)
        _expect(known not in seen, "a second tensor", known)
        seen.add(known)
        others = set(map(operator.attrgetter("file"), tensor.slices)) - manifest.files.keys()
        _expect(not others, f"a file of {tensor.name!r}", others)
        for box in set(map(operator.attrgetter("box"), tensor.slices)):
            if box is not None and not (boxes.is_within(box, tensor.shape) and _as_written(box)):
                file = next(part.file for part in tensor.slices if part.box == box)
                raise ValueError(
                    f"{tensor.kind} {tensor.name!r}: expected a box of {list(tensor.shape)}, found {box!r:.200} "
                    f"(in {file})"
                )
        tensor.check_cover()
    stored, size = sum(t.nbytes for t in manifest.tensors), sum(facts.size for facts in manifest.files.values())
    _expect(stored <= size, f"tensors of {stored} bytes in files", size)


def _as_written(box: boxes.Region) -> bool:
    try:
        return all(map(boxes.is_range, box)) or boxes.region(box) == box
    except ValueError:
        return False


def _expect(condition: bool, what: str, found: object) -> None:
    if not condition:
        raise ValueError(f"{what}: not as it could have been written: {found!r:.200}")
