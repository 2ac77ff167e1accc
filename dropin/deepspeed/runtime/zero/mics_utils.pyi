from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["MiCS_CommGroups", "create_mics_comm_groups", "scale_tensors"]

@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
class MiCS_CommGroups:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
def create_mics_comm_groups(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
def scale_tensors(*args: Any, **kwargs: Any) -> NoReturn: ...
