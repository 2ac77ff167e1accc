"""Mixture of experts with expert parallelism: an all-to-all sends tokens to the ranks of their experts, and back.

Gates, dispatch, all-to-all and experts are common to `layer.MoE`, DeepSpeed's layer, and to `huggingface`, which
converts transformers' models. Expert parameters are declared as parts of tensors (`shardwise.declare_part`), which
every ZeRO stage, optimizer and checkpoint supports.
"""

from __future__ import annotations

from shardwise.moe.exchange import ExpertGroup, bind_experts
from shardwise.moe.layer import MoE
from shardwise.moe.load import ExpertUtilization

__all__ = ["ExpertGroup", "ExpertUtilization", "MoE", "bind_experts"]
