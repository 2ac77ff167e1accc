from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def check_for_numactl_pkg(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_numa_cores(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('the launcher binds processes to cores by itself (--bind_cores_to_rank), without numactl')
def get_numactl_cmd(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def parse_range(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def parse_range_list(*args: Any, **kwargs: Any) -> NoReturn: ...
