from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["QuantizedLinear", "QuantizedParameter"]

@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizedLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class QuantizedParameter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
