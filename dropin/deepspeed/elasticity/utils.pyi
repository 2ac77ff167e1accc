from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["is_torch_elastic_compatible"]

@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
def is_torch_elastic_compatible(*args: Any, **kwargs: Any) -> NoReturn: ...
