"""Modules created from the table on import.

Every access looks a name up in its own module, where assignments are made, too: two paths to one object never differ,
and the library reads a script's `deepspeed.utils.groups.mpu`. Invariant: a name is served; or a stub that raises with
the reason when used; or absent (`hasattr`, `dir`, `importlib.util.find_spec`), with the reason in the error of
importing or reading it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from typing_extensions import override

from shardwise._version import __version__
from shardwise.errors import AbsentAttributeError, AbsentImportError
from shardwise.launch.detect import DROP_IN, ROOT, installed
from shardwise_deepspeed import standins
from shardwise_deepspeed.entries import Alias, Missing, Stub, commands, table
from shardwise_deepspeed.version import VERSION

TABLE = table()
MAINS = commands()


def _paths() -> frozenset[str]:
    found: set[str] = {ROOT}
    having = (p for p, entries in TABLE.items() if any(not isinstance(entry, Missing) for entry in entries.values()))
    for path in (*having, *MAINS):
        parts = path.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return frozenset(found)


PATHS = _paths()
"""Every module that can be imported."""

PACKAGES = frozenset(path.rpartition(".")[0] for path in PATHS) - {""}
"""Modules with submodules."""


def absence(path: str, name: str) -> str | None:
    """Return why `path` has no name or module `name`; None if unknown."""
    whole = f"{path}.{name}"
    found = [TABLE[path][name]] if name in TABLE.get(path, {}) else []
    if not found and whole not in PATHS:
        # A module is absent with all its names.
        below = (entries for key, entries in TABLE.items() if key == whole or key.startswith(f"{whole}."))
        found = [entry for entries in below for entry in entries.values()]
    reasons = dict.fromkeys(entry.reason for entry in found if isinstance(entry, Missing))
    return _sentence(whole, "; ".join(reasons)) if reasons else None


def _sentence(name: str, reason: str) -> str:
    return f"{name} is not in shardwise {__version__} ({ROOT} {VERSION}): {reason}"


@functools.cache
def _standing_in(name: str, entry: Stub) -> Any:
    return standins.make(name, entry, _sentence(f"{entry.home}.{name}", entry.reason))


def resolve(entry: Alias) -> Any:
    """Return the object of an entry."""
    module = importlib.import_module(entry.home)
    found = getattr(module, entry.attribute) if entry.attribute else module
    if "shardwise.zero.model" in sys.modules:  # no engines or parameters with attributes exist before
        importlib.import_module("shardwise_deepspeed.parameters").attach()
    return found


class DropInModule(ModuleType):
    """A module of the table."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        entry = TABLE.get(path, {}).get(name)
        if isinstance(entry, Alias):
            return resolve(entry)
        if isinstance(entry, Stub):
            return _standing_in(name, entry)
        if f"{path}.{name}" in PATHS:
            return importlib.import_module(f"{path}.{name}")
        if name == "__all__":
            return [name for name in self.__dir__() if not name.startswith("_")]
        reason = absence(path, name)
        if reason is not None:
            raise AbsentAttributeError(reason)
        raise AttributeError(f"module {path!r} (shardwise {__version__}) has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        entry = TABLE.get(self.__name__, {}).get(name)
        if entry is not None and isinstance(value, DropInModule) and value.__name__ == f"{self.__name__}.{name}":
            return  # the import system assigns a module to its parent; a name of the table has precedence
        if not isinstance(entry, Alias) or not entry.attribute:
            return super().__setattr__(name, value)
        module = importlib.import_module(entry.home)
        _originals.setdefault(entry, getattr(module, entry.attribute))
        setattr(module, entry.attribute, value)

    def __delattr__(self, name: str) -> None:
        """Undo an assignment; names of the table cannot be removed."""
        entry = TABLE.get(self.__name__, {}).get(name)
        if not isinstance(entry, Alias) or not entry.attribute:
            return super().__delattr__(name)
        if entry in _originals:
            setattr(importlib.import_module(entry.home), entry.attribute, _originals.pop(entry))

    def __dir__(self) -> list[str]:
        path = self.__name__
        had = {name for name, entry in TABLE.get(path, {}).items() if not isinstance(entry, Missing)}
        children = {child.rpartition(".")[2] for child in PATHS if child.rpartition(".")[0] == path}
        return sorted({*super().__dir__(), *had, *children})


_originals: dict[Alias, Any] = {}
"""Values before the first assignment."""


def prepare(module: ModuleType) -> None:
    """Turn a module into one of the table; its present contents stay."""
    module.__class__ = DropInModule
    # The import statement calls the finder for a missing name, and shows its reason, only if there is a path: an
    # empty one.
    module.__dict__.setdefault("__path__", [])
    module.__doc__ = f"DeepSpeed's `{module.__name__}`, served by shardwise {__version__}; see docs/compatibility.md."


class Loader(importlib.abc.InspectLoader):
    """Creates the modules of the table."""

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DropInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing, because names are looked up at each access; reloading has no effect."""
        prepare(module)

    def is_package(self, fullname: str) -> bool:
        """Return True if a module has submodules."""
        return fullname in PACKAGES

    def get_source(self, fullname: str) -> str:
        """Return the source for `python -m`: the command of the module, if any."""
        if fullname not in MAINS:
            return ""
        home, _, attribute = MAINS[fullname].partition(":")
        return f"import sys\nfrom {home} import {attribute}\nsys.exit({attribute}())\n"

    @override
    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), f"<shardwise's {fullname}>", "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the table, and their distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the table. Raises AbsentImportError at an import with a known reason of absence."""
        if fullname in PATHS:
            return importlib.util.spec_from_loader(fullname, Loader(), origin="shardwise")
        parent, _, name = fullname.rpartition(".")
        if parent not in PATHS or _is_question():
            return None
        reason = absence(parent, name)
        if reason is not None:
            raise AbsentImportError(reason)
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Yield the distribution, if `importlib.metadata` looks for `deepspeed` or for all."""
        name = None if context is None else context.name
        if name is not None:
            return [Metadata()] if name.lower() == ROOT else []
        # An installed drop-in lists itself.
        return [] if any(found.kind == DROP_IN for found in installed()) else [Metadata()]


def _is_question() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "importlib.util"


class Metadata(importlib.metadata.Distribution):
    """The distribution `deepspeed`, for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        """Return a file of the distribution's metadata."""
        return {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n"
                f"Summary: DeepSpeed's names, served by shardwise {__version__}\nRequires-Dist: shardwise\n"
            ),
            "top_level.txt": f"{ROOT}\n",
            "INSTALLER": "shardwise\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return the path of a file next to the drop-in."""
        return Path(__file__).parent / path
