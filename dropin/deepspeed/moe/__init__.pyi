from deepspeed.moe import experts as experts
from deepspeed.moe import layer as layer
from deepspeed.moe import mappings as mappings
from deepspeed.moe import sharded_moe as sharded_moe
from deepspeed.moe import utils as utils
from shardwise_deepspeed.experts import MoE as MoE

__all__ = ["MoE", "experts", "layer", "mappings", "sharded_moe", "utils"]
