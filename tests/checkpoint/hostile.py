"""Damage and malice for tests: random changes of files and of JSON, and a watch over what a reader does meanwhile."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifestfile


class Files(dict[str, bytes]):
    """Content of a directory by name."""

    def __repr__(self) -> str:
        return f"Files({list(self)})"


def read_files(directory: Path) -> Files:
    return Files({path.name: path.read_bytes() for path in sorted(directory.iterdir())})


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Make a directory hold these files and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def change_a_byte(path: Path | str, place: int = -5) -> None:
    """Change a bit of a file; a negative place counts from its end."""
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(directory: Path, rng: random.Random) -> str:
    """Do something to a file of a directory; say what."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.stat().st_size)
    if not names:
        return "nothing is left"
    name = rng.choice(names)
    path = directory / name
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "zero", "truncate", "insert", "other", "gone", "odd"])
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice([1, 8, 100, 5000]))
    if kind == "flip":
        for place in (rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 3, 50]))):
            data[place] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        data[start:stop] = bytes(stop - start)
    elif kind == "truncate":
        del data[start:]
    elif kind == "insert":
        data[start:start] = rng.randbytes(rng.choice([1, 8, 100]))
    elif kind == "other":
        other = rng.choice(names)
        data, theirs = bytearray((directory / other).read_bytes()), data
        (directory / other).write_bytes(theirs)
    if kind == "gone":
        path.unlink()
    elif kind == "odd":
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
        else:
            os.mkfifo(path)
    else:
        path.write_bytes(data)
    return f"{kind} {name} [{start}:{stop}]"


# -- malice ------------------------------------------------------------------------------------------------------------


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 623, 10**6, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0,
    1e308, float("nan"), float("inf"), "", "x", "..", "../secret", "/etc/passwd", "/dev/zero", "a/b", "\x00", "\ud800",
    ".hidden", "manifest.json", "float32", "float64", "int8", "complex128", "Tensor", "__class__", "optimizer/exp_avg",
    "parameter", [], {}, [[]], [0], [-1], [2**40], [2**40, 2**40], [1.5], ["1"], [0, 2**62, 2**62], [1] * 100,
    [None, 1], [[0, 1], [2]], {"$float": "x"}, {"$float": 1}, {"$tuple": 3}, {"$tuple": [1]}, {"$bytes": "@"},
    {"$scalar": ["float32", 1e300]}, {"$scalar": ["int8", 1000]}, {"$scalar": ["float32", [1]]},
    {"$scalar": ["Tensor", 1]}, {"$numpy_scalar": ["O", 1]}, {"$numpy_scalar": ["V99999999", 1]},
    {"$numpy_scalar": ["<f4", "x"]}, {"$numpy_scalar": ["<i1", 1000]}, {"$numpy": {"file": "x", "key": "y"}},
    {"$tensor": {"file": "../x", "key": "y"}}, {"$tensor": 3}, {"$code": "1"}, {"$dict": [[{"$dict": []}, 1]]},
    {"$dict": [1]}, {"$counter": [["a", "b"]]}, {"$ordered": None}, {"params": []},
]  # fmt: skip


def _deep(kind: str) -> Any:
    value: Any = 1
    for _ in range(3000):
        value = [value] if kind == "list" else {"$tuple": [value]} if kind == "tuple" else {"a": value}
    return value


_DEEP = {kind: _deep(kind) for kind in ("list", "tuple", "dict")}


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every value in a tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def mutate(tree: Any, rng: random.Random) -> str:
    """Change some values of a JSON tree in place; say where."""
    told = []
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        places = _places(tree)
        if not places:
            break
        # Fields of the whole file are few among many; half of the changes are near the root.
        if rng.random() < 0.5:
            near = {id(tree), *map(id, tree.values())}
            places = [place for place in places if id(place[0]) in near]
        container, key = rng.choice(places)
        kind = rng.choice(["odd", "odd", "odd", "delete", "other", "number", "deep"])
        if kind == "odd":
            container[key] = copy.deepcopy(rng.choice(_ODD))
        elif kind == "deep":
            container[key] = _DEEP[rng.choice(sorted(_DEEP))]
        elif kind == "delete":
            del container[key]
        elif kind == "other":
            other, place = rng.choice(places)
            value = other[place]
            if not isinstance(value, (dict, list)) or len(json.dumps(value)) < 1000:
                container[key] = copy.deepcopy(value)
        elif type(container[key]) is int:
            container[key] += rng.choice([-1, 1, 4, 2**20, -(2**20)])
        told.append(f"{kind} {str(key)[:30]}")
        if kind == "deep":
            break  # what is deep cannot be copied
    return ", ".join(told)


def sealed(fields: Any) -> bytes:
    """Return a manifest with these fields and the checksum that belongs to them."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        body = (json.dumps(fields)[1:] + "\n").encode()
    finally:
        sys.setrecursionlimit(limit)
    return b'{"blake2b": "' + manifestfile._digest(body).encode() + b'",\n' + body


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the fields of a manifest without its checksum."""
    fields: dict[str, Any] = json.loads(data)
    del fields["blake2b"]
    return fields


# -- watching ----------------------------------------------------------------------------------------------------------

_CODE = ("exec", "compile", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "import")
_watched: list[str] = []
_seen: list[str] = []
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in _CODE or event.startswith("ctypes.dlopen"):
        _seen.append(f"{event} {args!r:.100}")
    elif event == "open" and isinstance(args[0], (str, bytes)) and not os.fsdecode(args[0]).startswith(_watched[0]):
        _seen.append(f"open {args[0]!r}")


@contextmanager
def watched(directory: Path, room: int = 1 << 30) -> Iterator[None]:
    """Fail if code is compiled, run or imported, a file outside of a directory is opened, or much memory is taken."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    _seen.clear()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, limits[1]))
    _watched.append(str(directory))
    try:
        yield
    finally:
        _watched.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not _seen, _seen
