from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AsymQuantizer", "BinaryQuantizer", "SymQuantizer", "TernaryQuantizer", "TopKBinarizer"]

@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class AsymQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class BinaryQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class SymQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class TernaryQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
class TopKBinarizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
