from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.module_inject import auto_tp as auto_tp
from deepspeed.module_inject import auto_tp_model_utils as auto_tp_model_utils
from deepspeed.module_inject import autotp_config as autotp_config
from deepspeed.module_inject import fusedqkv_utils as fusedqkv_utils
from deepspeed.module_inject import inject as inject
from deepspeed.module_inject import layers as layers
from deepspeed.module_inject import load_checkpoint as load_checkpoint
from deepspeed.module_inject import module_quantize as module_quantize
from deepspeed.module_inject import policy as policy
from deepspeed.module_inject import replace_module as replace_module
from deepspeed.module_inject import replace_policy as replace_policy
from deepspeed.module_inject import tp_plan_converter as tp_plan_converter
from deepspeed.module_inject import tp_shard as tp_shard
from deepspeed.module_inject import utils as utils
from shardwise.parallel.tensor.layers import RowParallel as LinearAllreduce
from shardwise.parallel.tensor.layers import ColumnParallel as LinearLayer

__all__ = ["DSPolicy", "EmbeddingLayer", "GroupQuantizer", "HFBertLayerPolicy", "LinearAllreduce", "LinearLayer", "Normalize", "ReplaceWithTensorSlicing", "auto_tp", "auto_tp_model_utils", "autotp_config", "fusedqkv_utils", "inject", "layers", "load_checkpoint", "module_quantize", "policy", "replace_module", "replace_policy", "replace_transformer_layer", "revert_transformer_layer", "tp_plan_converter", "tp_shard", "utils"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DSPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class EmbeddingLayer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class GroupQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFBertLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class Normalize:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class ReplaceWithTensorSlicing:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def replace_transformer_layer(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def revert_transformer_layer(*args: Any, **kwargs: Any) -> NoReturn: ...
