from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Quantizer"]

@deprecated('MoQ and eigenvalues of layers are not built: `compression_training.weight_quantization` lowers bits by steps')
class Quantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
