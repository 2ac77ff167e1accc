"""DeepSpeed 0.19's signatures and the members of its classes, from signatures.toml."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from shardwise_deepspeed.entries import tomllib

_READ: dict[str, Any] = tomllib.loads((Path(__file__).parent / "signatures.toml").read_text(encoding="utf-8"))

MEMBERS: dict[str, dict[str, str | None]] = {
    cls: {**dict.fromkeys(rows.get("names", "").split()), **{k: v for k, v in rows.items() if k != "names"}}
    for cls, rows in _READ.pop("members").items()
}
"""Class -> served member -> arguments, None if not declared. "parameter" is a resharded parameter of stage 3."""

SIGNATURES: dict[str, dict[str, str]] = _READ
"""Module path -> name -> arguments."""


def problem(declared: str, target: Any) -> str | None:
    """Say where a target takes other arguments than declared: names, order and defaults ("...": any)."""
    wanted = inspect.signature(eval(f"lambda {declared[1:-1]}: None")).parameters
    have = inspect.signature(target).parameters
    for name, parameter in wanted.items():
        if name not in have:
            return f"no argument {name}"
        if parameter.default is parameter.empty:
            continue
        if parameter.default is not ... and parameter.default != have[name].default:
            return f"{name} has the default {have[name].default!r}"
        if parameter.default is ... and have[name].default is inspect.Parameter.empty:
            return f"{name} has no default"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = [name for name, p in have.items() if p.kind in positional]
    promised = [name for name in wanted if name in order]
    if order[: len(promised)] != promised:
        return f"its order is {order}"
    more = {n: p for n, p in have.items() if n not in wanted and p.default is inspect.Parameter.empty}
    needed = [n for n, p in more.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return f"it needs {needed}, too" if needed else None
