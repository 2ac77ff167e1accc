from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.inference import config as config
from deepspeed.inference import engine as engine
from deepspeed.inference import v2 as v2
from shardwise.inference.config import TensorParallelRanks as DeepSpeedTPConfig
from shardwise.inference import InferenceEngine as InferenceEngine

__all__ = ["DeepSpeedTPConfig", "InferenceEngine", "InferenceEngineV2", "RaggedInferenceEngineConfig", "build_engine_from_ds_checkpoint", "build_hf_engine", "config", "engine", "v2"]

@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class InferenceEngineV2:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class RaggedInferenceEngineConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
def build_engine_from_ds_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
def build_hf_engine(*args: Any, **kwargs: Any) -> NoReturn: ...
