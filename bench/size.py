"""Counts lines of code, docstrings and tests by package, next to an earlier commit, and words of the pages.

    python bench/size.py [--since COMMIT] [--files N]

A line counts as code if it holds a token outside of docstrings and comments. Bare strings behind an assignment count
as docstrings. Words of the README and of docs/ are counted outside of code blocks, without docs/reference/, which is
generated. A code span with underscores counts as several words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SINCE = "d4316c5"
"""The commit at which the rearrangement of the packages began."""
WORDS = 35_000
"""Most words of the README and of docs/."""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Lines(NamedTuple):
    """Lines of one file or package."""

    files: int = 0
    code: int = 0
    docs: int = 0

    def plus(self, other: Lines) -> Lines:
        """Return the sums."""
        return Lines(self.files + other.files, self.code + other.code, self.docs + other.docs)


def count(source: str) -> Lines:
    """Count the lines of a module.

    >>> count('"A docstring."  # a comment' + chr(10) * 2 + 'x = 1' + chr(10) + '"Of x."')
    Lines(files=1, code=1, docs=2)
    """
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(1, len(code - docs), len(docs))


def package_of(path: str) -> str:
    """Return the row of a file: a package of the library, or a folder beside it."""
    parts = Path(path).parts
    if parts[0] != "src":
        return parts[0]
    return f"src/{parts[2]}" if len(parts) > 3 else "src, top level"


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file of a commit; None: of the working tree."""
    if commit is None:
        for name in _git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines():
            if name.endswith(".py") and (ROOT / name).exists():
                yield name, (ROOT / name).read_text()
        return
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode()


def by_package(commit: str | None) -> dict[str, Lines]:
    """Return the lines of each row of the table."""
    found: dict[str, Lines] = {}
    for name, text in sources(commit):
        row = package_of(name)
        found[row] = found.get(row, Lines()).plus(count(text))
    src = [lines for row, lines in found.items() if row.startswith("src")]
    found["src"] = Lines(*(sum(column) for column in zip(*src, strict=True)))
    return found


def words(page: str) -> int:
    """Count the words of a page in Markdown, without code blocks, targets of links, comments, directives, tables of
    results (bench/report.py), and rows of other tables with two or more figures.

    >>> words("See [the page](page.md).\\n::: a.module\\n  options: {}\\n```\\ncode\\n```\\n| DDP | 1.0 | 2 % |\\nlast")
    4
    """
    page = re.sub(r"<!-- table \S+ -->.*?<!-- /table -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^```.*?^```|<!--.*?-->|^:::[^\n]*(?:\n +[^\n]*)*", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^\|.*(?:\|[^|A-Za-z]*\d[^|A-Za-z]*){2}.*$", "", page, flags=re.MULTILINE)
    return len(re.findall(r"[A-Za-z][A-Za-z'-]+", re.sub(r"\]\([^)\s]*\)", "]", page)))


def words_by_page() -> dict[str, int]:
    """Return the words of the README and of each page of docs/ that is written by hand."""
    pages = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if path.parent.name != "reference")]
    return {str(path.relative_to(ROOT)): words(path.read_text("utf-8")) for path in pages}


def table(now: dict[str, Lines], before: dict[str, Lines]) -> str:
    """Return the rows as text: today's figures, and the earlier code and docstring lines."""
    rows = [f"{'':24}{'files':>7}{'code':>9}{'docstr.':>9}{'code then':>11}{'docstr. then':>14}{'code':>8}"]
    for row in sorted(now.keys() | before.keys(), key=lambda row: (not row.startswith("src"), row)):
        here, then = now.get(row, Lines()), before.get(row, Lines())
        change = f"{here.code / then.code - 1:+.0%}" if then.code else "new"
        rows.append(f"{row:24}{here.files:7,}{here.code:9,}{here.docs:9,}{then.code:11,}{then.docs:14,}{change:>8}")
    return "\n".join(rows)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=SINCE, help="the commit to compare with")
    parser.add_argument("--files", type=int, default=0, help="also list so many of the longest files of src")
    arguments = parser.parse_args()
    print(table(by_package(None), by_package(arguments.since)))
    pages = words_by_page()
    print(f"{'words of docs':24}{len(pages):7,}{sum(pages.values()):9,}  of {WORDS:,}")
    files = ((count(text).code, name) for name, text in sources(None) if name.startswith("src/"))
    for code, name in sorted(files, reverse=True)[: arguments.files]:
        print(f"{code:7,} {name}")


if __name__ == "__main__":
    main()
