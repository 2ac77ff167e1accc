from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.elasticity import config as config
from deepspeed.elasticity import elastic_agent as elastic_agent
from deepspeed.elasticity import elasticity as elasticity
from deepspeed.elasticity import utils as utils
from shardwise_deepspeed.elasticity import compute_elastic_config as compute_elastic_config
from shardwise_deepspeed.elasticity import elasticity_enabled as elasticity_enabled
from shardwise_deepspeed.elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config

__all__ = ["DSElasticAgent", "compute_elastic_config", "config", "elastic_agent", "elasticity", "elasticity_enabled", "ensure_immutable_elastic_config", "utils"]

@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
class DSElasticAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
