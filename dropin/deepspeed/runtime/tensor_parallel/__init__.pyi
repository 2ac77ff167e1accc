from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.runtime.tensor_parallel import config as config
from deepspeed.runtime.tensor_parallel import init_utils as init_utils
from deepspeed.runtime.tensor_parallel import layers as layers
from deepspeed.runtime.tensor_parallel import tp_manager as tp_manager
from shardwise.config.schema.parallel import TensorParallel as TPTrainingConfig

__all__ = ["AUTOTP_MODE", "TPTrainingConfig", "TpTrainingManager", "config", "init_utils", "layers", "tp_manager"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AUTOTP_MODE:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class TpTrainingManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
