"""`import deepspeed` gives shardwise; the names are in shardwise_deepspeed."""

from shardwise_deepspeed import become_root

become_root(__name__)
