from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["LoRAConfig", "QuantizationConfig"]

@deprecated('LoRA and quantised linear layers are not built yet')
class LoRAConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizationConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
