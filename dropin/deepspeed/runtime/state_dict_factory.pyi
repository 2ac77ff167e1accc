from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["MegatronSDLoader", "SDLoaderBase", "SDLoaderFactory"]

@deprecated('checkpoints are read in parts by init_inference(checkpoint=...) and engine.load_weights()')
class MegatronSDLoader:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are read in parts by init_inference(checkpoint=...) and engine.load_weights()')
class SDLoaderBase:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are read in parts by init_inference(checkpoint=...) and engine.load_weights()')
class SDLoaderFactory:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
