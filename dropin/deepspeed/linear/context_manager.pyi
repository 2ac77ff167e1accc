from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Init", "init_lora"]

@deprecated('LoRA and quantised linear layers are not built yet')
class Init:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('LoRA and quantised linear layers are not built yet')
def init_lora(*args: Any, **kwargs: Any) -> NoReturn: ...
