from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]

@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class ElasticityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class ElasticityConfigError(Exception):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class ElasticityError(Exception):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class ElasticityIncompatibleWorldSize(Exception):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
