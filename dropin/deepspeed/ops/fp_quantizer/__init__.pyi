from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.fp_quantizer import fp8_gemm as fp8_gemm
from deepspeed.ops.fp_quantizer import quantize as quantize

__all__ = ["FP_Quantize", "Quantizer", "fp8_gemm", "matmul_fp8", "quantize"]

@deprecated('LoRA and quantised linear layers are not built yet')
class FP_Quantize:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
class Quantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
def matmul_fp8(*args: Any, **kwargs: Any) -> NoReturn: ...
