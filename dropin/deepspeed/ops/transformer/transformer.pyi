from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerFunction", "DeepSpeedTransformerLayer", "TransformerConfig"]

@deprecated('fused layers are not built yet')
class DeepSpeedTransformerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('fused layers are not built yet')
class DeepSpeedTransformerFunction:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('fused layers are not built yet')
class DeepSpeedTransformerLayer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('fused layers are not built yet')
class TransformerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
