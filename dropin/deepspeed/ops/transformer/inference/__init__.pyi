from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.transformer.inference import config as config
from deepspeed.ops.transformer.inference import diffusers_attention as diffusers_attention
from deepspeed.ops.transformer.inference import diffusers_transformer_block as diffusers_transformer_block

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedMoEInference", "DeepSpeedTransformerInference", "config", "diffusers_attention", "diffusers_transformer_block"]

@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedMoEInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedTransformerInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
