from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ActivationType", "DtypeEnum", "NormTypeEnum", "ceil_div"]

@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class ActivationType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class DtypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
class NormTypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('continuous batching of ragged prompts (inference v2) is not built: export the weights (engine.export()) for a server such as vLLM or SGLang, or answer batches by init_inference()')
def ceil_div(*args: Any, **kwargs: Any) -> NoReturn: ...
