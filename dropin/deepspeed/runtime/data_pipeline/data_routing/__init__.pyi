from deepspeed.runtime.data_pipeline.data_routing import basic_layer as basic_layer
from deepspeed.runtime.data_pipeline.data_routing import helper as helper
from deepspeed.runtime.data_pipeline.data_routing import scheduler as scheduler
from deepspeed.runtime.data_pipeline.data_routing import utils as utils

__all__ = ["basic_layer", "helper", "scheduler", "utils"]
