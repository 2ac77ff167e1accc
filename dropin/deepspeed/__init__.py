"""`import deepspeed` gives shardwise; the names are in shardwise.dropin."""

from shardwise.dropin import become_root

become_root(__name__)
