"""Where the values of a parameter are, in words that scripts written for DeepSpeed compare with."""

from __future__ import annotations

from enum import Enum


class ZeroParamStatus(Enum):
    """Whether the values of a sharded parameter are here.

    A parameter whose values are not here has an attribute `ds_status`, which is `NOT_AVAILABLE`; with its values it
    loses the attribute, or, where scripts use `deepspeed`, it is `AVAILABLE`.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
