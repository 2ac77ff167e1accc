"""Numeric precision: types of numbers, loss scaling, overflows, gradient norms and clipping."""

from shardwise.precision.dtypes import PrecisionPolicy, parse_dtype, policy_from_config
from shardwise.precision.scaler import LossScaler

__all__ = ["LossScaler", "PrecisionPolicy", "parse_dtype", "policy_from_config"]
