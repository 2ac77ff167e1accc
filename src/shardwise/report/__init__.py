"""The report of a run: one HTML file, with everything in it, drawn from a run directory (`shardwise.runfiles`).

`reading` reads the files and finds what is wrong with them, `summing` adds up, `figures` says what is drawn, and `page`
puts it together. Nothing of torch is needed. What stands in the files is data: it is never markup or code in the page.
"""

from __future__ import annotations

from .page import write_report

__all__ = ["write_report"]
