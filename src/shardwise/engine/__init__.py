"""The engine and its construction."""

from shardwise.engine.build import Training, initialize
from shardwise.engine.engine import Engine
from shardwise.engine.pipeline import PipelineEngine
from shardwise.engine.step import StepReport

__all__ = ["Engine", "PipelineEngine", "StepReport", "Training", "initialize"]
