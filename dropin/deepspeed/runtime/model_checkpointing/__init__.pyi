from deepspeed.runtime.model_checkpointing import config as config
from deepspeed.runtime.model_checkpointing import constants as constants
from deepspeed.runtime.model_checkpointing import data_parallel_writer_factory as data_parallel_writer_factory
from deepspeed.runtime.model_checkpointing import utils as utils
from deepspeed.runtime.model_checkpointing import writer_factory as writer_factory

__all__ = ["config", "constants", "data_parallel_writer_factory", "utils", "writer_factory"]
