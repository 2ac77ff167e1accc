from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Eigenvalue"]

@deprecated('eigenvalues of layers are not built: `quantize_training` lowers bits by steps')
class Eigenvalue:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
