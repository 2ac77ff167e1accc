from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.runtime import activation_checkpointing as activation_checkpointing
from deepspeed.runtime import base_optimizer as base_optimizer
from deepspeed.runtime import bf16_optimizer as bf16_optimizer
from deepspeed.runtime import checkpoint_engine as checkpoint_engine
from deepspeed.runtime import chunked_cross_entropy as chunked_cross_entropy
from deepspeed.runtime import comm as comm
from deepspeed.runtime import compiler as compiler
from deepspeed.runtime import config as config
from deepspeed.runtime import config_utils as config_utils
from deepspeed.runtime import constants as constants
from deepspeed.runtime import data_pipeline as data_pipeline
from deepspeed.runtime import dataloader as dataloader
from deepspeed.runtime import domino as domino
from deepspeed.runtime import eigenvalue as eigenvalue
from deepspeed.runtime import engine as engine
from deepspeed.runtime import fp16 as fp16
from deepspeed.runtime import hybrid_engine as hybrid_engine
from deepspeed.runtime import hybrid_engine_graph as hybrid_engine_graph
from deepspeed.runtime import keep_in_fp32 as keep_in_fp32
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime import model_checkpointing as model_checkpointing
from deepspeed.runtime import pipe as pipe
from deepspeed.runtime import precision_config as precision_config
from deepspeed.runtime import progressive_layer_drop as progressive_layer_drop
from deepspeed.runtime import python_gc as python_gc
from deepspeed.runtime import quantize as quantize
from deepspeed.runtime import sequence_parallel as sequence_parallel
from deepspeed.runtime import sparse_tensor as sparse_tensor
from deepspeed.runtime import state_dict_factory as state_dict_factory
from deepspeed.runtime import swap_tensor as swap_tensor
from deepspeed.runtime import tensor_parallel as tensor_parallel
from deepspeed.runtime import torch_autocast as torch_autocast
from deepspeed.runtime import utils as utils
from deepspeed.runtime import weight_quantizer as weight_quantizer
from deepspeed.runtime import zero as zero
from shardwise_deepspeed.optimizers import DeepSpeedOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer", "activation_checkpointing", "base_optimizer", "bf16_optimizer", "checkpoint_engine", "chunked_cross_entropy", "comm", "compiler", "config", "config_utils", "constants", "data_pipeline", "dataloader", "domino", "eigenvalue", "engine", "fp16", "hybrid_engine", "hybrid_engine_graph", "keep_in_fp32", "lr_schedules", "model_checkpointing", "pipe", "precision_config", "progressive_layer_drop", "python_gc", "quantize", "sequence_parallel", "sparse_tensor", "state_dict_factory", "swap_tensor", "tensor_parallel", "torch_autocast", "utils", "weight_quantizer", "zero"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class ZeROOptimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
