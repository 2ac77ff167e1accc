from deepspeed.runtime.pipe import dualpipev as dualpipev
from deepspeed.runtime.pipe import engine as engine
from deepspeed.runtime.pipe import module as module
from deepspeed.runtime.pipe import p2p as p2p
from deepspeed.runtime.pipe import schedule as schedule
from deepspeed.runtime.pipe import topology as topology
from shardwise.pipe import LayerSpec as LayerSpec
from shardwise_deepspeed.engine import PipelineModule as PipelineModule
from shardwise.pipe import ProcessTopology as ProcessTopology
from shardwise.pipe import TiedLayerSpec as TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "dualpipev", "engine", "module", "p2p", "schedule", "topology"]
