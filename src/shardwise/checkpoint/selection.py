"""Selection of tensors to load, and their names in the model.

Names are those of a state dict: parameters (under every name of a tied one), buffers, and `<module>._extra_state`.
Rules convert names of the checkpoint to names of the model, and patterns are compared with both the model's and
converted names. Hence an excluded tensor is neither missing nor unexpected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Manifest
from shardwise.errors import CheckpointError, UsageError

EXTRA = "_extra_state"
"""Last part of the name of a module's extra state in a state dict."""

Patterns = str | Iterable[str]
"""One pattern of fnmatch or several: `*` is any text, dots included, `?` one character, `[ab]` one of some."""

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]
"""{checkpoint's name: model's name}, [(regular expression, replacement)] in turn as `re.sub`, or a function."""


def extra_name(module: str) -> str:
    """Return the name of a module's extra state in a state dict."""
    return f"{module}.{EXTRA}" if module else EXTRA


@dataclass(frozen=True)
class Selection:
    """Names to load, and their new names (`rename`); by default all, unchanged.

    A name must match a pattern of `include` (None: every name does), and none of `exclude`. A tied parameter is loaded
    if one of its names is included and none is excluded.

    >>> selection = Selection.of(include="blocks.*", exclude=["*.bias"])
    >>> selection.wants(["blocks.0.weight"]), selection.wants(["blocks.0.bias"]), selection.wants(["head.weight"])
    (True, False, False)
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] | tuple[tuple[re.Pattern[str], str], ...] | Callable[[str], str] | None = None

    @classmethod
    def of(
        cls, include: Patterns | None = None, exclude: Patterns | None = None, rename: Rename | None = None
    ) -> Selection:
        """Return the selection for arguments of a call. Raises UsageError if an argument has a wrong type."""
        included = None if include is None else _patterns("include", include)
        return cls(included, _patterns("exclude", exclude or ()), _rules(rename))

    @property
    def everything(self) -> bool:
        """Whether all tensors are loaded."""
        return self.include is None and not self.exclude

    def wants(self, names: Iterable[str]) -> bool:
        """Return True if a tensor with these names is loaded."""
        known = tuple(names)
        if self.include is not None and not any(fnmatchcase(name, p) for p in self.include for name in known):
            return False
        return not any(fnmatchcase(name, p) for p in self.exclude for name in known)

    def unused_patterns(self, names: Iterable[str]) -> list[str]:
        """Return, in words, the patterns that match none of some names."""
        known = list(names)
        given = [("include", pattern) for pattern in self.include or ()] + [("exclude", p) for p in self.exclude]
        return [
            f"{argument} {pattern!r}"
            for argument, pattern in given
            if not any(fnmatchcase(name, pattern) for name in known)
        ]


@dataclass(frozen=True)
class Renamed:
    """A manifest under the model's names, the new name of every changed one, and the rules without a match."""

    manifest: Manifest
    names: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()


def rename(manifest: Manifest, selection: Selection, path: str) -> Renamed:
    """Rename the tensors of a checkpoint to the model's names.

    Raises:
        CheckpointError: two tensors would have one name.
        UsageError: the rules fail, or return a value that is not a name.
    """
    if selection.rename is None:
        return Renamed(manifest)
    tensors = [t for t in manifest.tensors if t.kind in (PARAMETER, BUFFER)]
    old = [name for t in tensors if t.rank is None for name in (t.name, *t.aliases)]
    old += [*manifest.excluded, *map(extra_name, manifest.extra)]
    new, unused = _apply(selection.rename, list(dict.fromkeys(old)))
    owners: dict[str, str] = {}
    groups = [(t.name, *t.aliases) for t in tensors if t.rank is None]
    groups += [(name,) for name in (*manifest.excluded, *map(extra_name, manifest.extra))]
    for first, *others in groups:
        for name in dict.fromkeys(new[known] for known in (first, *others)):
            if owners.setdefault(name, first) != first:
                raise CheckpointError(
                    f"{path}: rename gives the name {name!r} to two tensors, {owners[name]!r} and {first!r}; every "
                    "tensor needs a name of its own"
                )
    changed = {name: other for name, other in new.items() if name != other}
    named = [
        replace(t, name=new[t.name], aliases=tuple(dict.fromkeys(new[alias] for alias in t.aliases)))
        if t.kind in (PARAMETER, BUFFER) or (t.kind.startswith(OPTIMIZER) and t.name in new)
        else t
        for t in manifest.tensors
    ]
    extra = {_module_of(new[extra_name(module)], path): tree for module, tree in manifest.extra.items()}
    optimizer = manifest.optimizer
    if optimizer is not None:
        values = {new.get(name, name): state for name, state in optimizer["values"].items()}
        optimizer = {**optimizer, "values": values}
    excluded = [new[name] for name in manifest.excluded]
    return Renamed(
        replace(manifest, tensors=named, excluded=excluded, extra=extra, optimizer=optimizer), changed, unused
    )


