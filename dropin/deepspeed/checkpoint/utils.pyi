from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.helpers import clone_tensors_for_torch_save as clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank"]

@deprecated('checkpoints here are safetensors and JSON, which `shardwise.checkpoint` writes, and no files of this form')
def get_layer_ckpt_name_for_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here are safetensors and JSON, which `shardwise.checkpoint` writes, and no files of this form')
def get_model_ckpt_name_for_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here are safetensors and JSON, which `shardwise.checkpoint` writes, and no files of this form')
def get_zero_ckpt_name_for_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
