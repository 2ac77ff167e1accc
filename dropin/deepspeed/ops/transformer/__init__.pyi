from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.transformer import inference as inference
from deepspeed.ops.transformer import transformer as transformer
from shardwise_deepspeed.layers import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from shardwise_deepspeed.layers import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedMoEInference", "DeepSpeedTransformerConfig", "DeepSpeedTransformerInference", "DeepSpeedTransformerLayer", "inference", "transformer"]

@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedMoEInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedTransformerInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
