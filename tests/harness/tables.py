"""Tables of cases, in JSON beside the tests that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tables(test: str) -> dict[str, Any]:
    """Return the tables of a test module by name: `test_x.json` beside `test_x.py`."""
    found: dict[str, Any] = json.loads(Path(test).with_suffix(".json").read_text("utf-8"))
    return found
