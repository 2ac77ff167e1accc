"""Writes type stubs: of the package `deepspeed` from names.toml, of the getters from getters.toml; a test compares.

`python dropin/stubs.py` replaces every `.pyi` below dropin. A stub class or function is marked as deprecated with the
reason, which editors show. A name that cannot be imported is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from shardwise_deepspeed.entries import Alias, Missing, Stub, read, table
from shardwise_deepspeed.modules import PACKAGES, PATHS

CONSTANTS = "shardwise_deepspeed.constants"
OPERATORS = "shardwise_deepspeed.operators"
GETTERS = "src/shardwise_deepspeed/key_getters.pyi"


def files() -> dict[str, str]:
    """Return the content of each stub file by its path below dropin/."""
    getters = "".join(f"    def {name}(self) -> Any: ...\n" for name in read("getters.toml"))
    constants, found = read("constants.toml"), {GETTERS: f"from typing import Any\n\nclass KeyGetters:\n{getters}"}
    for path in sorted(PATHS):
        name = path.replace(".", "/") + ("/__init__.pyi" if path in PACKAGES else ".pyi")
        found[name] = _module(path, constants)
    return found


def _module(path: str, constants: dict[str, object]) -> str:
    entries = {name: entry for name, entry in table().get(path, {}).items() if not isinstance(entry, Missing)}
    children = {child.rpartition(".")[2] for child in PATHS if child.rpartition(".")[0] == path} - entries.keys()
    imports = [f"from {path} import {child} as {child}" for child in sorted(children)]
    lines: list[str] = []
    for name, entry in sorted(entries.items()):
        if isinstance(entry, Stub):
            lines.append(_stub(name, entry))
            continue
        assert isinstance(entry, Alias)
        home, attribute = entry.home, entry.attribute
        if home == CONSTANTS and attribute in constants:
            kind = type(constants[attribute]).__name__
            lines.append(f"{name}: {kind}{'[str]' if kind == 'list' else ''}")
        elif home == OPERATORS and attribute.endswith("Builder") and attribute != "OpBuilder":
            imports.append(f"from {home} import OpBuilder as _OpBuilder")
            lines.append(f"class {name}(_OpBuilder): ...")
        elif attribute:
            imports.append(f"from {home} import {attribute} as {name}")
        else:
            parent, _, module = home.rpartition(".")
            imports.append(f"from {parent} import {module} as {name}")
    needed = ["from typing import Any, NoReturn\n", "from typing_extensions import deprecated\n"] if lines else []
    public = ", ".join(f'"{name}"' for name in sorted({*entries, *children}))
    return "\n".join([*needed, *dict.fromkeys(imports), f"\n__all__ = [{public}]\n", *lines]).strip() + "\n"


def _stub(name: str, entry: Stub) -> str:
    if entry.kind == "value":
        return f"{name}: object"
    mark = f"@deprecated({entry.reason!r})\n"
    if entry.kind == "function":
        return f"{mark}def {name}(*args: Any, **kwargs: Any) -> NoReturn: ..."
    base = "(Exception)" if entry.kind == "exception" else ""
    return f"{mark}class {name}{base}:\n    def __init__(self, *args: Any, **kwargs: Any) -> None: ..."


def main() -> None:
    """Replace the stub files."""
    root = Path(__file__).parent
    for old in root.rglob("*.pyi"):
        old.unlink()
    for name, text in files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
