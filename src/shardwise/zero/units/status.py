"""Status of a parameter's values, with the names that scripts written for DeepSpeed compare."""

from __future__ import annotations

from enum import Enum


class ZeroParamStatus(Enum):
    """Whether the values of a sharded parameter are on this rank.

    A resharded parameter has an attribute `ds_status`, which is `NOT_AVAILABLE`. An unsharded parameter has no such
    attribute, or `AVAILABLE` if scripts use `deepspeed`.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
