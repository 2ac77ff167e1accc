"""The manifest's file: JSON, written last; a valid manifest means a complete checkpoint. Its first line holds a
checksum of the rest, which separates a damaged manifest from an invalid one.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pydantic_core

from shardwise.checkpoint import validate
from shardwise.checkpoint.checksums import open_to_read
from shardwise.checkpoint.manifest import BEGINNING, NAME, Manifest, from_json
from shardwise.errors import CheckpointError

LARGEST = 2 << 30
"""Bytes of the largest manifest that is read into memory; millions of slices take hundreds of MB."""

FORMAT = 2
"""Number of the format. It changes when a reader of the old one could misread the new one. Format 1 had checksums of
blocks of files in place of tensors.
"""

KIND = "shardwise.checkpoint"

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


def _lines(value: Any) -> str:
    compact = (",", ":")
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, separators=compact, allow_nan=False) for item in value) + "]"
    if isinstance(value, dict) and value:
        rows = (f"{json.dumps(k)}:{json.dumps(v, separators=compact, allow_nan=False)}" for k, v in value.items())
        return "{\n" + ",\n".join(rows) + "}"
    return json.dumps(value, allow_nan=False)


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
        raise CheckpointError(_absent(directory)) from None
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
        fields = _fields(data)
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
        validate.check(manifest)
        return manifest
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not as shardwise writes it ({type(error).__name__}: {error})") from error


def _fields(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return pydantic_core.from_json(data, allow_inf_nan=False, cache_strings="keys")
    # Slower, and reads deep values and halves of surrogate pairs, too.
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _absent(directory: str) -> str:
    if not os.path.isdir(directory):
        return f"{directory}: there is no such checkpoint directory"
    return (
        f"{directory}: has no {NAME}, so the checkpoint is incomplete: saving it was interrupted, or files were removed"
    )
