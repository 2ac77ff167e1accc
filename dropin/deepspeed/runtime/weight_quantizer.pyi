from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["WeightQuantization"]

@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class WeightQuantization:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
