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

__all__ = ["CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "extract_tensors", "gather_partitioned_activations", "get_cuda_rng_tracker", "is_configured", "merge_tensors", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers"]

@deprecated('saved inputs are divided, and put together, where autograd keeps them')
class CheckpointFunction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def extract_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def gather_partitioned_activations(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def merge_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('saved inputs are divided, and put together, where autograd keeps them')
def set_num_layers(*args: Any, **kwargs: Any) -> NoReturn: ...
