from deepspeed.runtime.data_pipeline import config as config
from deepspeed.runtime.data_pipeline import constants as constants
from deepspeed.runtime.data_pipeline import curriculum_scheduler as curriculum_scheduler
from deepspeed.runtime.data_pipeline import data_routing as data_routing
from deepspeed.runtime.data_pipeline import data_sampling as data_sampling

__all__ = ["config", "constants", "curriculum_scheduler", "data_routing", "data_sampling"]
