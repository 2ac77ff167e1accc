"""Mixtures of experts whose experts are divided over ranks: tokens travel to the rank that has theirs, and back.

`layer.MoE` is DeepSpeed's layer; `huggingface` divides the experts of models of transformers. Both are made of the same
parts: a gate chooses (`gates`), tokens are sorted by expert (`dispatch`), exchanged (`exchange`) and computed
(`experts`). Nothing beneath knows of experts: their parameters are declared as parts of tensors
(`shardwise.declare_part`), which every ZeRO stage, optimizer and checkpoint understands.
"""

from __future__ import annotations

from shardwise.moe.exchange import ExpertGroup, bind_experts
from shardwise.moe.layer import MoE
from shardwise.moe.load import ExpertUtilization

__all__ = ["ExpertGroup", "ExpertUtilization", "MoE", "bind_experts"]
