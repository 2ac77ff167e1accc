"""Configurations whose values stand at paths with dots."""

from __future__ import annotations

from typing import Any


def config_of(keys: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with values at paths; with a batch size of 8 unless the paths have one."""
    source: dict[str, Any] = {} if any(key.startswith("train_") for key in keys) else {"train_batch_size": 8}
    for path, value in keys.items():
        place = source
        *above, last = path.split(".")
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return source
