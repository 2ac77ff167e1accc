from typing import Any, NoReturn

from typing_extensions import deprecated

from torch.distributed import P2POp as P2POp
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from shardwise.comm.api import all_gather as all_gather
from shardwise_deepspeed.collectives import all_gather_coalesced as all_gather_coalesced
from shardwise.comm.api import all_gather_into_tensor as all_gather_into_tensor
from shardwise.comm.api import all_gather_object as all_gather_object
from shardwise.comm.api import all_reduce as all_reduce
from shardwise_deepspeed.collectives import all_reduce_coalesced as all_reduce_coalesced
from shardwise.comm.api import all_to_all as all_to_all
from shardwise.comm.api import all_to_all_single as all_to_all_single
from shardwise_deepspeed.collectives import allgather_fn as allgather_fn
from shardwise.comm.api import barrier as barrier
from shardwise_deepspeed.collectives import batch_isend_irecv as batch_isend_irecv
from shardwise.comm.api import broadcast as broadcast
from shardwise.comm.api import broadcast_object_list as broadcast_object_list
from shardwise.comm.logger import comms_logger as comms_logger
from shardwise.comm.api import configure as configure
from shardwise.comm.api import destroy_process_group as destroy_process_group
from shardwise.comm.api import gather as gather
from shardwise.comm.api import get_all_ranks_from_group as get_all_ranks_from_group
from shardwise.comm.api import get_comm_operation_count as get_comm_operation_count
from shardwise.comm.api import get_global_rank as get_global_rank
from shardwise.comm.api import get_local_rank as get_local_rank
from shardwise.comm.api import get_logged_comm_ops as get_logged_comm_ops
from shardwise.comm.api import get_rank as get_rank
from shardwise.comm.api import get_world_group as get_world_group
from shardwise.comm.api import get_world_size as get_world_size
from shardwise_deepspeed.collectives import has_all_gather_into_tensor as has_all_gather_into_tensor
from shardwise_deepspeed.collectives import has_all_reduce_coalesced as has_all_reduce_coalesced
from shardwise_deepspeed.collectives import has_coalescing_manager as has_coalescing_manager
from shardwise.comm.api import has_comm_data as has_comm_data
from shardwise_deepspeed.collectives import has_reduce_scatter_tensor as has_reduce_scatter_tensor
from shardwise_deepspeed.collectives import inference_all_reduce as inference_all_reduce
from shardwise_deepspeed.clients import init_distributed as init_distributed
from shardwise_deepspeed.clients import initialize_mesh_device as initialize_mesh_device
from shardwise.comm.api import irecv as irecv
from shardwise.comm.api import is_available as is_available
from shardwise_deepspeed.clients import is_initialized as is_initialized
from shardwise.comm.api import isend as isend
from shardwise.comm.api import log_summary as log_summary
from shardwise.comm.api import monitored_barrier as monitored_barrier
from shardwise.comm.api import new_group as new_group
from shardwise.comm.api import recv as recv
from shardwise.comm.api import reduce as reduce
from shardwise.comm.api import reduce_scatter as reduce_scatter
from shardwise_deepspeed.collectives import reduce_scatter_fn as reduce_scatter_fn
from shardwise.comm.api import reduce_scatter_tensor as reduce_scatter_tensor
from shardwise.comm.api import reset_log as reset_log
from shardwise.comm.api import scatter as scatter
from shardwise.comm.api import send as send

__all__ = ["P2POp", "ProcessGroup", "ReduceOp", "TorchBackend", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "comms_logger", "configure", "destroy_process_group", "enable_symm_mem_for_group", "gather", "get_all_ranks_from_group", "get_comm_operation_count", "get_global_rank", "get_local_rank", "get_logged_comm_ops", "get_rank", "get_world_group", "get_world_size", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_comm_data", "has_reduce_scatter_tensor", "in_aml", "in_aws_sm", "in_dlts", "inference_all_reduce", "init_deepspeed_backend", "init_distributed", "initialize_mesh_device", "irecv", "is_available", "is_initialized", "isend", "log_summary", "monitored_barrier", "mpi_discovery", "new_group", "patch_aml_env_for_torch_nccl_backend", "patch_aws_sm_env_for_torch_nccl_backend", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "reset_log", "scatter", "send", "set_backend", "timed_op"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class TorchBackend:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def enable_symm_mem_for_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('init_distributed() finds the place of a process under torchrun, MPI and Slurm by itself')
def in_aml(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('init_distributed() finds the place of a process under torchrun, MPI and Slurm by itself')
def in_aws_sm(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('init_distributed() finds the place of a process under torchrun, MPI and Slurm by itself')
def in_dlts(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def init_deepspeed_backend(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('init_distributed() finds the place of a process under torchrun, MPI and Slurm by itself')
def mpi_discovery(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def patch_aml_env_for_torch_nccl_backend(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def patch_aws_sm_env_for_torch_nccl_backend(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def set_backend(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def timed_op(*args: Any, **kwargs: Any) -> NoReturn: ...