def _module_of(name: str, path: str) -> str:
    if name == EXTRA:
        return ""
    if not name.endswith(f".{EXTRA}"):
        raise CheckpointError(
            f"{path}: rename gives the extra state of a module the name {name!r}; it must end in {EXTRA!r}"
        )
    return name.removesuffix(f".{EXTRA}")


def _apply(
    rules: Mapping[str, str] | tuple[tuple[re.Pattern[str], str], ...] | Callable[[str], str], names: list[str]
) -> tuple[dict[str, str], list[str]]:
    if isinstance(rules, Mapping):
        unused = [f"rename {name!r}" for name in rules if name not in set(names)]
        return {name: rules.get(name, name) for name in names}, unused
    if isinstance(rules, tuple):
        found = {name: name for name in names}
        unused = []
        for pattern, replacement in rules:
            matched = [name for name, now in found.items() if pattern.search(now)]
            if not matched:
                unused.append(f"rename {pattern.pattern!r}")
            for name in matched:
                found[name] = _substituted(pattern, replacement, found[name])
        return found, unused
    return {name: _called(rules, name) for name in names}, []


def _substituted(pattern: re.Pattern[str], replacement: str, name: str) -> str:
    try:
        return pattern.sub(replacement, name)
    except (re.error, IndexError) as error:
        raise UsageError(f"rename: the replacement {replacement!r} of {pattern.pattern!r} is wrong: {error}") from error


def _called(function: Callable[[str], str], name: str) -> str:
    try:
        found = function(name)
    except Exception as error:
        raise UsageError(f"rename: the function failed on {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, str):
        raise UsageError(f"rename: the function returned {found!r} for {name!r}; expected the name in the model, a str")
    return found


def _patterns(argument: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for pattern in found:
        if not isinstance(pattern, str):
            raise UsageError(f"{argument}: expected patterns such as 'blocks.*', found {pattern!r}")
    return found


def _rules(given: Any) -> Any:
    if given is None or (callable(given) and not isinstance(given, Mapping)):
        return given
    if isinstance(given, Mapping):
        for pair in given.items():
            if not all(isinstance(name, str) for name in pair):
                raise UsageError(f"rename: expected {{name in the checkpoint: name in the model}}, found {pair!r}")
        return dict(given)
    return tuple(_compiled(given))


def _compiled(given: Any) -> Iterator[tuple[re.Pattern[str], str]]:
    pairs = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise UsageError(
                "rename: expected a dictionary of names, a list of (regular expression, replacement), or a function; "
                f"found {pair!r}"
            )
        try:
            yield re.compile(pair[0]), pair[1]
        except re.error as error:
            raise UsageError(f"rename: {pair[0]!r} is not a regular expression: {error}") from error


def names_in(manifest: Manifest) -> Iterator[str]:
    """Yield every name of a checkpoint's parameters, buffers and extra state."""
    for tensor in manifest.of_module():
        yield from (tensor.name, *tensor.aliases)
    yield from manifest.excluded
    yield from map(extra_name, manifest.extra)
