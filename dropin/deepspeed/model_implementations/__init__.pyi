from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.model_implementations import transformers as transformers

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedTransformerInference", "transformers"]

@deprecated('inference is not built yet')
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DeepSpeedTransformerInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
