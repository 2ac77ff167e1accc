from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.elasticity import compute_elastic_config as compute_elastic_config
from shardwise_deepspeed.elasticity import elasticity_enabled as elasticity_enabled
from shardwise_deepspeed.elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config

__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config", "get_best_candidates", "get_candidate_batch_sizes", "get_valid_gpus"]

@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
def get_best_candidates(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
def get_candidate_batch_sizes(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('jobs are restarted by `shardwise run --max-restarts N --min-nproc M`, and compute_elastic_config() returns batch sizes with their numbers of ranks')
def get_valid_gpus(*args: Any, **kwargs: Any) -> NoReturn: ...
