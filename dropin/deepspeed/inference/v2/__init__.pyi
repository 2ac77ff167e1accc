from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.inference.v2 import inference_utils as inference_utils
from deepspeed.inference.v2 import ragged as ragged

__all__ = ["InferenceEngineV2", "RaggedInferenceEngineConfig", "build_engine_from_ds_checkpoint", "build_hf_engine", "inference_utils", "ragged"]

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
