from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["bsh_decoder_gather", "bsh_decoder_scatter"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def bsh_decoder_gather(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
def bsh_decoder_scatter(*args: Any, **kwargs: Any) -> NoReturn: ...
