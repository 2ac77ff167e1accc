from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.linear import config as config
from deepspeed.linear import context_manager as context_manager
from deepspeed.linear import optimized_linear as optimized_linear
from deepspeed.linear import quantization as quantization

__all__ = ["Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "QuantizedLinear", "QuantizedParameter", "config", "context_manager", "init_lora", "optimized_linear", "quantization"]

@deprecated('LoRA and quantised linear layers are not built yet')
class Init:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class LoRAConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class OptimizedLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizationConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizedLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizedParameter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
def init_lora(*args: Any, **kwargs: Any) -> NoReturn: ...
