from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.inference.v2 import inference_utils as inference_utils
from deepspeed.inference.v2 import ragged as ragged

__all__ = ["InferenceEngineV2", "RaggedInferenceEngineConfig", "build_engine_from_ds_checkpoint", "build_hf_engine", "inference_utils", "ragged"]

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
