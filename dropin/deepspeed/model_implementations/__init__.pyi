from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.model_implementations import transformers as transformers

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedTransformerInference", "transformers"]

@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedTransformerInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
