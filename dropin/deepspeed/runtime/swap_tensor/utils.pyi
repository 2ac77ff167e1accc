from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AIO_ALIGNED_BYTES", "MIN_AIO_BYTES", "MIN_SWAPPABLE_BYTES", "SwapBuffer", "SwapBufferManager", "SwapBufferPool", "get_sized_buffer", "get_sized_buffers", "print_object", "swap_in_tensors", "swap_out_tensors"]

AIO_ALIGNED_BYTES: object
MIN_AIO_BYTES: object
MIN_SWAPPABLE_BYTES: object
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class SwapBuffer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class SwapBufferManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class SwapBufferPool:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def get_sized_buffer(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def get_sized_buffers(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def print_object(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def swap_in_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def swap_out_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
