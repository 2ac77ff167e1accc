from shardwise_deepspeed.build import ACCELERATOR_NAME as accelerator_name
from shardwise_deepspeed.operators import COMPATIBLE_OPS as compatible_ops
from shardwise_deepspeed.version import git_branch as git_branch
from shardwise_deepspeed.version import git_hash as git_hash
from shardwise_deepspeed.operators import COMPATIBLE_OPS as installed_ops
from shardwise_deepspeed.build import TORCH_INFO as torch_info
from shardwise_deepspeed.version import version as version

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
