from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.inference import config as config
from deepspeed.inference import engine as engine
from deepspeed.inference import v2 as v2

__all__ = ["DeepSpeedTPConfig", "InferenceEngine", "InferenceEngineV2", "RaggedInferenceEngineConfig", "build_engine_from_ds_checkpoint", "build_hf_engine", "config", "engine", "v2"]

@deprecated('inference is not built yet')
class DeepSpeedTPConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class InferenceEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class InferenceEngineV2:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class RaggedInferenceEngineConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
def build_engine_from_ds_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('inference is not built yet')
def build_hf_engine(*args: Any, **kwargs: Any) -> NoReturn: ...
