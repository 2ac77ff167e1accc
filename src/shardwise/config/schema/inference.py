"""Generation by an engine that trains."""

from __future__ import annotations

from shardwise.errors import ConfigError

from .base import At, ConfigSection, Contradictions, Int, key
from .tables import with_unused_keys


@with_unused_keys
class HybridEngine(ConfigSection):
    """`hybrid_engine`: weights for `engine.generate()` between steps of training."""

    enabled: bool = key(False, "Gather weights once for answers, and merge low-rank adapters meanwhile.")
    max_out_tokens: Int | None = key(
        None, "Most tokens of prompt and answer; null: no limit.", default_note="512 in DeepSpeed", gt=0
    )
    inference_tp_size: Int = key(
        1,
        "Above 1: adjacent ranks share a copy of the model for answers, to which weights are sent; they answer their "
        "prompts together.",
        ge=1,
    )
    release_inference_cache: bool = key(False, "Return cached device memory to the system after each answer.")
    pin_parameters: bool = key(
        True, "In evaluation mode weights stay gathered until `engine.train()`; false: for one answer."
    )
    enable_cuda_graph: bool = key(False, "Record CUDA graphs of answers: refused.")

    def contradictions(self, at: At) -> Contradictions:
        """Refuse CUDA graphs."""
        if self.enabled and self.enable_cuda_graph:
            message = (
                'answers run without CUDA graphs; write false, or compile with engine.compile(mode="reduce-overhead")'
            )
            yield "enable_cuda_graph", message, ConfigError
