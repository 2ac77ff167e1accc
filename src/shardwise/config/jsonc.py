"""A reader of JSON as people write it in configuration files.

It accepts standard JSON and, beyond it, comments (`//`, `#`, `/* */`), trailing commas and the numbers
Infinity and NaN, which Python's own json module writes. It knows the line of every key and refuses a key that
appears twice in the same object: the standard library keeps the last one in silence.
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
_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 64


class JSONSyntaxError(ValueError):
    """The text is not JSON; the message has line and column."""


@dataclass
class Parsed:
    """A JSON value with the line of each key and the paths that were given twice."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)


def parse(text: str) -> Parsed:
    """Read JSON with comments and trailing commas.

    Raises:
        JSONSyntaxError: with line and column of the first place that cannot be read.

    >>> parse('{"a": 1,  // one\\n "b": [2, 3,],}').value
    {'a': 1, 'b': [2, 3]}
    """
    reader = _Reader(text)
    reader.skip_space()
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

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        if match is not None:
            self.position = match.end()

    def line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def error(self, message: str) -> JSONSyntaxError:
        column = self.position - (self.text.rfind("\n", 0, self.position) + 1) + 1
        return JSONSyntaxError(f"line {self.line()}, column {column}: {message}")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def read_value(self, path: Path) -> Any:
        if len(path) > _DEEPEST:
            raise self.error(f"nested more than {_DEEPEST} deep")
        char = self.peek()
        if char == "{":
            return self.read_object(path)
        if char == "[":
            return self.read_array(path)
        if char == '"':
            return self.read_string()
        number = _NUMBER.match(self.text, self.position)
        if number is not None:
            self.position = number.end()
            return json.loads(number.group())
        for word, value in _WORDS.items():
            if re.compile(rf"{word}\b").match(self.text, self.position):
                self.position += len(word)
                return value
        raise self.error(self._what_is_wrong())

    def _what_is_wrong(self) -> str:
        rest = self.text[self.position : self.position + 20].split("\n")[0]
        if not rest:
            return "a value is missing here (is a closing brace missing?)"
        if rest.startswith("'"):
            return f"strings need double quotes, found {rest!r}"
        word = re.match(r"[\w.+-]+", rest)
        if word and word.group() in ("True", "False", "None"):
            return f"{word.group()} is Python; JSON writes true, false, null"
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

    def read_object(self, path: Path) -> dict[str, Any]:
        self.position += 1
        values: dict[str, Any] = {}
        while True:
            self.skip_space()
            if self.peek() == "}":
                self.position += 1
                return values
            if values:
                self._expect_comma_before("}")
                if self.peek() == "}":
                    continue
            if self.peek() != '"':
                raise self.error("expected a key in double quotes")
            line = self.line()
            name = self.read_string()
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

    def _expect_comma_before(self, closing: str) -> None:
        if self.peek() != ",":
            raise self.error(f'expected "," or "{closing}"')
        self.position += 1
        self.skip_space()
