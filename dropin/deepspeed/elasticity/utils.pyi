from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["is_torch_elastic_compatible"]

@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
def is_torch_elastic_compatible(*args: Any, **kwargs: Any) -> NoReturn: ...
