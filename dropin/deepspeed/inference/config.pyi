from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.inference.config import QuantizedActivations as ActivationQuantConfig
from shardwise.inference.config import InferenceConfig as DeepSpeedInferenceConfig
from shardwise.inference.config import Experts as DeepSpeedMoEConfig
from shardwise.inference.config import TensorParallelRanks as DeepSpeedTPConfig
from shardwise.inference.config import CheckpointPaths as InferenceCheckpointConfig
from shardwise.inference.config import QuantizedAttention as QKVQuantConfig
from shardwise.inference.config import Quantization as QuantizationConfig
from shardwise.inference.config import QuantizedValues as WeightQuantConfig

__all__ = ["ActivationQuantConfig", "BaseQuantConfig", "DeepSpeedInferenceConfig", "DeepSpeedMoEConfig", "DeepSpeedTPConfig", "DtypeEnum", "InferenceCheckpointConfig", "MoETypeEnum", "QKVQuantConfig", "QuantTypeEnum", "QuantizationConfig", "WeightQuantConfig"]

@deprecated('the configuration has words ("fp16", "symmetric") and torch\'s dtypes')
class BaseQuantConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('the configuration has words ("fp16", "symmetric") and torch\'s dtypes')
class DtypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('the configuration has words ("fp16", "symmetric") and torch\'s dtypes')
class MoETypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('the configuration has words ("fp16", "symmetric") and torch\'s dtypes')
class QuantTypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
