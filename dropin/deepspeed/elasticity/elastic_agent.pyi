from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DSElasticAgent"]

@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
class DSElasticAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
