from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.recompute import CudaRNGStatesTracker as CudaRNGStatesTracker
from shardwise.recompute import checkpoint as checkpoint
from shardwise_deepspeed.checkpointing import configure as configure
from shardwise.recompute import get_cuda_rng_tracker as get_cuda_rng_tracker
from shardwise_deepspeed.checkpointing import is_configured as is_configured
from shardwise.recompute import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from shardwise.recompute import model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed
from shardwise_deepspeed.checkpointing import non_reentrant_checkpoint as non_reentrant_checkpoint
from shardwise_deepspeed.checkpointing import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from shardwise_deepspeed.checkpointing import reset as reset

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "extract_tensors", "gather_partitioned_activations", "get_cpu_activations_for_backward", "get_cuda_rng_tracker", "get_offloaded_activations_for_backward", "get_partition_size", "get_partition_start", "get_partitioned_activations_for_backward", "is_activation_to_checkpoint", "is_configured", "merge_tensors", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint", "partition_activations", "partition_activations_in_checkpoint", "reset", "restore_offloaded_activations", "set_num_layers"]

@deprecated('saved inputs are divided, and put together, where autograd keeps them')
class CheckpointFunction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def extract_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def gather_partitioned_activations(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_cpu_activations_for_backward(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_offloaded_activations_for_backward(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_partition_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_partition_start(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_partitioned_activations_for_backward(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def is_activation_to_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def merge_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def partition_activations(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def restore_offloaded_activations(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def set_num_layers(*args: Any, **kwargs: Any) -> NoReturn: ...
