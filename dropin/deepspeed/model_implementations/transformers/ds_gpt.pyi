from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedGPTInference"]

@deprecated("layers for inference are the model's own, compiled by torch.compile (init_inference, replace_with_kernel_inject)")
class DeepSpeedGPTInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
