"""Generated parts of documentation pages."""

from __future__ import annotations


def fill(text: str, content: str, begin: str, end: str) -> str:
    """Return a page with new text between two markers. Raises ValueError without both markers in this order."""
    before, first, rest = text.partition(begin)
    _, second, after = rest.partition(end)
    if not first or not second:
        raise ValueError(f"the page needs a line {begin!r} and after it a line {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"
