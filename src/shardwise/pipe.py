"""Pipeline parallelism: models as layers, their stages, topologies, and schedules ([docs/pipeline.md])."""

from shardwise.comm.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from shardwise.engine.grid import PipelineParallelGrid
from shardwise.pipeline import (
    SCHEDULES,
    Schedule,
    Simulation,
    Times,
    make_schedule,
    simulate,
    svg,
    text_chart,
    trace_events,
    with_communication,
)
from shardwise.pipeline.idle import IdleTimes
from shardwise.pipeline.layers import LayerSpec, PipelineStage, TiedLayerSpec
from shardwise.pipeline.module import PipelineModule

__all__ = [
    "SCHEDULES",
    "IdleTimes",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "PipelineStage",
    "ProcessTopology",
    "Schedule",
    "Simulation",
    "TiedLayerSpec",
    "Times",
    "make_schedule",
    "simulate",
    "svg",
    "text_chart",
    "trace_events",
    "with_communication",
]
