"""Mixture of experts with expert parallelism: an all-to-all sends tokens to the ranks of their experts, and back.

`layer.MoE` is DeepSpeed's layer; `huggingface` converts the experts of transformers' models. Both share gates
(`gates`), sorting of tokens by expert (`dispatch`), all-to-all (`exchange`) and experts (`experts`). Expert parameters
are declared as parts of tensors (`shardwise.declare_part`), which every ZeRO stage, optimizer and checkpoint supports.
"""

from __future__ import annotations

from shardwise.moe.exchange import ExpertGroup, bind_experts
from shardwise.moe.layer import MoE
from shardwise.moe.load import ExpertUtilization

__all__ = ["ExpertGroup", "ExpertUtilization", "MoE", "bind_experts"]
