from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.variable_batches import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed

__all__ = ["VariableBatchSizeLR", "batch_by_seqlens", "dataloader_for_variable_batch_size", "get_dataloader_and_lr_scheduler_for_variable_batch_size", "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed", "lr_scheduler_for_variable_batch_size", "scale_lr"]

@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
class VariableBatchSizeLR:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def batch_by_seqlens(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def dataloader_for_variable_batch_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def get_dataloader_and_lr_scheduler_for_variable_batch_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def lr_scheduler_for_variable_batch_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def scale_lr(*args: Any, **kwargs: Any) -> NoReturn: ...
