from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.layers import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from shardwise_deepspeed.layers import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerFunction", "DeepSpeedTransformerLayer", "TransformerConfig"]

@deprecated('layers are those of the model: build a DeepSpeedTransformerLayer in their place, or use engine.compile()')
class DeepSpeedTransformerFunction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('layers are those of the model: build a DeepSpeedTransformerLayer in their place, or use engine.compile()')
class TransformerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
