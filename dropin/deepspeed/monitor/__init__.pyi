from deepspeed.monitor import comet as comet
from deepspeed.monitor import config as config
from deepspeed.monitor import csv_monitor as csv_monitor
from deepspeed.monitor import monitor as monitor
from deepspeed.monitor import tensorboard as tensorboard
from deepspeed.monitor import utils as utils
from deepspeed.monitor import wandb as wandb

__all__ = ["comet", "config", "csv_monitor", "monitor", "tensorboard", "utils", "wandb"]
