from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DSStateManager", "DSStateManagerConfig", "RaggedBatchWrapper"]

@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class DSStateManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class DSStateManagerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class RaggedBatchWrapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
