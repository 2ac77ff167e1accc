"""Inference: models divided over ranks, quantised weights, generation, weights sent to other ranks, and export."""

from shardwise.inference.config import InferenceConfig, default_inference_config
from shardwise.inference.engine import InferenceEngine
from shardwise.inference.reshard import ReshardPlan, WeightSync

__all__ = ["InferenceConfig", "InferenceEngine", "ReshardPlan", "WeightSync", "default_inference_config"]
