"""Puts shardwise in the place of DeepSpeed, by the distribution in the directory `dropin/` of the repository."""

from __future__ import annotations

import importlib

from shardwise.errors import UsageError

DISTRIBUTION = "shardwise_deepspeed"


def install_as_deepspeed() -> None:
    """Make `import deepspeed` give shardwise in this process. Needs the drop-in (`pip install ./dropin`).

    Call it before anything imports `deepspeed` or looks it up in `importlib.metadata` (transformers, accelerate and
    lightning do both). A second call does nothing. Child processes other than forks must call it themselves. Raises
    UsageError if DeepSpeed itself has been imported already, or the drop-in is not installed.

    >>> import shardwise
    >>> shardwise.install_as_deepspeed()  # doctest: +SKIP
    >>> import deepspeed  # doctest: +SKIP
    >>> issubclass(deepspeed.DeepSpeedEngine, shardwise.Engine)  # doctest: +SKIP
    True
    """
    try:
        drop_in = importlib.import_module(DISTRIBUTION)
    except ModuleNotFoundError as error:
        if error.name != DISTRIBUTION:
            raise
        raise UsageError(
            f"shardwise.install_as_deepspeed(): the package {DISTRIBUTION} is not installed. Install the drop-in from "
            "a checkout of shardwise: pip install ./dropin"
        ) from None
    drop_in.install_as_deepspeed()
