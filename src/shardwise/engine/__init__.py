"""The engine and how it is built."""

from shardwise.engine.build import initialize
from shardwise.engine.engine import Engine, StepReport

__all__ = ["Engine", "StepReport", "initialize"]
