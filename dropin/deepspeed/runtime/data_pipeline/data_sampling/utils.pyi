from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["close_mmap_dataset_builder", "create_mmap_dataset_builder", "find_fit_int_dtype", "split_dataset", "split_index"]

@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def close_mmap_dataset_builder(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def create_mmap_dataset_builder(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def find_fit_int_dtype(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def split_dataset(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
def split_index(*args: Any, **kwargs: Any) -> NoReturn: ...
