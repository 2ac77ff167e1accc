from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.elasticity import config as config
from deepspeed.elasticity import elastic_agent as elastic_agent
from deepspeed.elasticity import elasticity as elasticity
from deepspeed.elasticity import utils as utils

__all__ = ["DSElasticAgent", "compute_elastic_config", "config", "elastic_agent", "elasticity", "elasticity_enabled", "ensure_immutable_elastic_config", "utils"]

@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
class DSElasticAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
def compute_elastic_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
def elasticity_enabled(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer processes)')
def ensure_immutable_elastic_config(*args: Any, **kwargs: Any) -> NoReturn: ...
