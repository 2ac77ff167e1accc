from shardwise.inference import InferenceEngine as InferenceEngine

__all__ = ["InferenceEngine"]
