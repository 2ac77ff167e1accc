"""Modules made of the table when they are imported.

Each name is looked up where it lives at every access, and an assignment to it is made there, too: what a script puts
into `deepspeed.utils.groups.mpu` is what the library reads, and two paths to one thing never differ.

Invariant: a name is served, or stands in and raises with the reason when it is used, or looks as if it were not there
(`hasattr`, `dir`, `importlib.util.find_spec`) and says why when it is imported or read.
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
from shardwise.dropin import standins
from shardwise.dropin.entries import Alias, Missing, Stub
from shardwise.dropin.table import MAINS, TABLE
from shardwise.dropin.version import VERSION
from shardwise.errors import AbsentAttributeError, AbsentImportError
from shardwise.launch.detect import DROP_IN, ROOT, installed


def _paths() -> frozenset[str]:
    """Modules that exist: those that have a name or can be run, and the packages above them."""
    found: set[str] = {ROOT}
    having = (p for p, entries in TABLE.items() if any(not isinstance(entry, Missing) for entry in entries.values()))
    for path in (*having, *MAINS):
        parts = path.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return frozenset(found)


PATHS = _paths()
"""Every module that can be imported."""

PACKAGES = frozenset(path.rpartition(".")[0] for path in PATHS) - {""}
"""Those that have others in them."""


def absence(path: str, name: str) -> str | None:
    """Say why `path` has no `name`, be it a name or a module; None if nothing is known of it."""
    whole = f"{path}.{name}"
    found = [TABLE[path][name]] if name in TABLE.get(path, {}) else []
    if not found and whole not in PATHS:
        # A module is absent with all that it would have.
        below = (entries for key, entries in TABLE.items() if key == whole or key.startswith(f"{whole}."))
        found = [entry for entries in below for entry in entries.values()]
    reasons = dict.fromkeys(entry.reason for entry in found if isinstance(entry, Missing))
    return _sentence(whole, "; ".join(reasons)) if reasons else None


def _sentence(name: str, reason: str) -> str:
    return f"{name} is not in shardwise {__version__} ({ROOT} {VERSION}): {reason}"


def _homes() -> dict[tuple[str, Stub], str]:
    """Return the first module of the table that has a name, so that all paths to it lead to one object."""
    found: dict[tuple[str, Stub], str] = {}
    for path, entries in TABLE.items():
        for name, entry in entries.items():
            if isinstance(entry, Stub):
                found.setdefault((name, entry), path)
    return found


_HOMES = _homes()


@functools.cache
def _standing_in(name: str, entry: Stub) -> Any:
    home = _HOMES[name, entry]
    return standins.make(name, home, entry, _sentence(f"{home}.{name}", entry.reason))


def resolve(entry: Alias) -> Any:
    """Return what a name stands for."""
    if entry.kind == "module":
        return importlib.import_module(entry.target)
    home, _, attribute = entry.target.partition(":")
    found = getattr(importlib.import_module(home), attribute)
    if "shardwise.zero.model" in sys.modules:  # only then can there be engines, and parameters that have attributes
        importlib.import_module("shardwise.dropin.adapters.parameters").attach()
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
            return  # the import system puts a module into its parent; a name of the table comes first
        if not isinstance(entry, Alias) or entry.kind == "module":
            return super().__setattr__(name, value)
        home, _, attribute = entry.target.partition(":")
        module = importlib.import_module(home)
        _originals.setdefault((home, attribute), getattr(module, attribute))
        setattr(module, attribute, value)

    def __delattr__(self, name: str) -> None:
        """Take an assignment back; names of the table cannot be removed."""
        entry = TABLE.get(self.__name__, {}).get(name)
        if not isinstance(entry, Alias) or entry.kind == "module":
            return super().__delattr__(name)
        home, _, attribute = entry.target.partition(":")
        if (home, attribute) in _originals:
            setattr(importlib.import_module(home), attribute, _originals.pop((home, attribute)))

    def __dir__(self) -> list[str]:
        path = self.__name__
        had = {name for name, entry in TABLE.get(path, {}).items() if not isinstance(entry, Missing)}
        children = {child.rpartition(".")[2] for child in PATHS if child.rpartition(".")[0] == path}
        return sorted({*super().__dir__(), *had, *children})


_originals: dict[tuple[str, str], Any] = {}
"""What was there before the first assignment, by module and attribute of shardwise."""


def prepare(module: ModuleType) -> None:
    """Make a module one of the table; what it has already stays."""
    module.__class__ = DropInModule
    # The import statement asks the finder for a name that a module lacks, and so learns the reason, only if there is a
    # path; there is nothing on it.
    module.__dict__.setdefault("__path__", [])
    module.__doc__ = f"DeepSpeed's `{module.__name__}`, served by shardwise {__version__}; see docs/compatibility.md."


class Loader(importlib.abc.InspectLoader):
    """Makes the modules of the table."""

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DropInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run: names are looked up when they are used. So reloading changes nothing."""
        prepare(module)

    def is_package(self, fullname: str) -> bool:
        """Whether other modules are in it."""
        return fullname in PACKAGES

    def get_source(self, fullname: str) -> str:
        """Return what `python -m` runs: the command that the module is, if it is one."""
        if fullname not in MAINS:
            return ""
        home, _, attribute = MAINS[fullname].partition(":")
        return f"import sys\nfrom {home} import {attribute}\nsys.exit({attribute}())\n"

    @override
    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), f"<shardwise's {fullname}>", "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the table, and the distribution that they seem to come from."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`.

        Raises:
            AbsentImportError: what is imported is a name or a module of DeepSpeed's that is not there, and it is known
                why. `importlib.util.find_spec`, which only asks whether there is such a module, gets None.
        """
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
        """Answer `importlib.metadata` when it asks for `deepspeed` or for everything."""
        name = None if context is None else context.name
        if name is not None:
            return [Metadata()] if name.lower() == ROOT else []
        # A drop-in that is installed lists itself.
        return [] if any(found.kind == DROP_IN for found in installed()) else [Metadata()]


def _is_question() -> bool:
    """Whether `importlib.util.find_spec` asks, rather than an import."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "importlib.util"


class Metadata(importlib.metadata.Distribution):
    """The distribution `deepspeed`, as `importlib.metadata` sees it."""

    def read_text(self, filename: str) -> str | None:
        """Return one of the files that a distribution has."""
        return {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n"
                f"Summary: DeepSpeed's names, served by shardwise {__version__}\nRequires-Dist: shardwise\n"
            ),
            "top_level.txt": f"{ROOT}\n",
            "INSTALLER": "shardwise\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return where a file of it would be: with the drop-in."""
        return Path(__file__).parent / path
