from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["LoRAOptimizedLinear", "OptimizedLinear"]

@deprecated('LoRA and quantised linear layers are not built yet')
class LoRAOptimizedLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class OptimizedLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
