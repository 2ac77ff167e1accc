"""The engine and its construction."""

from shardwise.engine.build import initialize
from shardwise.engine.engine import Engine
from shardwise.engine.pipeline import PipelineEngine
from shardwise.engine.step import StepReport

initialize_engine = initialize

__all__ = ["Engine", "PipelineEngine", "StepReport", "initialize", "initialize_engine"]
