"""The package's logger: one line per event, on rank 0. `SHARDWISE_LOG_LEVEL` sets its level at the start."""

from __future__ import annotations

import logging
import os
import sys
from functools import lru_cache

logger = logging.getLogger("shardwise")
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s", "%H:%M:%S"))
    logger.addHandler(_handler)
    _level = getattr(logging, os.environ.get("SHARDWISE_LOG_LEVEL", "info").upper(), None)
    logger.setLevel(_level if isinstance(_level, int) else logging.INFO)
    logger.propagate = False


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Log a warning only once in this process."""
    logger.warning(message)


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks only.

    `ranks` [-1] are all ranks. None or empty: rank 0 before `torch.distributed` is initialised, no rank afterwards.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if not ranks or (ranks != [-1] and dist.get_rank() not in ranks):
            return
        message = f"[rank {dist.get_rank()}] {message}"
    logger.log(level, message)
