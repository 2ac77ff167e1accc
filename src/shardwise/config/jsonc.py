"""A reader of JSON with the extensions that people use in configuration files.

It accepts standard JSON, the numbers Infinity and NaN of Python's json module, and the notation of Hjson
(hjson.github.io): comments (`//`, `#`, `/* */`), trailing commas, line ends instead of commas, names and strings
without quotes or with single ones, a top-level object without braces. It reports used extensions, because other readers
refuse them, and the line of every key. Unlike the standard library it refuses duplicate keys. A comma, a bracket, a
double quote or a comment in a string without quotes, which ends with its line, is an error, because it is hardly meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .problems import Path, dotted

_SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NUMBER = re.compile(r"-?(?:Infinity|NaN|(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\w.])")
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_NAME = re.compile(r"[^\s{}\[\],:\"'#/][^\s{}\[\],:]*")
_LITERAL_END = re.compile(r"[ \t\r]*(?:[,}\]\n#]|//|/\*|\Z)")
_NOT_MEANT = re.compile(r'[{}\[\]",]|(?:^|\s)(?:#|//)|/\*')
"""Characters that a string without quotes must not have, because it ends with its line."""
_WORDS = {"true": True, "false": False, "null": None}
DEEPEST = 64
_LONGEST_NUMBER = 1000


class JSONSyntaxError(ValueError):
    """The text is not JSON; the message has line and column."""


@dataclass
class Parsed:
    """A JSON value, the line of each key, duplicate paths, and used extensions with the line of first use."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    extensions: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Parsed:
    """Read JSON or Hjson. Raises JSONSyntaxError with line and column of the first error.

    >>> parse('{"a": 1,  // one\\n "b": [2, 3,],}').value
    {'a': 1, 'b': [2, 3]}
    >>> parse("a: 1\\nb: {c: 2}\\n").value
    {'a': 1, 'b': {'c': 2}}
    """
    reader = _Reader(text)
    reader.skip_space()
    if reader.is_member():
        reader.note("no braces around the top level")
        value: Any = reader.read_members((), "")
    else:
        value = reader.read_value(())
    reader.skip_space()
    if reader.position < len(text):
        raise reader.error("the text goes on after the end of the value")
    reader.result.value = value
    return reader.result


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.result = Parsed(None)
        self._lines, self._counted = 1, 0
        self._value_end = 0

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        if match is not None:
            if "#" in match.group() or "/" in match.group():
                self.note("a comment")
            self.position = match.end()

    def note(self, what: str) -> None:
        if what not in self.result.extensions:
            self.result.extensions[what] = self.line()

    def is_member(self) -> bool:
        name = _NAME.match(self.text, self.position) or _STRING.match(self.text, self.position)
        after = None if name is None else _SPACE.match(self.text, name.end())
        return after is not None and self.text[after.end() : after.end() + 1] == ":"

    def line(self) -> int:
        # Positions only grow, so counting goes on from the last one.
        self._lines += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._lines

    def error(self, message: str) -> JSONSyntaxError:
        column = self.position - (self.text.rfind("\n", 0, self.position) + 1) + 1
        return JSONSyntaxError(f"line {self.line()}, column {column}: {message}")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def read_value(self, path: Path) -> Any:
        if len(path) > DEEPEST:
            raise self.error(f"nested more than {DEEPEST} deep")
        char = self.peek()
        if char == "{":
            return self.read_object(path)
        if char == "[":
            return self.read_array(path)
        if char == '"':
            return self.read_string()
        if char == "'":
            return self.read_single()
        number = _NUMBER.match(self.text, self.position)
        word = next((word for word in _WORDS if self.text.startswith(word, self.position)), None)
        end = number.end() if number else self.position + len(word or "")
        if not ((number or word) and _LITERAL_END.match(self.text, end)):
            text = self._rest_of_line()
            if text and char not in "}],:" and not _NOT_MEANT.search(text):
                self.note("a string without quotes")
                self.position += len(text)
                return text
        if number is not None:
            if end - self.position > _LONGEST_NUMBER:
                raise self.error(f"a number of {end - self.position} characters")
            self.position = end
            return json.loads(number.group())
        if word is not None and not re.match(r"\w", self.text[end : end + 1]):
            self.position = end
            return _WORDS[word]
        raise self.error(self._what_is_wrong())

    def _rest_of_line(self) -> str:
        end = self.text.find("\n", self.position)
        return self.text[self.position : end if end >= 0 else len(self.text)].rstrip()

    def _what_is_wrong(self) -> str:
        rest = self.text[self.position : self.position + 20].split("\n")[0]
        if not rest:
            return "a value is missing here (is a closing brace missing?)"
        word = re.match(r"[\w.+-]+", rest)
        if word and word.group() in ("True", "False", "None"):
            return f"{word.group()} is Python; JSON writes true, false, null"
        if word:
            return f"expected a value, found {rest!r}; strings need double quotes"
        return f"expected a value, found {rest!r}"

    def read_string(self) -> str:
        match = _STRING.match(self.text, self.position)
        if match is None:
            raise self.error("this string is not closed on its line")
        try:
            value: str = json.loads(match.group(), strict=False)
        except json.JSONDecodeError as problem:
            raise self.error(f"bad escape in string ({problem.msg})") from None
        self.position = match.end()
        return value

    def read_single(self) -> str:
        match = _SINGLE.match(self.text, self.position)
        if match is None or self.text.startswith("'''", self.position):
            raise self.error("a string of several lines, or one that is not closed on its line")
        self.note("single quotes")
        inner = re.sub(r'\\(.)|"', lambda found: {"'": "'", None: '\\"'}.get(found[1], found[0]), match.group()[1:-1])
        try:
            value: str = json.loads(f'"{inner}"', strict=False)
        except json.JSONDecodeError as problem:
            raise self.error(f"bad escape in string ({problem.msg})") from None
        self.position = match.end()
        return value

    def read_array(self, path: Path) -> list[Any]:
        self.position += 1
        values: list[Any] = []
        while True:
            self.skip_space()
            if self.peek() == "]":
                self.position += 1
                return values
            if values:
                self._expect_comma_before("]")
                if self.peek() == "]":
                    continue
            values.append(self.read_value((*path, len(values))))
            self._value_end = self.position

    def read_object(self, path: Path) -> dict[str, Any]:
        self.position += 1
        return self.read_members(path, "}")

    def read_members(self, path: Path, closing: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while True:
            self.skip_space()
            if self.peek() == closing:
                self.position += len(closing)
                return values
            if values:
                self._expect_comma_before(closing)
                if self.peek() == closing:
                    continue
            name, line = self.read_name(), self.line()
            here = (*path, name)
            if name in values:
                self.result.duplicates.append(f"{dotted(here)} (lines {self.result.lines[here]} and {line})")
            self.result.lines[here] = line
            self.skip_space()
            if self.peek() != ":":
                raise self.error(f'expected ":" after the key "{name}"')
            self.position += 1
            self.skip_space()
            values[name] = self.read_value(here)
            self._value_end = self.position

    def read_name(self) -> str:
        if self.peek() == '"':
            return self.read_string()
        if self.peek() == "'":
            return self.read_single()
        match = _NAME.match(self.text, self.position)
        if match is None or not self.is_member():
            raise self.error("expected a key in double quotes")
        self.note("a name without quotes")
        self.position = match.end()
        return match.group()

    def _expect_comma_before(self, closing: str) -> None:
        if self.peek() != ",":
            if "\n" not in self.text[self._value_end : self.position] or not self.peek():
                raise self.error(f'expected "," or "{closing}"')
            self.note("a line end instead of a comma")
            return
        self.position += 1
        self.skip_space()
        if self.peek() == closing:
            self.note("a trailing comma")
