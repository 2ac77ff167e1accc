"""HTML report of a run: one self-contained file, drawn from a run directory (`shardwise.runfiles`), without torch.

File content is data, never markup or code in the page.
"""

from __future__ import annotations

from .page import write_report

__all__ = ["write_report"]
