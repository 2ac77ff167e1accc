from shardwise.pipe import LayerSpec as LayerSpec
from shardwise_deepspeed.engine import PipelineModule as PipelineModule
from shardwise.pipe import ProcessTopology as ProcessTopology
from shardwise.pipe import TiedLayerSpec as TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
