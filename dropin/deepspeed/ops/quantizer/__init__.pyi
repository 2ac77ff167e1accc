from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.quantizer import quantizer as quantizer

__all__ = ["ds_quantizer", "quantizer"]

@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
def ds_quantizer(*args: Any, **kwargs: Any) -> NoReturn: ...
