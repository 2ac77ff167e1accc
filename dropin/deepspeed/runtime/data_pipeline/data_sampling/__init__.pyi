from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer as data_analyzer
from deepspeed.runtime.data_pipeline.data_sampling import data_sampler as data_sampler
from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset as indexed_dataset
from deepspeed.runtime.data_pipeline.data_sampling import utils as utils
from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as variable_batch_size_and_lr

__all__ = ["data_analyzer", "data_sampler", "indexed_dataset", "utils", "variable_batch_size_and_lr"]
