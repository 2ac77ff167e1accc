"""The engine and its construction."""

from shardwise.engine.engine import Engine
from shardwise.engine.pipeline import PipelineEngine
from shardwise.engine.step import StepReport
from shardwise.engine.training import Training, initialize

__all__ = ["Engine", "PipelineEngine", "StepReport", "Training", "initialize"]
