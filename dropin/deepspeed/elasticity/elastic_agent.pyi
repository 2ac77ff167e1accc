from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DSElasticAgent"]

@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class DSElasticAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
