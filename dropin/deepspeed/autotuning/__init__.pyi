from deepspeed.autotuning import autotuner as autotuner
from deepspeed.autotuning import config as config
from deepspeed.autotuning import scheduler as scheduler
from deepspeed.autotuning import utils as utils
from shardwise_deepspeed.tuning import Autotuner as Autotuner

__all__ = ["Autotuner", "autotuner", "config", "scheduler", "utils"]
