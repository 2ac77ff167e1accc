"""Status of a parameter's values, with the names that scripts written for DeepSpeed compare."""

from __future__ import annotations

from enum import Enum


class ZeroParamStatus(Enum):
    """Whether the values of a sharded parameter are on this rank; `ds_status` of a resharded one is NOT_AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
