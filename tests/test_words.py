"""Names, docstrings, comments, messages and pages use the field's words, not the project's old private ones."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    "told": "reported, given, gathered",
    "said": "reported, given, local",
    "heard": "received, gathered",
    "asked": "requested",
    "lent, lend, lends, lending": "resident, acquired",
    "borrow, borrowed, borrows, borrowing": "acquired",
    "loan, loans": "tiered tensors",
    "beside": "next to, with, sidecar",
    "aside": "separately",
    "alone": "only, single, separate",
    "apart": "separate, diverged",
    "nobody, somebody, whoever": "the rank, process or caller",
    "whatever": "any",
    "dearer, dearest": "larger, largest",
    "whereabouts": "desync report",
    "leash": "parent-death signal",
    "twin, twins": "dry-run engine, fake model",
    "stash": "change of tier",
    "patience": "timeout, slow I/O",
    "hurry": "skip the grace period",
    "guilt, guilty": "root cause",
    "unnamed": "swap file",
    "neighbour, neighbours": "adjacent or local ranks",
    "imagined": "fake",
    "bereave, bereaved": "after the exit of the writer",
    "desk": "save status",
    "drafted": "staged",
    "shipment, shipments": "transfer",
    "unheard": "ignored",
}
REMAINING = {
    "checkpoint": "imagined",
    "comm": "alone apart aside beside imagined patience said somebody",
    "compat.py": "alone",
    "device": "beside",
    "engine": "alone asked beside heard imagined neighbours said told twin unnamed",
    "memory": "alone asked twin",
    "moe": "imagined",
    "numbers.md": "alone",
    "offload": "imagined",
    "parallel": "alone apart beside imagined neighbours said told",
    "registry": "aside",
    "zero": ("alone apart aside asked beside imagined patience"),
}
"""Words that packages and pages still have; they are removed here as these are rewritten."""

_WORD = {word: field for words, field in WORDS.items() for word in words.split(", ")}
_NAMES = ("name", "id", "attr", "arg", "asname")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the names, docstrings, comments and messages of a module; data strings are no messages."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from enumerate(node.value.split("\n"), line)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            continue
        yield from ((line, value) for key in _NAMES if isinstance(value := getattr(node, key, None), str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found(text: str) -> Iterator[str]:
    """Yield the private words of a text; names are split into their words."""
    words = re.findall(r"\w+", re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", text).lower())
    yield from (word for word in words if word in _WORD)


def pages() -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    """Yield (path, package, texts) of each file; the name of a module is a text, too."""
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("dropin/**/*.py")]):
        parts = path.relative_to(ROOT).parts
        package = parts[2] if len(parts) > 3 else parts[-1]
        source = path.read_text("utf-8")
        if set(found(path.stem + " " + source)) - set(REMAINING.get(package, "").split()):  # else parsing finds nothing
            yield "/".join(parts), package, [(1, path.stem), *texts(source)]
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]:
        head = re.split(r"^## \[\d", path.read_text("utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
        yield path.name, path.name, list(enumerate(head.split("\n"), 1))


def test_no_private_word_is_left() -> None:
    wrong = [
        f"{path}:{line}: {word!r}: write {_WORD[word]}"
        for path, package, lines in pages()
        for line, text in lines
        for word in found(text)
        if word not in REMAINING.get(package, "").split()
    ]
    assert not wrong, "\n".join([f"{len(wrong)} private words", *wrong])


def test_each_kind_of_text_is_searched() -> None:
    source = 'def is_asked(a):\n    """What is told."""\n    b = f"{a} said so"  # heard\n    return "lent"\n'
    assert sorted((line, word) for line, text in texts(source) for word in found(text)) == [
        (1, "asked"),
        (2, "told"),
        (3, "heard"),
        (3, "said"),
    ]
