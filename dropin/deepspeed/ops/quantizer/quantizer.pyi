from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ds_quantizer"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def ds_quantizer(*args: Any, **kwargs: Any) -> NoReturn: ...
