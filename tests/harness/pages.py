"""Pages of docs/reference of which a part is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@dataclass(frozen=True)
class Page:
    """A page with a generated part between two lines, which `python -m MODULE docs/reference/NAME` writes.

    Attributes:
        name: of the file.
        word: of both lines.
        module: that writes the page.
        content: makes the part.
    """

    name: str
    word: str
    module: str
    content: Callable[[], str]

    def update(self, text: str) -> str:
        """Return the text of the page with a new part. Raises ValueError without both lines in their order."""
        begin, end = f"<!-- {self.word}: made by python -m {self.module} -->", f"<!-- end of {self.word} -->"
        before, first, rest = text.partition(begin)
        _, second, after = rest.partition(end)
        if not first or not second:
            raise ValueError(f"the page needs a line {begin!r} and after it a line {end!r}")
        return f"{before}{begin}\n\n{self.content()}\n{end}{after}"

    def check(self) -> None:
        """Compare the page with what it would be now."""
        text = (REFERENCE / self.name).read_text(encoding="utf-8")
        assert self.update(text) == text, f"run `python -m {self.module} docs/reference/{self.name}`"

    def write(self) -> None:
        """Write the page."""
        file = REFERENCE / self.name
        file.write_text(self.update(file.read_text(encoding="utf-8")), encoding="utf-8")
