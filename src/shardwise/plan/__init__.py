"""Plans before a run: models, time of a step, the best setting, candidates of the autotuner, and a page of plans."""

from __future__ import annotations

from shardwise.engine.plans import Room, plan_model
from shardwise.plan.cluster import Cluster
from shardwise.plan.configurations import choose, get_training_config
from shardwise.plan.models import named_model
from shardwise.plan.rates import Machine
from shardwise.plan.time import plan_steps

__all__ = ["Cluster", "Machine", "Room", "choose", "get_training_config", "named_model", "plan_model", "plan_steps"]
