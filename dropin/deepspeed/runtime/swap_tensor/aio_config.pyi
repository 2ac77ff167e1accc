from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["get_aio_config"]

@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def get_aio_config(*args: Any, **kwargs: Any) -> NoReturn: ...
