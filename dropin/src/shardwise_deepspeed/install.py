"""Registering the drop-in as the package `deepspeed`."""

from __future__ import annotations

import sys

from shardwise.errors import UsageError
from shardwise.launch.detect import REAL, installed, version_of
from shardwise.utils.logging import logger
from shardwise_deepspeed.modules import ROOT, DropInModule, Finder, prepare


def install_as_deepspeed() -> None:
    """Register the drop-in in this process; see `shardwise.install_as_deepspeed`."""
    loaded = sys.modules.get(ROOT)
    if loaded is not None and not isinstance(loaded, DropInModule):
        raise UsageError(
            f"shardwise.install_as_deepspeed(): DeepSpeed {version_of(loaded)} has been imported already, from "
            f"{getattr(loaded, '__file__', None)}. Call install_as_deepspeed() first of all, before anything imports "
            "deepspeed"
        )
    if _is_installed():
        return
    for found in installed():
        if found.kind == REAL:
            logger.warning(
                "DeepSpeed %s at %s is hidden in this process: `import deepspeed` gives shardwise, because of "
                "shardwise.install_as_deepspeed()",
                found.version,
                found.place,
            )
    sys.meta_path.insert(0, Finder())


def become_root(name: str) -> None:
    """Turn the module `name`, which is being imported as the package `deepspeed`, into the drop-in's root."""
    if not _is_installed():
        sys.meta_path.insert(0, Finder())
    prepare(sys.modules[name])


def _is_installed() -> bool:
    return any(isinstance(finder, Finder) for finder in sys.meta_path)
