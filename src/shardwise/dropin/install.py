"""Registering the drop-in as the package `deepspeed`."""

from __future__ import annotations

import sys

from shardwise.dropin.modules import ROOT, DropInModule, Finder, prepare
from shardwise.errors import UsageError
from shardwise.launch.detect import REAL, installed, version_of
from shardwise.utils.logging import logger


def install_as_deepspeed() -> None:
    """Make `import deepspeed` give shardwise in this process, without installing anything.

    Call it before anything imports `deepspeed` or looks it up in `importlib.metadata` (transformers, accelerate and
    lightning do both). A second call does nothing. Child processes other than forks must call it themselves. Raises
    UsageError if DeepSpeed itself has been imported already.

    >>> import shardwise
    >>> shardwise.install_as_deepspeed()  # doctest: +SKIP
    >>> import deepspeed  # doctest: +SKIP
    >>> deepspeed.DeepSpeedEngine is shardwise.Engine  # doctest: +SKIP
    True
    """
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
