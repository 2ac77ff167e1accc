from shardwise.pipe import PipeDataParallelTopology as PipeDataParallelTopology
from shardwise.pipe import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from shardwise.pipe import PipelineParallelGrid as PipelineParallelGrid
from shardwise.pipe import ProcessTopology as ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
