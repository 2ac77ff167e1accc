"""Pipeline parallelism. A schedule is data: for each rank a list of actions, which can be simulated and drawn."""

from shardwise.pipeline.actions import Action, Op, Schedule, ScheduleError
from shardwise.pipeline.lowering import validate, with_communication, with_sharding
from shardwise.pipeline.picture import svg, text_chart, trace_events
from shardwise.pipeline.schedules import SCHEDULES, make_schedule, placement_of
from shardwise.pipeline.simulator import Simulation, Span, Times, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Op",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "Times",
    "make_schedule",
    "placement_of",
    "simulate",
    "svg",
    "text_chart",
    "trace_events",
    "validate",
    "with_communication",
    "with_sharding",
]
