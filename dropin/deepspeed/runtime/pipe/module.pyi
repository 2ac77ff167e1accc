from shardwise.pipe import LayerSpec as LayerSpec
from shardwise.errors import PipelineError as PipelineError
from shardwise_deepspeed.engine import PipelineModule as PipelineModule
from shardwise.pipe import TiedLayerSpec as TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
