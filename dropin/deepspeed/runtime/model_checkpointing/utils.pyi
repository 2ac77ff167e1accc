from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ExpertParallelInfo", "MPUInfo", "UniversalParallelInfo", "create_data_parallel_writer_config", "create_universal_parallel_info"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class ExpertParallelInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class MPUInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class UniversalParallelInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def create_data_parallel_writer_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def create_universal_parallel_info(*args: Any, **kwargs: Any) -> NoReturn: ...
